"""What this process learns while it serves a pool: how long answers get, and how long each backend's steps take."""

from typing import Protocol

from msgspec import Struct

from backends.protocol import Gauge, Usage
from policies.fairness import OUTPUT_RATIO, Prices, output_ratio, prices
from policies.forecast import Safety
from policies.kv import Deviations
from policies.lengths import Coverage, Kind, Lengths, Outlook
from policies.prompts import PrefixHits
from policies.steptime import Coefficients, StepModel, Work

LEARN_EVERY_S = 0.005  # two hundred answers a second are enough to learn from, however many there are
FRESH_S = 0.05  # how long an outlook may be told again
MOST_OUTPUT = 32_768  # tokens: what an answer is capped at where nothing else does
TYPICAL_CONTEXT = 1_000  # tokens that a decoding request holds, for the price of its next one
GAP_S = 0.02  # a shorter time between tokens is taken together with the next
MOVED = 0.05  # of a number, before the shared queue is told again


class Answers:
    """What the answers and prompts of one pool are like, at a cost per request that does not grow with the rate."""

    def __init__(self) -> None:
        self.lengths = Lengths()
        self.hits = PrefixHits()
        self.output_ratio = OUTPUT_RATIO  # what an output token costs in prompt tokens
        self._prices: dict[float, Prices] = {}
        self._told: dict[tuple[Kind, int], Outlook] = {}
        self._told_until = self._learned_at = 0.0

    def __repr__(self) -> str:
        return f"<Answers {self.lengths!r}>"

    @property
    def coverage(self) -> Coverage:
        """How many answers stayed within the long end that was expected of them."""
        return self.lengths.coverage

    def expect(self, kind: Kind, limit: int, at: float) -> Outlook:
        """What an answer of this kind will be like, before its first token; `limit` is its output limit, 0 for none."""
        if at > self._told_until:
            self._told.clear()
            self._told_until = at + FRESH_S
        key = (kind, limit or MOST_OUTPUT)
        known = self._told.get(key)
        if known is None:
            known = self._told[key] = self.lengths.outlook(kind, 0, key[1])
        return known

    def expect_after(self, kind: Kind, generated: int, limit: int) -> Outlook:
        """The same for an answer that has `generated` tokens already."""
        return self.lengths.outlook(kind, generated, max(limit or MOST_OUTPUT, generated + 1))

    def uncached(self, kind: Kind, prompt_tokens: int) -> int:
        """Tokens of a prompt that an engine will have to compute."""
        return self.hits.uncached(kind, prompt_tokens) if len(self.hits) else prompt_tokens

    def prices(self, weight: float) -> Prices:
        """What service costs a tenant of this weight."""
        known = self._prices.get(weight)
        if known is None:
            known = self._prices[weight] = prices(weight, self.output_ratio)
        return known

    def curious(self, at: float) -> bool:
        """Whether to learn from an answer that ends now. When many come, most are skipped."""
        return at - self._learned_at >= LEARN_EVERY_S

    def ended(self, kind: Kind, usage: Usage, cut_short: bool, at: float) -> None:
        """An answer is over; `cut_short`: not by the model's own will."""
        self._learned_at = at
        if usage.completion_tokens > 0:
            self.lengths.add(kind, usage.completion_tokens, cut_short)
        if 0 < usage.cached_tokens <= usage.prompt_tokens or (usage.prompt_tokens > 0 and len(self.hits)):
            self.hits.add(kind, usage.prompt_tokens, min(usage.cached_tokens, usage.prompt_tokens))

    def priced_by(self, learned: Coefficients) -> None:
        """Take the ratio of prices from a backend's step times: a token of decoding against one of prefill."""
        self.output_ratio = output_ratio(learned.a1_s, learned.a2_s + learned.a3_s * TYPICAL_CONTEXT)
        self._prices.clear()


class EngineLoad(Protocol):
    """What this process has on a backend: `prefilled_tokens` are all prompt tokens it ever computed for us."""

    running: int
    kv_tokens: int
    prefilled_tokens: int
    limit: int


class Told(Struct, frozen=True):
    """What the shared queue knows of a backend by learning. None: its step times are not known yet."""

    steps: Coefficients | None = None
    safety: float = Safety.START
    deviations: float = Deviations.START


class Learned(Struct, frozen=True):
    """What a process has learned of one backend, to look at; errors are medians of |observed - predicted| / predicted,
    None before the first sample.

    `coefficients` are the step times without `theta`, the factor on the speed that they can't explain. `safety` is the
    factor on predicted first tokens, `deviations` how many of the expected KV are kept free.
    """

    coefficients: Coefficients
    theta: float
    samples: int
    step_error: float | None
    forecast_error: float | None
    safety: float
    deviations: float


