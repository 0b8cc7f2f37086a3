"""A naive oracle of the shared queue: what may be granted, who may not be passed, what must not lie idle.

It keeps what owners asked for and hears the outcomes; it does not predict the order in which the dead are buried, so it
judges decisions instead of making them. Everything is a plain scan.
"""

from msgspec import Struct

from policies.types import Ticket

SIDE = 4  # tenants of a class, and tickets of a tenant, that the queue looks at when the first fits nowhere


class Asked(Struct):
    """One ticket as its owner knows it. `key` orders within a rank: first what held a lease before, then by arrival."""

    process: str
    number: int
    ticket: Ticket
    key: tuple[int, int]
    late_ms: int
    backend: str = ""


class Model:
    """All processes' tickets by (process, number), and the backends of each pool as (limit, open) by name."""

    def __init__(self) -> None:
        self.asked: dict[tuple[str, int], Asked] = {}
        self.pools: dict[str, dict[str, tuple[int, bool]]] = {}
        self.arrivals = 0

    def declare(self, pool: str, backends: dict[str, tuple[int, bool]]) -> None:
        self.pools[pool] = backends

    def submit(self, process: str, number: int, ticket: Ticket, now_ms: int) -> None:
        self.arrivals += 1
        key = (0 if ticket.retry else 1, self.arrivals)
        self.asked[process, number] = Asked(process, number, ticket, key, now_ms + ticket.waits_ms)

    def end(self, process: str, number: int) -> None:
        self.asked.pop((process, number), None)

    def forget(self, process: str) -> None:
        """The process is dead: whatever it had is nobody's."""
        for owner, number in list(self.asked):
            if owner == process:
                del self.asked[owner, number]

    def waiting(self, pool: str) -> list[Asked]:
        asked = [a for a in self.asked.values() if not a.backend and a.ticket.pool == pool]
        return sorted(asked, key=lambda a: (a.ticket.rank, a.key))

    def granted(self, process: str, number: int, backend: str, now_ms: int, slack_ms: int) -> None:
        asked = self.asked[process, number]
        assert not asked.backend, f"{process}:{number} was granted twice"
        assert now_ms <= asked.late_ms + slack_ms, f"{process}:{number} was granted after its deadline"
        assert self._may(asked, backend), f"{process}:{number} may not run on {backend}"
        asked.backend = backend

    def refused(self, process: str, number: int, why: str, now_ms: int, slack_ms: int) -> None:
        asked = self.asked.pop((process, number))
        assert not asked.backend, f"{process}:{number} was refused after its grant"
        if why == "expired":
            assert now_ms >= asked.late_ms - slack_ms, f"{process}:{number} expired before its deadline"
        elif why == "no_backend":
            assert not self._open(asked), f"{process}:{number} heard of no backend, but there is one"
        else:
            raise AssertionError(f"{process}:{number} was refused: {why}")

    def check_order(self, before: set[tuple[str, int]], now_ms: int) -> None:
        """Of those that waited `before` and were granted since, none passed one that could have run there."""
        for key in before & self.asked.keys():
            asked = self.asked[key]
            for other in self._front(asked.ticket.pool, now_ms) if asked.backend else ():
                ahead = (other.ticket.rank, other.key) < (asked.ticket.rank, asked.key)
                assert not (ahead and self._may(other, asked.backend)), f"{asked} passed {other}"

    def check_work(self, pool: str, room: dict[str, int], now_ms: int) -> None:
        """No backend has room that one of the first who wait could use."""
        for asked in self._front(pool, now_ms):
            idle = [name for name, left in room.items() if left > 0 and self._may(asked, name)]
            assert not idle, f"{asked} waits while {idle} have room"

    def _front(self, pool: str, now_ms: int) -> list[Asked]:
        """Who waits and is looked at: the first tickets of the first tenants of each class."""
        front: list[Asked] = []
        tenants: dict[int, list[str]] = {}
        counts: dict[tuple[int, str], int] = {}
        for asked in self.waiting(pool):
            rank, tenant = asked.ticket.rank, asked.ticket.tenant
            seen = tenants.setdefault(rank, [])
            if tenant not in seen:
                seen.append(tenant)
            counts[rank, tenant] = counts.get((rank, tenant), 0) + 1
            looked_at = seen.index(tenant) < SIDE and counts[rank, tenant] <= SIDE
            if looked_at and asked.late_ms > now_ms and len(front) < SIDE * SIDE:
                front.append(asked)
        return front

    def _names(self, asked: Asked) -> list[str]:
        declared = list(self.pools.get(asked.ticket.pool, {}))
        return [declared[i] for i in asked.ticket.backends] or declared

    def _may(self, asked: Asked, backend: str) -> bool:
        return backend in self._names(asked) and self.pools[asked.ticket.pool].get(backend, (0, False))[1]

    def _open(self, asked: Asked) -> list[str]:
        return [name for name in self._names(asked) if self.pools[asked.ticket.pool][name][1]]
