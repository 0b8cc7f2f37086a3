"""Signalbox under test: the real queue on a private store, tickets and shares from the real policies.

Nothing here knows how long an answer will be: the estimates stand on answers that have ended and steps that have
passed.
"""

import math
import random
from collections.abc import Sequence

from msgspec import Struct

from backends.simengine import Shape
from bench.sim_site import Call, Outcome, Seen, Site
from bench.sim_store import KEYS, Process, SimulationFault, Store
from gateway.queue.place import Phase, Place
from gateway.queue.share import BackendShare, PoolShare
from policies.fairness import prices
from policies.forecast import Demand, Due, Load, Safety, Verdict, failed, idle_tests
from policies.kv import Deviations
from policies.lengths import Kind, Lengths, Outlook
from policies.order import Order
from policies.quota import TenantLimits
from policies.reasons import Reason
from policies.steptime import START, Coefficients, StepModel
from policies.types import ServiceClass, Ticket

MODEL = "m"
ORDER = Order()
MOST_JITTER = 1.25  # on top of the time that a refused client is told, as in `gateway.http.errors`
CONFIGURED_RATE = 8000  # prompt tokens/s until step times are known, as in `gateway.pool`
NO_DEADLINE_MS = 3_600_000
PROGRESS_TOKENS = 32  # between two words on what a lease is expected to hold
HEADROOM = 0.95  # of the KV cache that may be planned with
CONTEXT_TOKENS = 1500.0  # mean context of a running request before any was seen
SHARE_CHANGE = 0.05  # relative, below which a backend's numbers are not declared again


class Beliefs(Struct, frozen=True, kw_only=True):
    """How the gateway's picture differs from the truth, for experiments. All 1 and false: as it is in production.

    `start_rate` is the factor on the speed that is configured, learned away; `rate` that on all speeds that the queue
    is told, for good; `prompt` that on prompt tokens; `reserve` takes `max_tokens` for the expected output.
    `shed_after` is the class's setting.
    """

    start_rate: float = 1.0
    rate: float = 1.0
    prompt: float = 1.0
    reserve: bool = False
    shed_after: float = 0.95


class Estimates:
    """What one gateway process believes of lengths and engines, which have one shape, or `shapes`."""

    def __init__(self, shape: Shape, engines: int, beliefs: Beliefs, shapes: Sequence[Shape] = ()) -> None:
        self.shape = shape
        self.shapes = tuple(shapes) or (shape,) * engines
        self.beliefs = beliefs
        self.service = ServiceClass(name="any", rank=1, shed_after=beliefs.shed_after)
        self.lengths = Lengths()
        self.models = [StepModel(_scaled(START, 1 / beliefs.start_rate)) for _ in range(engines)]
        self.safety = [Safety() for _ in range(engines)]
        self.deviations = [Deviations(0.0) for _ in range(engines)]
        self._preempted = [0] * engines
        self._context = CONTEXT_TOKENS
        self._running = 0.0

    def outlook(self, call: Call) -> Outlook:
        if self.beliefs.reserve:
            return Outlook(float(call.max_tokens), 0.0, 1, call.max_tokens, 0)
        return self.lengths.outlook(Kind(call.tenant.name, MODEL), call.produced, call.max_tokens)

    def prompt_tokens(self, call: Call) -> int:
        return max(1, round(self.beliefs.prompt * call.prompt_tokens))

    def learn(self, seen: Seen, now_ms: float) -> None:
        shape = self.shapes[seen.engine]
        used = min(1.0, seen.work.running / shape.max_running)
        self.models[seen.engine].observe(seen.work, seen.seconds, now_ms / 1000, max(used, _filled(seen, shape)))
        if seen.work.running:
            self._context += 0.01 * (seen.work.kv_tokens / seen.work.running - self._context)
        self._running += 0.01 * (seen.work.running - self._running)

    def first_token(self, call: Call, expected_s: float) -> None:
        """The first token of a call has come, `expected_s` after its grant by the queue's forecast."""
        took_s, left_s = (call.first_ms - call.sent_ms) / 1000, (call.deadline_ms - call.sent_ms) / 1000
        if expected_s > 0 and took_s > 0:
            self.safety[call.engine].observe(expected_s, took_s, left_s)

    def preempted(self, engine: int, so_far: int, now_ms: float) -> None:
        """What an engine's gauge says, once a second."""
        self.deviations[engine].observe(so_far - self._preempted[engine], now_ms / 1000)
        self._preempted[engine] = so_far

    def ended(self, call: Call) -> None:
        censored = call.outcome is Outcome.LEFT or call.produced >= call.max_tokens
        self.lengths.add(Kind(call.tenant.name, MODEL), call.produced, censored)

    def share(self, engine: int) -> BackendShare:
        """What the queue may hand to an engine: until the model is warm only the configured speed is told."""
        shape, model = self.shapes[engine], self.models[engine]
        if not model.warm:
            rate = CONFIGURED_RATE * self.beliefs.start_rate * self.beliefs.rate
            return self._share(engine, int(rate), Coefficients(a0_s=0, a1_s=0, a2_s=0, a3_s=0, a4_s=0))
        rate = model.prefill_rate(shape.chunk_tokens, self._running, self._running * self._context)
        times = _scaled(model.coefficients, 1 / (model.trim.theta * self.beliefs.rate))
        return self._share(engine, max(1, int(rate * self.beliefs.rate)), times)

    def _share(self, engine: int, rate: int, times: Coefficients) -> BackendShare:
        return BackendShare(
            name=f"e{engine}",
            max_running=self.shapes[engine].max_running,
            prefill_tokens_per_s=rate,
            kv_tokens=int(HEADROOM * self.shapes[engine].kv_tokens),
            chunk_tokens=self.shapes[engine].chunk_tokens,
            step_us=round(times.a0_s * 1e6),
            prefill_ns=round(times.a1_s * 1e9),
            running_us=round(times.a2_s * 1e6),
            kv_ns=round(times.a3_s * 1e9),
            safety_milli=round(self.safety[engine].factor * 1000),
            kv_deviations_milli=round(self.deviations[engine].z * 1000),
        )

    def impossible(self, call: Call) -> Verdict | None:
        """Why no idle engine could make it; None where one could."""
        aim = call.tenant.objective
        prompt = self.prompt_tokens(call)
        due = Due(_seconds(aim.ttft_ms), _seconds(aim.tpot_ms), _seconds(aim.total_ms))
        demand = Demand(prompt, prompt, self.outlook(call), due)
        pairs = zip(self.models, self.shapes, strict=True)
        verdicts = [failed(idle_tests(model, _idle(shape), demand)) for model, shape in pairs]
        return None if None in verdicts else verdicts[0]


