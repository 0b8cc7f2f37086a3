"""The keys of the shared queue, as `lua/` writes them. All carry one hash tag: one slot, one atomic script.

    meta                                schema, logical now, the server's clock at that time, last reaping, unfinished
    procs                               zset of processes by their last beat
    p:<process>                         number and whole reply of its last turn, highest ticket number
    p:<process>:l                       hash of its tickets, packed, by number
    p:<process>:m                       stream of outcomes that others' turns brought it
    pools                               set of pool names
    o:<pool>                            hash: `pool` record, `names` to slots, `sizes`, one `b<slot>` per backend
    a:<pool>                            hash of accounts by <rank>:<tenant>: virtual counter, what waits and runs
    t                                   hash of tenants with limits: what they may use and do use
    w:<rank>:<pool>                     zset of tenants with something waiting and below their cap, by counter
    q:<rank>:<length>:<pool>:<tenant>   zset of their tickets
    k:<tenant>                          zset of the deadlines that requests keep when they come again

Owners: a process owns `p:` and its members of `q:`, `w:` and `procs` until it says bye or is reaped; the namespace's
last process takes the rest with it. `k:` ends a minute after the last deadline in it.
"""

SCHEMA = 3


class Keys:
    """Key names of one namespace."""

    __slots__ = ("prefix",)

    def __init__(self, namespace: str) -> None:
        self.prefix = f"{{{namespace}}}:"

    def mailbox(self, process: str) -> str:
        return f"{self.prefix}p:{process}:m"

    def tickets(self, process: str) -> str:
        return f"{self.prefix}p:{process}:l"

    def process(self, process: str) -> str:
        return f"{self.prefix}p:{process}"

    def pool(self, pool: str) -> str:
        return f"{self.prefix}o:{pool}"

    def accounts(self, pool: str) -> str:
        return f"{self.prefix}a:{pool}"

    def tenants(self, pool: str, rank: int) -> str:
        return f"{self.prefix}w:{rank}:{pool}"

    def line(self, pool: str, rank: int, tenant: str) -> str:
        return f"{self.prefix}q:{rank}:{len(pool.encode())}:{pool}:{tenant}"

    def recalled(self, tenant: str) -> str:
        return f"{self.prefix}k:{tenant}"

    @property
    def meta(self) -> str:
        return f"{self.prefix}meta"

    @property
    def limits(self) -> str:
        return f"{self.prefix}t"

    @property
    def processes(self) -> str:
        return f"{self.prefix}procs"
