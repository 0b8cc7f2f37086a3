"""When a request would get its first token on a backend, how fast it would go on, and whether that is good enough.

Work dispatched now decodes only once its prompts are through, so admitting on the present decode load swings (Mooncake,
arXiv 2407.00079): the load is predicted for the time of the first token. Each test is a pure function of the numbers
and answers with them, whichever way it falls.
"""

import enum
import math

from msgspec import Struct

from policies.kv import KvSums, rounded
from policies.lengths import Outlook
from policies.reasons import Reason
from policies.steptime import StepModel, Work, prefill_work
from policies.types import Objective
from policies.window import Window

ROUNDS = 3  # of "how long" and "what runs by then", each of which needs the other
PACE_ROOM = 0.95  # part of the tightest pace objective that the plan may use


class Due(Struct, frozen=True):
    """What is left of an objective, in seconds from now: negative is late, inf is no objective. `tpot_s` is a pace."""

    first_token_s: float = math.inf
    tpot_s: float = math.inf
    total_s: float = math.inf


def due(objective: Objective, first_byte_s: float, now: float) -> Due:
    """What is left at `now` of the objective of a request whose first byte came at `first_byte_s`."""
    age = now - first_byte_s
    return Due(
        objective.ttft_ms / 1000 - age if objective.ttft_ms else math.inf,
        objective.tpot_ms / 1000 if objective.tpot_ms else math.inf,
        objective.total_ms / 1000 - age if objective.total_ms else math.inf,
    )


class Demand(Struct, frozen=True):
    """One request: its prompt, the part of it to be computed (on this backend), its expected output and deadlines."""

    prompt_tokens: int
    uncached_tokens: int
    output: Outlook
    due: Due = Due()

    def __post_init__(self) -> None:
        if not 0 <= self.uncached_tokens <= self.prompt_tokens:
            raise ValueError(
                f"uncached_tokens must be 0 to prompt_tokens ({self.prompt_tokens}), not {self.uncached_tokens}"
            )


class Ahead(Struct, frozen=True):
    """What stands before a request in the queue's order: uncached prompt tokens, and how many requests have them."""

    tokens: float = 0.0
    requests: float = 0.0


NOTHING_AHEAD = Ahead()


class Load(Struct, frozen=True, kw_only=True):
    """One backend as its ledger has it.

    `outstanding_tokens` of `prefilling` requests were dispatched and have no first token yet. `running` requests
    decode: `kv_tokens` is the sum of their contexts, `remaining_tokens` of their output expected to come. `max_running`
    is how many may, the least of what the engine, the pace and the KV allow. `prefill_share` is the part of the steps
    in which a prompt fills the chunk. `kv` is what all dispatched requests are expected to hold when longest,
    `kv_usable_tokens` what may be held, `z` the deviations kept free.
    """

    chunk_tokens: int
    max_running: int
    kv_usable_tokens: int
    kv_block: int = 1
    outstanding_tokens: float = 0.0
    prefilling: float = 0.0
    running: float = 0.0
    kv_tokens: float = 0.0
    remaining_tokens: float = 0.0
    tightest_tpot_s: float = math.inf
    prefill_share: float = 1.0
    kv: KvSums = KvSums()
    z: float = 2.0


class Forecast(Struct, frozen=True):
    """`first_token_s` from now and `tpot_s` after it, without safety; `work` is what has to be done until then.

    `running` and `kv_tokens` are what decodes at that time, without this request.
    """

    first_token_s: float
    tpot_s: float
    work: Work
    running: float
    kv_tokens: float


def forecast(model: StepModel, load: Load, demand: Demand, ahead: Ahead = NOTHING_AHEAD) -> Forecast:
    """What a request would see if it took its place behind `ahead` now."""
    running, kv_tokens = load.running, load.kv_tokens
    for _ in range(ROUNDS):
        work = _work(load, demand, ahead, ((load.running + running) / 2, (load.kv_tokens + kv_tokens) / 2))
        running, kv_tokens = decoding_after(load, ahead, work.steps)
    tpot = model.tpot(load.chunk_tokens, running + 1, kv_tokens + demand.prompt_tokens, load.prefill_share)
    return Forecast(model.prefill_seconds(work), tpot, work, running, kv_tokens)


def decoding_after(load: Load, ahead: Ahead, steps: float) -> tuple[float, float]:
    """Expected (requests, tokens of context) that decode in `steps` steps, when all that is ahead has joined.

    Of what decodes now the part exp(-steps / mean remaining) is left: exact for lengths without memory, and only the
    mean is known. What joins is not taken to end before then; the engine's limits hold.
    """
    left = load.running
    if left > 0:
        left *= math.exp(-steps * load.running / max(load.remaining_tokens, load.running))
    grown = left * (load.kv_tokens / load.running + steps) if left > 0 else 0.0
    running = min(left + load.prefilling + ahead.requests, load.max_running)
    return running, min(grown + load.outstanding_tokens + ahead.tokens, load.kv_usable_tokens)