def ticket_for(call: Call, now_ms: float, estimates: Estimates) -> Ticket:
    """The numbers with which a call goes to the queue: the one place that knows a ticket's fields."""
    aim, outlook = call.tenant.objective, estimates.outlook(call)
    prompt, cost = estimates.prompt_tokens(call), prices(call.tenant.weight)
    waits_ms = max(0, math.floor(call.deadline_ms - now_ms)) if aim.ttft_ms else NO_DEADLINE_MS
    return Ticket(
        tenant=call.tenant.name,
        rank=call.tenant.rank,
        pool=MODEL,
        prompt_tokens=prompt,
        output_tokens=math.ceil(outlook.mean),
        waits_ms=waits_ms,
        total_ms=aim.total_ms,
        tpot_ms=aim.tpot_ms,
        output_variance=round(outlook.variance),
        output_high=outlook.q90,
        key_ms=ORDER.key_ms(waits_ms, prompt),
        prefill_price=cost.prefill,
        output_price=cost.output,
        target_ms=estimates.service.target_ms(waits_ms) if aim.ttft_ms else 0,
    )


class Gateway:
    """One process: its queue and its estimates."""

    def __init__(self, site: Site, process: Process, estimates: Estimates) -> None:
        self.process, self.estimates = process, estimates
        self._site = site
        self._places: dict[int, tuple[Place, Call]] = {}
        self._numbers: dict[int, int] = {}
        self._shares: tuple[BackendShare, ...] = ()
        self._declare_ms = 0.0
        self._jitter = random.Random(0)
        process.settled = self._settled

    def declare(self) -> None:
        """Tell the queue what the engines may carry, where that has changed enough."""
        shares = tuple(self.estimates.share(engine) for engine in range(len(self._site.engines)))
        if not self._shares or any(map(_differ, shares, self._shares)):
            self._shares = shares
            self.process.book.declare(PoolShare(MODEL, shares))

    def arrive(self, call: Call) -> None:
        verdict = self.estimates.impossible(call)
        if verdict is not None:
            self._site.refuse(call, verdict.reason or "deadline_impossible")
            return
        limits = TenantLimits(tokens_per_min=call.tenant.tokens_per_minute)
        self.process.book.declare_tenant(call.tenant.name, limits)
        now_ms = self._site.now_ms
        place = self.process.book.submit(ticket_for(call, now_ms, self.estimates), now_ms / 1000)
        self._places[place.number] = place, call
        self._numbers[call.number] = place.number

    def stepped(self, seen: Seen) -> None:
        self.estimates.learn(seen, self._site.now_ms)
        if self._site.now_ms >= self._declare_ms:
            self._declare_ms = self._site.now_ms + 1000
            for number, engine in enumerate(self._site.engines):
                self.estimates.preempted(number, engine.preemptions, self._site.now_ms)
            self.declare()

    def token(self, call: Call) -> None:
        """A first token of a call of this process has come, or its last, or another PROGRESS_TOKENS of them."""
        place, _ = self._places[self._numbers[call.number]]
        if call.outcome is Outcome.DONE:
            self._let_go(call)
            return
        if call.produced == 1:
            self.estimates.first_token(call, place.expected_s)
            place.first_token()
        else:
            outlook = self.estimates.outlook(call)
            place.progress(call.prompt_tokens + math.ceil(outlook.mean), round(outlook.variance))

    def left(self, call: Call) -> None:
        if call.number in self._numbers:
            self._let_go(call)

    def _let_go(self, call: Call) -> None:
        place, _ = self._places.pop(self._numbers.pop(call.number))
        place.end(call.produced, ran=call.first_ms >= 0)
        if call.engine >= 0:
            self.estimates.ended(call)

    def _settled(self, number: int) -> None:
        found = self._places.get(number)
        if found is None:
            return
        place, call = found
        if place.phase is Phase.HELD and call.engine < 0:
            self._site.start(call, place.position)
        elif place.phase is Phase.REFUSED:
            del self._places[number], self._numbers[call.number]
            refusal = place.refusal
            assert refusal is not None
            spread = 1.0 if refusal.reason is Reason.RATE_LIMITED else self._jitter.uniform(1.0, MOST_JITTER)
            self._site.refuse(call, refusal.reason, refusal.retry_after_s * 1000 * spread)


