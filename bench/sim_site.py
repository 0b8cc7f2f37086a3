"""A site in virtual milliseconds: clients, simulated engines, and the strategy between them that is under test.

Nothing waits and no clock is read: the next event is taken, its instant becomes now, the strategy acts once on all that
happened at it, and idle engines begin their next step. The same arrivals and the same strategy give the same run.
"""

import enum
import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from msgspec import Struct

from backends.simengine import Engine, Sequence, Step
from bench.sim_workload import Arrival, Tenant
from policies.steptime import Work


class Outcome(enum.StrEnum):
    OPEN = "open"
    DONE = "done"
    REFUSED = "refused"
    LEFT = "left"


class Call:
    """One request as a gateway knows it: how long its answer will be is not among it. Times in ms, -1 for not yet;
    `stall_ms` is the longest between two tokens.

    A refused client that comes again keeps its call: `attempts` grows and `arrival_ms` is that of the last one.
    """

    __slots__ = (
        "arrival_ms",
        "attempts",
        "came_ms",
        "end_ms",
        "engine",
        "first_ms",
        "last_ms",
        "max_tokens",
        "number",
        "outcome",
        "produced",
        "prompt_tokens",
        "queued",
        "reason",
        "refused_ms",
        "sent_ms",
        "stall_ms",
        "tenant",
    )

    def __init__(self, number: int, arrival: Arrival) -> None:
        self.number = number
        self.tenant: Tenant = arrival.tenant
        self.prompt_tokens = arrival.prompt_tokens
        self.max_tokens = arrival.max_tokens or arrival.tenant.max_tokens
        self.came_ms = self.arrival_ms = arrival.at_ms
        self.attempts = 0
        self.engine = -1
        self.sent_ms = self.first_ms = self.last_ms = self.end_ms = self.refused_ms = -1.0
        self.stall_ms = 0.0
        self.produced = 0
        self.queued = False
        self.outcome = Outcome.OPEN
        self.reason = ""

    def __repr__(self) -> str:
        return f"<Call {self.number} of {self.tenant.name}, {self.outcome}, {self.produced} produced>"

    @property
    def deadline_ms(self) -> float:
        """For its first token."""
        ttft_ms = self.tenant.objective.ttft_ms
        return self.arrival_ms + ttft_ms if ttft_ms else float("inf")

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first; 0 where there was none."""
        return (self.end_ms - self.first_ms) / (self.produced - 1) if self.produced > 1 else 0.0

    @property
    def good(self) -> bool:
        """Answered in full, within all objectives."""
        if self.outcome is not Outcome.DONE or self.first_ms > self.deadline_ms:
            return False
        aim = self.tenant.objective
        if aim.total_ms and self.end_ms - self.arrival_ms > aim.total_ms:
            return False
        return not aim.tpot_ms or self.tpot_ms <= aim.tpot_ms


class Seen(Struct, frozen=True):
    """One engine step that has passed, as an engine's statistics tell it."""

    engine: int
    work: Work
    seconds: float


class Strategy(Protocol):
    """What stands between clients and engines. It answers by `site.start` and `site.refuse`, at any time."""

    def arrive(self, call: Call) -> None: ...

    def stepped(self, seen: Seen, calls: list[Call]) -> None:
        """A step has ended; `calls` have a new token each, and those that are done their last."""

    def left(self, call: Call) -> None:
        """A client has gone, from the queue or from an engine, which knows it already."""

    def act(self) -> None:
        """All that happened at this instant has been told."""

    def close(self) -> None:
        """The run is over; raises if anything is left behind."""


class Meter(Protocol):
    """Listens to every step as it ends, with the work of each sequence still as it was before."""

    def step(self, site: "Site", work: Iterable[tuple["Request", int]]) -> None: ...


class Request(Sequence):
    """A call inside an engine. Holds the truth about its length, so strategies get calls only."""

    __slots__ = ("call",)

    def __init__(self, call: Call, output_tokens: int) -> None:
        super().__init__(call.prompt_tokens, output_tokens)
        self.call = call


class _Kind(enum.IntEnum):
    ARRIVE, STEP, LEAVE, WAKE, CHANGE = range(5)


