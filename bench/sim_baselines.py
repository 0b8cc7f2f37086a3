"""What Signalbox is compared with: the engine's own queue, a static cap, and the gates of today's gateways."""

import heapq
import itertools
from collections.abc import Callable, Mapping

from bench.sim_site import Call, Seen, Site

GATE_WAITING, GATE_KV = 5, 0.8
"""llm-d's saturation: max(waiting / 5, KV / 0.8) of an engine. Its numbers are polled; these here are never stale."""

TINY = 1e-9  # requests: what rounding may take from a bucket
BURST_S = 10.0  # what a tenant may save up of its rate

Order = Callable[[Call], float]
Room = Callable[[Site], int | None]
"""The engine that may take one more, or None."""


class PassThrough:
    """Every request goes to the engine with the fewest at once: first come, first served, inside the engine."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def arrive(self, call: Call) -> None:
        self._site.start(call, least(self._site.in_flight))

    def stepped(self, seen: Seen, calls: list[Call]) -> None:
        pass

    def left(self, call: Call) -> None:
        pass

    def act(self) -> None:
        pass

    def close(self) -> None:
        pass


class Queued:
    """A queue in front of the engines: ordered by `order`, opened by `room`, and left at the first-token deadline."""

    def __init__(self, site: Site, order: Order, room: Room) -> None:
        self._site, self._order, self._room = site, order, room
        self._line: list[tuple[float, int, Call]] = []
        self._late: list[tuple[float, int, Call]] = []
        self._waiting: set[int] = set()

    def arrive(self, call: Call) -> None:
        heapq.heappush(self._line, (self._order(call), call.number, call))
        if call.deadline_ms != float("inf"):
            heapq.heappush(self._late, (call.deadline_ms, call.number, call))
            self._site.wake(call.deadline_ms)
        self._waiting.add(call.number)

    def stepped(self, seen: Seen, calls: list[Call]) -> None:
        pass

    def left(self, call: Call) -> None:
        self._waiting.discard(call.number)

    def act(self) -> None:
        site = self._site
        while self._late and self._late[0][0] <= site.now_ms:
            call = heapq.heappop(self._late)[2]
            if call.number in self._waiting:
                self._waiting.remove(call.number)
                site.refuse(call, "expired")
        while self._line:
            call = self._line[0][2]
            if call.number in self._waiting:
                engine = self._room(site)
                if engine is None:
                    return
                self._waiting.remove(call.number)
                site.start(call, engine)
            heapq.heappop(self._line)

    def close(self) -> None:
        pass


class RateLimited:
    """A rate per tenant, as API gateways have it: a bucket that fills with `rates` requests/s up to `burst_s` of them.

    Who finds it empty is refused and told when there is a place; all others go to the engines at once.
    """

    def __init__(self, site: Site, rates: Mapping[str, float], burst_s: float = BURST_S) -> None:
        self._site = site
        self._rates = rates
        self._most = {name: max(1.0, rate * burst_s) for name, rate in rates.items()}
        self._buckets = {name: (most, 0.0) for name, most in self._most.items()}

    def arrive(self, call: Call) -> None:
        site, name = self._site, call.tenant.name
        left, since_ms = self._buckets[name]
        left = min(self._most[name], left + self._rates[name] * (site.now_ms - since_ms) / 1000)
        if left >= 1 - TINY:
            self._buckets[name] = left - 1, site.now_ms
            site.start(call, least(site.in_flight))
            return
        self._buckets[name] = left, site.now_ms
        site.refuse(call, "rate_limited", (1 - left) / self._rates[name] * 1000)

    def stepped(self, seen: Seen, calls: list[Call]) -> None:
        pass

    def left(self, call: Call) -> None:
        pass

    def act(self) -> None:
        pass

    def close(self) -> None:
        pass


def least(counts: list[int]) -> int:
    """The first of the smallest."""
    return min(range(len(counts)), key=counts.__getitem__)


def first_come(call: Call) -> float:
    return call.arrival_ms


def earliest_deadline(call: Call) -> float:
    return call.deadline_ms


def below(cap: int) -> Room:
    """An engine with fewer than `cap` requests in flight."""

    def room(site: Site) -> int | None:
        engine = least(site.in_flight)
        return engine if site.in_flight[engine] < cap else None

    return room


def unsaturated(site: Site) -> int | None:
    """The least saturated engine, if it is not."""
    marks = [max(engine.waiting / GATE_WAITING, engine.kv_used / GATE_KV) for engine in site.engines]
    engine = min(range(len(marks)), key=marks.__getitem__)
    return engine if marks[engine] < 1 else None


def spread(caps: tuple[int, ...], judge: Callable[[int], float]) -> tuple[int, dict[int, float]]:
    """The cap with the best mark, and all marks: a sweep in order that ends after two in a row below the best."""
    marks: dict[int, float] = {}
    for cap in caps:
        marks[cap] = judge(cap)
        last = list(itertools.islice(reversed(marks.values()), 2))
        if len(marks) > 2 and max(last) < max(marks.values()):
            break
    return max(marks, key=marks.__getitem__), marks
