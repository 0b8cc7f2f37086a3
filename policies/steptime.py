"""How long an engine's step takes, learned while it works: `t = a0 + a1·prefill + a2·running + a3·kv + a4·context`.

The form is that of BLIS and Vidur; Niyama's authors fitted it to an 8B model on an A100 (START below, rounded). It is
linear, so the time of several steps is the same formula on sums: an exact step, a gap between two tokens and the wait
for a first token are all samples.

The fit is weighted recursive least squares in information form (the normal equations, forgotten exponentially), solved
for coefficients that are not negative every few samples. What the load does not excite keeps
its last value. A sample weighs by its relative error, and the worst 1 % are left out.
"""

import math
from bisect import bisect_right
from typing import Annotated

from msgspec import Meta, Struct

from policies.nonnegative import nonnegative
from policies.window import Window

NotNegative = Annotated[float, Meta(ge=0)]

WARM = 200  # samples until the configured numbers are no longer a lower bound on time
SOLVE_EVERY = 8  # samples
ANCHOR = 4.0  # samples of its own size that hold a coefficient where it was
INFERRED = 0.25  # weight of a sample whose step was seen from outside
ERRORS = 512  # samples that the error and the trimming look back on
TRIMMED = 0.99
PACE_ROOM = 0.9  # part of a pace objective that the plan may use
LEAST_S = 1e-6
SIZE = 5