class Site:
    """Engines, clients and the clock. `in_flight` counts what each engine has and has not ended, `queued` the calls of
    each tenant that were neither sent nor refused.

    Refused clients come again `retries` times, after the time they were told. `late_work` counts steps of sequences
    whose client had gone.
    """

    def __init__(self, engines: list[Engine], arrivals: list[Arrival], retries: int = 0) -> None:
        self.engines = engines
        self.in_flight = [0] * len(engines)
        self.queued: dict[str, int] = {}
        self.now_ms = 0.0
        self.calls = [Call(number, arrival) for number, arrival in enumerate(arrivals)]
        self.open = len(self.calls)
        self.late_work = 0
        self.busy_ms = 0.0
        self.meter: Meter | None = None
        self._truth = [arrival.output_tokens for arrival in arrivals]
        self._retries = retries
        self._requests: dict[int, Request] = {}
        self._steps: list[tuple[Step, Seen] | None] = [None] * len(engines)
        self._leaving = [False] * len(engines)  # whether a client has gone since the step of that engine began
        self._order = itertools.count()
        self._heap: list[tuple[float, int, _Kind, Any]] = []
        for call, arrival in zip(self.calls, arrivals, strict=True):
            self._push(arrival.at_ms, _Kind.ARRIVE, call)
            if arrival.leave_ms != float("inf"):
                self._push(arrival.at_ms + arrival.leave_ms, _Kind.LEAVE, call)

    def __repr__(self) -> str:
        return f"<Site at {self.now_ms:.0f} ms, {self.open} open of {len(self.calls)}, {self.in_flight} in flight>"

    # for strategies

    def start(self, call: Call, engine: int) -> None:
        """Send it to an engine."""
        self._unqueue(call)
        request = self._requests[call.number] = Request(call, self._truth[call.number])
        call.engine, call.sent_ms = engine, self.now_ms
        self.in_flight[engine] += 1
        self.engines[engine].add(request)

    def refuse(self, call: Call, reason: str, retry_after_ms: float = 0.0) -> None:
        """Say no to one that was not sent."""
        self._unqueue(call)
        if call.refused_ms < 0:
            call.refused_ms = self.now_ms
        call.reason = reason
        if retry_after_ms > 0 and call.attempts < self._retries:
            call.attempts += 1
            self._push(self.now_ms + retry_after_ms, _Kind.ARRIVE, call)
            return
        self._end(call, Outcome.REFUSED)

    def wake(self, at_ms: float) -> None:
        """Have `act` called at a time, at least."""
        self._push(max(at_ms, self.now_ms), _Kind.WAKE, None)

    # for experiments

    def change(self, at_ms: float, what: Callable[[], None]) -> None:
        """Do something to the world at a time."""
        self._push(at_ms, _Kind.CHANGE, what)

    def run(self, strategy: Strategy, until_ms: float = float("inf")) -> None:
        """Until every call has ended, or until a time."""
        heap = self._heap
        while self.open and heap and heap[0][0] <= until_ms:
            self.now_ms = heap[0][0]
            while heap and heap[0][0] <= self.now_ms:
                _, _, kind, what = heapq.heappop(heap)
                self._happen(strategy, kind, what)
            strategy.act()
            for engine, step in enumerate(self._steps):
                if step is None:
                    self._begin(engine)
        strategy.close()

    def _happen(self, strategy: Strategy, kind: _Kind, what: Any) -> None:
        if kind is _Kind.STEP:
            self._finish(strategy, what)
        elif kind is _Kind.ARRIVE:
            if what.outcome is Outcome.OPEN:
                what.arrival_ms = self.now_ms
                what.queued = True
                self.queued[what.tenant.name] = self.queued.get(what.tenant.name, 0) + 1
                strategy.arrive(what)
        elif kind is _Kind.LEAVE:
            self._leave(strategy, what)
        elif kind is _Kind.CHANGE:
            what()

    def _begin(self, number: int) -> None:
        engine = self.engines[number]
        step = None if engine.idle else engine.plan()
        if step is None:
            return
        prefills = step.work[step.running :]
        context = sum(one.computed for one, _ in prefills)
        work = Work(1, step.prefill_tokens, step.running, step.kv_tokens, context)
        self._steps[number] = step, Seen(number, work, step.seconds)
        self.busy_ms += step.seconds * 1000
        self._push(self.now_ms + step.seconds * 1000, _Kind.STEP, number)

    def _finish(self, strategy: Strategy, number: int) -> None:
        taken = self._steps[number]
        assert taken is not None
        step, seen = taken
        self._steps[number] = None
        if self.meter is not None:
            self.meter.step(self, step.work)  # type: ignore[arg-type]
        calls, now_ms = [], self.now_ms
        if self._leaving[number]:
            self._leaving[number] = False
            self.late_work += sum(one.cancelled for one, _ in step.work)
        for request in self.engines[number].apply(step):
            call: Call = request.call  # type: ignore[attr-defined]
            call.produced = request.produced
            calls.append(call)
            if call.first_ms < 0:
                call.first_ms = now_ms
            elif now_ms - call.last_ms > call.stall_ms:
                call.stall_ms = now_ms - call.last_ms
            call.last_ms = now_ms
            if request.produced >= request.output_tokens:
                self._end(call, Outcome.DONE)
        strategy.stepped(seen, calls)

    def _leave(self, strategy: Strategy, call: Call) -> None:
        if call.outcome is not Outcome.OPEN:
            return
        if call.engine >= 0:
            self.engines[call.engine].cancel(self._requests[call.number])
            self._leaving[call.engine] = True
        elif call.queued:
            self._unqueue(call)
        self._end(call, Outcome.LEFT)
        strategy.left(call)

    def _unqueue(self, call: Call) -> None:
        if not call.queued:
            raise ValueError(f"{call!r} is not waiting for an answer")
        call.queued = False
        self.queued[call.tenant.name] -= 1

    def _end(self, call: Call, outcome: Outcome) -> None:
        call.outcome, call.end_ms = outcome, self.now_ms
        if call.engine >= 0:
            self.in_flight[call.engine] -= 1
            del self._requests[call.number]
        self.open -= 1

    def _push(self, at_ms: float, kind: _Kind, what: Any) -> None:
        heapq.heappush(self._heap, (at_ms, next(self._order), kind, what))