def _work(load: Load, demand: Demand, ahead: Ahead, decoding: tuple[float, float]) -> Work:
    """All prompts until this one's first token. Chunks are shared between prompts; contexts are each prompt's own."""
    own = prefill_work(
        demand.uncached_tokens, load.chunk_tokens, *decoding, demand.prompt_tokens - demand.uncached_tokens
    )
    tokens, requests = load.outstanding_tokens + ahead.tokens, max(1.0, load.prefilling + ahead.requests)
    other = prefill_work(tokens / requests, load.chunk_tokens, *decoding)
    together = prefill_work(tokens + demand.uncached_tokens, load.chunk_tokens, *decoding)
    return Work(
        max(together.steps, own.steps + _steps_to_a_place(load, demand, ahead)),
        together.prefill_tokens,
        together.running,
        together.kv_tokens,
        own.context_tokens + requests * other.context_tokens,
    )


def _steps_to_a_place(load: Load, demand: Demand, ahead: Ahead) -> float:
    """Steps until so many have ended that this request is among the `max_running`: with long outputs it is places, not
    prompts, that are waited for. Each running one ends in a step with probability 1 / mean output; those ahead are
    taken to be like this one."""
    waiting = load.prefilling + ahead.requests
    short = load.running + waiting + 1 - load.max_running
    if short <= 0:
        return 0.0
    mean = (load.remaining_tokens + (waiting + 1) * demand.output.mean) / (load.running + waiting + 1)
    return short * mean / load.max_running


class Safety:
    """The factor `s` on predicted first-token times: 1.15, then the 95th percentile of observed / predicted.

    Of short predictions the ratio says little (the step that was under way is most of it), and a deadline that is ten
    times as far does not depend on it: only predictions of at least CLOSE of the time left count.
    """

    START, ENOUGH, WINDOW, LEVEL, LEAST, MOST, CLOSE = 1.15, 30, 512, 0.95, 1.0, 3.0, 0.1

    __slots__ = ("_errors", "_ratios")

    def __init__(self) -> None:
        self._ratios = Window(self.WINDOW)
        self._errors = Window(self.WINDOW)

    def __repr__(self) -> str:
        return f"<Safety {self.factor:.2f}, {len(self._ratios)} samples>"

    def observe(self, predicted_s: float, observed_s: float, left_s: float = 0.0) -> None:
        """Learn how a prediction (without safety) turned out; `left_s` was there until the deadline.

        Raises ValueError for a time that cannot be.
        """
        for field, value in (("predicted_s", predicted_s), ("observed_s", observed_s)):
            if not 0.0 < value < math.inf:
                raise ValueError(f"{field} must be positive and finite, not {value}")
        ratio = observed_s / predicted_s
        self._errors.add(abs(ratio - 1.0))
        if predicted_s >= self.CLOSE * left_s:
            self._ratios.add(ratio)

    @property
    def error(self) -> float | None:
        """The median of |observed - predicted| / predicted, of short predictions too; None before the first."""
        return self._errors.quantile(0.5) if len(self._errors) else None

    @property
    def factor(self) -> float:
        if len(self._ratios) < self.ENOUGH:
            return self.START
        return min(max(self._ratios.quantile(self.LEVEL), self.LEAST), self.MOST)


class Check(enum.StrEnum):
    IDLE_FIRST = "idle_first"
    IDLE_PACE = "idle_pace"
    IDLE_TOTAL = "idle_total"
    IDLE_KV = "idle_kv"
    FIRST = "first"
    PACE = "pace"
    TOTAL = "total"
    KV = "kv"


REFUSES: dict[Check, Reason | None] = {
    Check.IDLE_FIRST: Reason.DEADLINE_IMPOSSIBLE,
    Check.IDLE_PACE: Reason.DEADLINE_IMPOSSIBLE,
    Check.IDLE_TOTAL: Reason.DEADLINE_IMPOSSIBLE,
    Check.IDLE_KV: Reason.CONTEXT_LENGTH_EXCEEDED,
    Check.FIRST: Reason.DEADLINE_UNREACHABLE,
    Check.PACE: None,  # room comes when running requests end
    Check.TOTAL: Reason.DEADLINE_UNREACHABLE,
    Check.KV: None,
}


class Verdict(Struct, frozen=True):
    """One test: holds if `predicted` is at most `limit`, both in `unit`. `terms` are the numbers it came from."""

    check: Check
    predicted: float
    limit: float
    unit: str
    terms: dict[str, float]

    @property
    def ok(self) -> bool:
        return self.predicted <= self.limit

    @property
    def reason(self) -> Reason | None:
        """What to refuse the request with; None where the test holds, and where waiting may help."""
        return None if self.ok else REFUSES[self.check]

    def __str__(self) -> str:
        terms = ", ".join(f"{name} {value:.6g}" for name, value in self.terms.items())
        sign = "<=" if self.ok else ">"
        return f"{self.check}: {self.predicted:.6g} {sign} {self.limit:.6g} {self.unit} ({terms})"


