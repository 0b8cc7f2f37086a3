"""A naive oracle of the shared queue: what may be granted, who may not be passed, what must not lie idle.

It keeps what owners asked for and hears the outcomes; it does not predict the order in which the dead are buried, so it
judges decisions instead of making them. Everything is a plain scan.
"""

from msgspec import Struct

from policies.types import Ticket

SIDE = 4  # tenants of a class, and tickets of a tenant, that the queue looks at when the first fits nowhere
Who = tuple[str, int]


HURRY = 0.5  # part of its target that a ticket may wait in a class that sheds


class Asked(Struct):
    """One ticket as its owner knows it. `key` is its place in its tenant's line, once the store has told."""

    process: str
    number: int
    ticket: Ticket
    since_ms: int
    late_ms: int
    key: float = 0.0
    backend: str = ""

    @property
    def line(self) -> tuple[str, int, str]:
        return self.ticket.pool, self.ticket.rank, self.ticket.tenant


class Model:
    """All processes' tickets by (process, number), each pool's backends as (limit, open) by name, tenants' caps."""

    def __init__(self) -> None:
        self.asked: dict[Who, Asked] = {}
        self.pools: dict[str, dict[str, tuple[int, bool]]] = {}
        self.caps: dict[str, int] = {}
        self.late: set[tuple[str, int]] = set()  # pools and ranks of which one ever waited for too long
        self.shed: list[Asked] = []  # what was refused as too much, since the last look

    def declare(self, pool: str, backends: dict[str, tuple[int, bool]]) -> None:
        self.pools[pool] = backends

    def submit(self, process: str, number: int, ticket: Ticket, now_ms: int) -> None:
        self.asked[process, number] = Asked(process, number, ticket, now_ms, now_ms + ticket.waits_ms)

    def end(self, process: str, number: int, now_ms: int, slack_ms: int) -> None:
        asked = self.asked.pop((process, number), None)
        if asked is not None and not asked.backend:
            self._left(asked, now_ms, slack_ms)

    def forget(self, process: str, now_ms: int, slack_ms: int) -> None:
        """The process is dead: whatever it had is nobody's."""
        for owner, number in list(self.asked):
            if owner == process:
                self.end(owner, number, now_ms, slack_ms)

    def granted(self, process: str, number: int, backend: str, now_ms: int, slack_ms: int) -> None:
        asked = self.asked[process, number]
        assert not asked.backend, f"{process}:{number} was granted twice"
        assert now_ms <= asked.late_ms + slack_ms, f"{process}:{number} was granted after its deadline"
        assert self._may(asked, backend), f"{process}:{number} may not run on {backend}"
        asked.backend = backend
        self._left(asked, now_ms, slack_ms)

    def refused(self, process: str, number: int, why: str, now_ms: int, slack_ms: int) -> None:
        asked = self.asked.pop((process, number))
        assert not asked.backend, f"{process}:{number} was refused after its grant"
        if why in ("expired", "deadline_unreachable"):  # prompts take next to no time here
            assert now_ms >= asked.late_ms - slack_ms, f"{process}:{number}: {why} before its deadline"
        elif why == "overloaded":
            self.shed.append(asked)
        elif why == "no_backend":
            assert not self._open(asked), f"{process}:{number} heard of no backend, but there is one"
        else:
            raise AssertionError(f"{process}:{number} was refused: {why}")
        self._left(asked, now_ms, slack_ms)

    def check_order(self, keys: dict[Who, float]) -> None:
        """Of those that waited before with these keys and were granted since, none passed one of its own tenant that is
        not larger and could have run there."""
        before = [self.asked[who] for who in keys if who in self.asked]
        for asked in (a for a in before if a.backend):
            for other in before:
                ahead = keys[other.process, other.number] < keys[asked.process, asked.number]
                if ahead and not other.backend and other.line == asked.line:
                    larger = other.ticket.uncached_tokens > asked.ticket.uncached_tokens
                    assert larger or not self._may(other, asked.backend), f"{asked} passed {other}"

    def check_caps(self, flights: dict[str, tuple[int, int]], flights_before: dict[str, tuple[int, int]]) -> None:
        """Tokens in flight and leases by tenant: with one lease more they stay within the cap, or it is one alone."""
        for tenant, (flight, leases) in flights.items():
            more = leases > max(1, flights_before.get(tenant, (0, 0))[1])
            cap = self.caps.get(tenant, 0)
            assert not (more and cap and flight > cap), f"{tenant} has {flight} tokens in flight, more than {cap}"

    def check_sheds(self) -> None:
        """Nothing was shed but what may be, while somebody of its class or a better one had waited for too long."""
        for ticket in (asked.ticket for asked in self.shed):
            late = any((ticket.pool, rank) in self.late for rank in range(ticket.rank + 1))
            assert late and ticket.target_ms, f"{ticket} was shed"
        self.shed.clear()

    def check_work(
        self, pool: str, windows: dict[str, float], keys: dict[Who, float], flights: dict[str, tuple[int, int]]
    ) -> None:
        """No backend has room that one of the first who wait could use. `windows`: prompt tokens that each would still
        take, of those with a place free."""
        at_cap = set()  # lines whose first ticket waits for its tenant's tokens: nobody passes it within its line
        for asked in self._front(pool, keys):
            ticket = asked.ticket
            cap, flight = self.caps.get(ticket.tenant, 0), flights.get(ticket.tenant, (0, 0))[0]
            if asked.line in at_cap or (cap and flight and flight + ticket.prompt_tokens + ticket.output_tokens > cap):
                at_cap.add(asked.line)
                continue
            idle = [n for n, left in windows.items() if ticket.uncached_tokens <= left and self._may(asked, n)]
            assert not idle, f"{asked} waits while {idle} have room"

    def _left(self, asked: Asked, now_ms: int, slack_ms: int) -> None:
        target = asked.ticket.target_ms
        if target and now_ms - asked.since_ms > HURRY * target - slack_ms:
            self.late.add((asked.ticket.pool, asked.ticket.rank))

    def _front(self, pool: str, keys: dict[Who, float]) -> list[Asked]:
        """Who waits and is looked at: the first tickets of each tenant of each class."""
        front: list[Asked] = []
        counts: dict[tuple[str, int, str], int] = {}
        for who in sorted(keys, key=lambda who: keys[who]):
            asked = self.asked.get(who)
            if asked is None or asked.backend or asked.ticket.pool != pool:
                continue
            counts[asked.line] = counts.get(asked.line, 0) + 1
            if counts[asked.line] <= SIDE:
                front.append(asked)
        return front

    def _names(self, asked: Asked) -> list[str]:
        declared = list(self.pools.get(asked.ticket.pool, {}))
        return [declared[i] for i in asked.ticket.backends] or declared

    def _may(self, asked: Asked, backend: str) -> bool:
        return backend in self._names(asked) and self.pools[asked.ticket.pool].get(backend, (0, False))[1]

    def _open(self, asked: Asked) -> list[str]:
        return [name for name in self._names(asked) if self.pools[asked.ticket.pool][name][1]]