class Steps:
    """The step time of one backend, from the steps it reports or else from the gaps of one stream at a time; how far
    forecasts on it are to be trusted."""

    def __init__(self, start: Coefficients | None = None) -> None:
        self.model = StepModel(start) if start is not None else StepModel()
        self.safety = Safety()
        self.deviations = Deviations(0.0)
        self._leader: object = None  # whose gaps are looked at
        self._since = self._tokens = self._prefilled = 0.0
        self._preempted: int | None = None  # as the engine last counted
        self._observed_at = 0.0
        self.reported = False  # the engine tells its steps: gaps are not needed
        self.told = Told()

    def __repr__(self) -> str:
        return f"<Steps {self.model!r}, {self.safety!r}, {self.deviations!r}>"

    @property
    def learned(self) -> Learned:
        """For metrics and operators."""
        model = self.model
        return Learned(
            coefficients=model.coefficients,
            theta=model.trim.theta,
            samples=model.samples,
            step_error=model.error,
            forecast_error=self.safety.error,
            safety=self.safety.factor,
            deviations=self.deviations.z,
        )

    def gauge(self, seen: Gauge, limit: int, at: float) -> None:
        """Learn from the steps and preemptions that an engine reports; `limit` is how many requests it may run."""
        for prefill_tokens, running, kv_tokens, seconds in seen.steps:
            if seconds > 0.0 and prefill_tokens + running > 0:
                self.reported = True
                used = min(1.0, running / limit) if limit else 1.0
                self.model.observe(Work(1, prefill_tokens, running, kv_tokens), seconds, at, used)
        if seen.preemptions is None:
            return
        if self._preempted is None:
            self.deviations = Deviations(at)
        else:
            self.deviations.observe(max(0, seen.preemptions - self._preempted), at)  # it counts anew when it restarts
        self._preempted = seen.preemptions

    def first_token(self, expected_s: float, observed_s: float, left_s: float, at: float) -> None:
        """A first token came `observed_s` after its grant, when `expected_s` was forecast and `left_s` was left until
        its deadline (inf for none). When many come, most are skipped."""
        if expected_s > 0.0 and observed_s > 0.0 and at - self._observed_at >= LEARN_EVERY_S:
            self._observed_at = at
            self.safety.observe(expected_s, observed_s, left_s)

    def follow(self, stream: object, tokens: int, load: "EngineLoad", at: float) -> None:
        """A stream had `tokens` more tokens. One stream at a time is followed: the gaps of the others are the same."""
        if self.reported or (self._leader is not stream and self._leader is not None):
            return
        if self._leader is None:
            self._leader, self._since, self._tokens, self._prefilled = stream, at, 0, load.prefilled_tokens
            return
        self._tokens += tokens
        seconds = at - self._since
        if seconds < GAP_S or not self._tokens:
            return
        work = Work(self._tokens, load.prefilled_tokens - self._prefilled, load.running, load.kv_tokens)
        self.model.observe(work, seconds, at, min(1.0, load.running / load.limit), inferred=True)
        self._since, self._tokens, self._prefilled = at, 0, load.prefilled_tokens

    def leave(self, stream: object) -> None:
        """The stream is over; the next that speaks is followed instead."""
        if self._leader is stream:
            self._leader = None

    def news(self) -> Told | None:
        """What the shared queue should be told, if anything moved by 5 % since it was told last. Asking is telling."""
        if self.model.warm and self.told.steps is None:
            self.safety = Safety()  # what was observed of forecasts without step times says nothing of those with them
        now = Told(self._trimmed() if self.model.warm else None, self.safety.factor, self.deviations.z)
        if not _moved(self.told, now):
            return None
        self.told = now
        return now

    def _trimmed(self) -> Coefficients:
        theta, learned = self.model.trim.theta, self.model.coefficients
        return Coefficients(
            a0_s=learned.a0_s / theta,
            a1_s=learned.a1_s / theta,
            a2_s=learned.a2_s / theta,
            a3_s=learned.a3_s / theta,
            a4_s=learned.a4_s / theta,
        )


def _moved(before: Told, after: Told) -> bool:
    pairs = [(before.safety, after.safety), (before.deviations, after.deviations)]
    if (new := after.steps) is not None:
        if (old := before.steps) is None:
            return True
        pairs += [(old.a0_s, new.a0_s), (old.a1_s, new.a1_s), (old.a2_s, new.a2_s), (old.a3_s, new.a3_s)]
    return any(abs(new - old) > MOVED * max(old, 1e-12) for old, new in pairs)