def idle_tests(model: StepModel, load: Load, demand: Demand) -> tuple[Verdict, ...]:
    """Whether an engine with nothing else to do could make it: most favourable output, no trim, no safety.

    Ask once, at arrival: later the time that has passed is the queue's fault. Of `load` only what does not change
    counts (the chunk, the block, the usable KV tokens).
    """
    cached = demand.prompt_tokens - demand.uncached_tokens
    prefill = model.seconds(prefill_work(demand.uncached_tokens, load.chunk_tokens, 0, 0, cached))
    pace = model.seconds(Work(1, 0, 1, demand.prompt_tokens))
    least = demand.output.q10
    total = prefill + max(0, least - 1) * pace
    held = rounded(demand.prompt_tokens + least, load.kv_block)
    times = {"uncached_tokens": demand.uncached_tokens, "prefill_s": prefill}
    ends = {**times, "output_tokens": least, "tpot_s": pace}
    return (
        Verdict(Check.IDLE_FIRST, prefill, demand.due.first_token_s, "s", times),
        Verdict(Check.IDLE_PACE, pace, demand.due.tpot_s, "s", {"context_tokens": demand.prompt_tokens}),
        Verdict(Check.IDLE_TOTAL, total, demand.due.total_s, "s", ends),
        Verdict(Check.IDLE_KV, held, load.kv_usable_tokens, "tokens", {"prompt_tokens": demand.prompt_tokens}),
    )


def load_tests(seen: Forecast, load: Load, demand: Demand, safety: float) -> tuple[Verdict, ...]:
    """Whether the request makes it under the present load, and lets the running ones keep their pace."""
    return (
        first_token_test(seen, load, demand, safety),
        pace_test(seen, load, demand),
        total_test(seen, demand, safety),
        kv_test(load, demand),
    )


def first_token_test(seen: Forecast, load: Load, demand: Demand, safety: float) -> Verdict:
    """`safety` times the predicted time to the first token, within what is left."""
    terms = {
        "safety": safety,
        "forecast_s": seen.first_token_s,
        "outstanding_tokens": load.outstanding_tokens,
        "ahead_tokens": seen.work.prefill_tokens - load.outstanding_tokens - demand.uncached_tokens,
        "uncached_tokens": demand.uncached_tokens,
        "steps": seen.work.steps,
        "tokens_per_s": seen.work.prefill_tokens / seen.first_token_s,
    }
    return Verdict(Check.FIRST, safety * seen.first_token_s, demand.due.first_token_s, "s", terms)


def pace_test(seen: Forecast, load: Load, demand: Demand) -> Verdict:
    """The pace with one more, within the tightest objective of all that run (SCORPIO's guard, arXiv 2505.23022)."""
    terms = {
        "running": seen.running + 1,
        "kv_tokens": seen.kv_tokens + demand.prompt_tokens,
        "own_tpot_s": demand.due.tpot_s,
        "tightest_tpot_s": load.tightest_tpot_s,
        "room": PACE_ROOM,
    }
    limit = PACE_ROOM * min(demand.due.tpot_s, load.tightest_tpot_s)
    return Verdict(Check.PACE, seen.tpot_s, limit, "s", terms)


def total_test(seen: Forecast, demand: Demand, safety: float) -> Verdict:
    """First token with `safety`, then as many tokens as nine in ten answers stay within."""
    first, tokens = safety * seen.first_token_s, demand.output.q90
    terms = {"safety": safety, "first_token_s": first, "output_tokens": tokens, "tpot_s": seen.tpot_s}
    predicted = first + max(0, tokens - 1) * seen.tpot_s
    return Verdict(Check.TOTAL, predicted, demand.due.total_s, "s", terms)


def kv_test(load: Load, demand: Demand) -> Verdict:
    """The expected KV peak with this request, within what may be held."""
    prompt, output = demand.prompt_tokens, demand.output
    own = rounded(prompt + output.mean, load.kv_block)
    sums = load.kv.plus(own, output.variance, rounded(prompt + output.q90, load.kv_block))
    terms = {
        "requests": sums.requests,
        "mean_tokens": sums.mean_tokens,
        "deviation_tokens": math.sqrt(sums.variance),
        "z": load.z,
        "own_tokens": own,
    }
    return Verdict(Check.KV, sums.need(load.z), load.kv_usable_tokens, "tokens", terms)


def failed(verdicts: tuple[Verdict, ...]) -> Verdict | None:
    """The first test that does not hold, or None."""
    return next((verdict for verdict in verdicts if not verdict.ok), None)