class Coefficients(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds: per step, per prefill token, per decoding request, per token of their contexts, and per token that the
    prompts in prefill had computed before the step."""

    a0_s: NotNegative
    a1_s: NotNegative
    a2_s: NotNegative
    a3_s: NotNegative
    a4_s: NotNegative

    def seconds(self, work: "Work") -> float:
        return (
            self.a0_s * work.steps
            + self.a1_s * work.prefill_tokens
            + (self.a2_s * work.running + self.a3_s * work.kv_tokens) * work.steps
            + self.a4_s * work.context_tokens
        )


START = Coefficients(a0_s=15e-3, a1_s=81e-6, a2_s=95e-6, a3_s=0.11e-6, a4_s=0.76e-6)


class Work(Struct, frozen=True):
    """What an engine did in `steps` steps. `prefill_tokens` (uncached) and `context_tokens` are sums over the steps,
    `running` (decoding requests) and `kv_tokens` (the sum of their contexts) means per step."""

    steps: float
    prefill_tokens: float
    running: float
    kv_tokens: float
    context_tokens: float = 0.0


def prefill_work(tokens: float, chunk_tokens: int, running: float, kv_tokens: float, computed: float = 0.0) -> Work:
    """The steps that take `tokens` of prompt through chunks of `chunk_tokens`, of which each decode takes one.

    `computed` tokens of the prompt were there before (a prefix-cache hit): they are context, not work.
    """
    share = max(1.0, chunk_tokens - running)
    steps = max(1, math.ceil(tokens / share))
    context = computed * steps + share * steps * (steps - 1) / 2
    return Work(steps, tokens, running, kv_tokens, context)


class Trim:
    """What the model cannot explain: theta, a factor on the rates, by Gradient2's rule once a second.

    `theta` moves a fifth of the way to predicted/observed, within 0.5 to 1.1, not for differences under 5 %, at most
    10 % a second, and up only while at least half of the capacity was in use (Netflix concurrency-limits).
    """

    SMOOTHING, PERIOD_S, LOW, HIGH, DEADBAND, STRIDE, BUSY = 0.2, 1.0, 0.5, 1.1, 0.05, 0.1, 0.5

    __slots__ = ("_busy_s", "_observed_s", "_predicted_s", "_since", "theta")

    def __init__(self) -> None:
        self.theta = 1.0
        self._since: float | None = None
        self._predicted_s = self._observed_s = self._busy_s = 0.0

    def __repr__(self) -> str:
        return f"<Trim {self.theta:.2f}>"

    def observe(self, predicted_s: float, observed_s: float, used: float, now: float) -> None:
        """One sample at `now` (seconds); `used` is the part of the backend's capacity in use, 0 to 1."""
        if self._since is None:
            self._since = now
        self._predicted_s += predicted_s
        self._observed_s += observed_s
        self._busy_s += used * observed_s
        if now - self._since >= self.PERIOD_S:
            self._move(self._predicted_s / self._observed_s, self._busy_s / self._observed_s)
            self._since = None
            self._predicted_s = self._observed_s = self._busy_s = 0.0

    def _move(self, ratio: float, used: float) -> None:
        ratio = min(max(ratio, self.LOW), self.HIGH)
        change = self.SMOOTHING * (ratio - self.theta)
        if abs(ratio - self.theta) < self.DEADBAND * self.theta or (change > 0 and used < self.BUSY):
            return
        most = self.STRIDE * self.theta
        self.theta += min(max(change, -most), most)


class StepModel:
    """One backend's step time. Starts from configured coefficients, learns from samples, says how well it does.

    `memory` is how many samples it looks back on, 500 to 2,000. Until WARM samples have come a prediction is the larger
    of the configured and the learned one.
    """

    __slots__ = ("_errors", "_gram", "_keep", "_learned", "_moment", "_seen", "_start", "_weight", "samples", "trim")

    def __init__(self, start: Coefficients = START, memory: int = 1000) -> None:
        if not 500 <= memory <= 2000:
            raise ValueError(f"memory must be 500 to 2000 samples, not {memory}")
        self.samples = 0
        self.trim = Trim()
        self._keep = 1.0 - 1.0 / memory
        self._start = self._learned = start
        self._gram = [0.0] * (SIZE * SIZE)  # lower triangle, row by row
        self._moment = [0.0] * SIZE
        self._weight = 0.0
        self._seen = 0  # samples since the last solution
        self._errors = Window(ERRORS)

    def __repr__(self) -> str:
        error = "no" if self.error is None else f"{self.error:.1%}"
        return f"<StepModel {'warm' if self.warm else 'cold'}, {self.samples} samples, {error} error, {self.trim!r}>"

    @property
    def warm(self) -> bool:
        return self.samples >= WARM

    @property
    def coefficients(self) -> Coefficients:
        """What has been learned, or the start values before anything was."""
        return self._learned

    @property
    def error(self) -> float | None:
        """The median of |observed - predicted| / predicted over the last samples; None before the first."""
        return self._errors.quantile(0.5) if len(self._errors) else None

    def seconds(self, work: Work) -> float:
        """How long `work` takes, without the trim. Never nothing."""
        learned = max(self._learned.seconds(work), LEAST_S)
        return learned if self.warm else max(learned, self._start.seconds(work))

    def observe(self, work: Work, seconds: float, now: float, used: float = 1.0, inferred: bool = False) -> None:
        """Learn that `work` took `seconds`. `inferred` marks a sample that was seen from outside: a gap, a first token.

        Feed one stream's gap per step, not every stream's: they are the same step. Raises ValueError for a time or an
        amount of work that cannot be.
        """
        if not 0.0 < seconds < math.inf:
            raise ValueError(f"seconds must be positive and finite, not {seconds}")
        if work.steps <= 0 or min(work.prefill_tokens, work.running, work.kv_tokens, work.context_tokens) < 0:
            raise ValueError(f"work must have steps and nothing negative, not {work}")
        predicted = max(self._learned.seconds(work), LEAST_S)
        self.trim.observe(self.seconds(work), seconds, used, now)
        error = abs(seconds - predicted) / predicted
        outlier = self.warm and error > self._errors.quantile(TRIMMED)
        self._errors.add(error)
        self.samples += 1
        if outlier:
            return
        self._take(work, seconds, (INFERRED if inferred else 1.0) / max(predicted, seconds / 4) ** 2)
        self._seen += 1
        if self._seen >= SOLVE_EVERY:
            self._seen = 0
            self._learned = self._solved()

    def _take(self, work: Work, seconds: float, weight: float) -> None:
        steps = work.steps
        row = (steps, work.prefill_tokens, steps * work.running, steps * work.kv_tokens, work.context_tokens)
        gram, moment, keep = self._gram, self._moment, self._keep
        at = 0
        for i in range(SIZE):
            scaled = weight * row[i]
            moment[i] = keep * moment[i] + scaled * seconds
            for j in range(i + 1):
                gram[at + j] = keep * gram[at + j] + scaled * row[j]
            at += SIZE
        self._weight = keep * self._weight + 1.0

    def _solved(self) -> Coefficients:
        """The best coefficients, each in units of its column's size and anchored where it was."""
        old = _values(self._learned)
        size = [math.sqrt(self._gram[i * SIZE + i] / self._weight) for i in range(SIZE)]
        alive = [i for i in range(SIZE) if size[i] > 0.0]
        matrix: list[list[float]] = []
        right: list[float] = []
        for i in alive:
            scale = size[i] * self._weight
            row = [self._gram[max(i, j) * SIZE + min(i, j)] / (scale * size[j]) for j in alive]
            anchor = ANCHOR / self._weight
            right.append(self._moment[i] / scale + anchor * old[i] * size[i])
            row[len(matrix)] += anchor
            matrix.append(row)
        new = list(old)
        for i, value in zip(alive, nonnegative(matrix, right), strict=True):
            new[i] = value / size[i]
        if self.warm and size[4] == 0.0:
            new[4] = 0.0  # contexts are not reported: what they cost is within a1
        return Coefficients(a0_s=new[0], a1_s=new[1], a2_s=new[2], a3_s=new[3], a4_s=new[4])

    def prefill_rate(self, chunk_tokens: int, running: float, kv_tokens: float, context_tokens: float = 0.0) -> float:
        """P(d, k): prompt tokens per second while `running` requests decode in the same chunks; trimmed, above 0."""
        share = max(1.0, chunk_tokens - running)
        return self.trim.theta * share / self.seconds(Work(1, share, running, kv_tokens, context_tokens))

    def prefill_seconds(self, work: Work) -> float:
        """How long `work` takes, trimmed. See `prefill_work`."""
        return self.seconds(work) / self.trim.theta

    def tpot(self, chunk_tokens: int, running: float, kv_tokens: float, prefill_share: float = 1.0) -> float:
        """Seconds per output token, trimmed; in `prefill_share` of the steps a prompt fills the chunk."""
        full = self.seconds(Work(1, max(0.0, chunk_tokens - running), running, kv_tokens))
        lean = self.seconds(Work(1, 0, running, kv_tokens))
        return (prefill_share * full + (1.0 - prefill_share) * lean) / self.trim.theta

    def most_running(self, tpot_s: float, chunk_tokens: int, context_tokens: float, limit: int) -> int:
        """B_max: how many requests of `context_tokens` each may decode at once so that the pace, with a full chunk in
        each step, is within 0.9 of `tpot_s`. At most `limit` (the engine's own) and one chunk; theta of that."""
        limit = min(limit, chunk_tokens)
        budget = PACE_ROOM * tpot_s

        def pace(running: float) -> float:
            return self.seconds(Work(1, chunk_tokens - running, running, running * context_tokens))

        if pace(limit) <= budget:
            fitting = limit
        elif pace(0) > budget:
            fitting = 0
        else:
            fitting = int(bisect_right(range(limit), budget, key=pace)) - 1
        return min(limit, int(self.trim.theta * fitting))


def _values(of: Coefficients) -> tuple[float, ...]:
    return (of.a0_s, of.a1_s, of.a2_s, of.a3_s, of.a4_s)