class Signalbox:
    """Gateway processes on one store; calls go to them in turn. The store is emptied first."""

    def __init__(
        self, site: Site, store: Store, processes: int = 1, beliefs: Beliefs | None = None, max_queued: int = 10_000
    ) -> None:
        self._site, self._store = site, store
        store.ask("FLUSHALL")
        shapes = [engine.shape for engine in site.engines]
        self.gateways = [
            Gateway(
                site,
                Process(store, f"p{i}", max_queued, site),
                Estimates(shapes[0], len(shapes), beliefs or Beliefs(), shapes),
            )
            for i in range(processes)
        ]
        for gateway in self.gateways:
            gateway.process.others = [one.process for one in self.gateways if one is not gateway]
            gateway.process.begin()
            gateway.declare()

    def arrive(self, call: Call) -> None:
        self._of(call).arrive(call)

    def stepped(self, seen: Seen, calls: list[Call]) -> None:
        for gateway in self.gateways:
            gateway.stepped(seen)
        for call in calls:
            if call.produced == 1 or call.produced % PROGRESS_TOKENS == 0 or call.outcome is Outcome.DONE:
                self._of(call).token(call)

    def left(self, call: Call) -> None:
        self._of(call).left(call)

    def act(self) -> None:
        for gateway in self.gateways:
            gateway.process.tick()

    def close(self) -> None:
        """Leave the store. Raises SimulationFault for keys left behind."""
        for gateway in self.gateways:
            gateway.process.leave()
        if left := self._store.ask("KEYS", f"{KEYS.prefix}*"):
            raise SimulationFault(f"the store still has {sorted(left)[:8]}")

    def _of(self, call: Call) -> Gateway:
        return self.gateways[call.number % len(self.gateways)]


def _scaled(of: Coefficients, factor: float) -> Coefficients:
    return Coefficients(
        a0_s=of.a0_s * factor,
        a1_s=of.a1_s * factor,
        a2_s=of.a2_s * factor,
        a3_s=of.a3_s * factor,
        a4_s=of.a4_s * factor,
    )


def _seconds(ms: int) -> float:
    return ms / 1000 if ms else math.inf


def _idle(shape: Shape) -> Load:
    return Load(
        chunk_tokens=shape.chunk_tokens,
        max_running=shape.max_running,
        kv_usable_tokens=int(HEADROOM * shape.kv_tokens),
        kv_block=shape.kv_block,
    )


def _filled(seen: Seen, shape: Shape) -> float:
    return min(1.0, seen.work.prefill_tokens / shape.chunk_tokens)


def _differ(one: BackendShare, other: BackendShare) -> bool:
    pairs = (
        (one.max_running, other.max_running),
        (one.prefill_tokens_per_s, other.prefill_tokens_per_s),
        (one.kv_tokens, other.kv_tokens),
        (one.safety_milli, other.safety_milli),
        (one.kv_deviations_milli, other.kv_deviations_milli),
        (one.step_us, other.step_us),
        (one.prefill_ns, other.prefill_ns),
    )
    return any(abs(new - old) > SHARE_CHANGE * old for new, old in pairs)
