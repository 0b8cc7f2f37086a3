"""What rate an engine carries at an objective, by its step times and the lengths it is asked for: no simulation.

Work. A full step has `chunk_tokens` places and takes `t = a0 + a1·prompt + a2·decodes + a3·contexts + a4·computed`. So
a request costs the engine, when it is full, its share of `a0` (the places it takes: its prompt and all answer tokens
but the first) and its own terms of the other four. One over the mean of that is the rate at which the engine is full,
and nothing carries more.

Step time. At a rate below that, what is to be done per second fixes the mean step: `t = a0 / (1 - rate · W)`, W the
mean cost of a request without its share of a0. Little's law gives the decodes and their contexts.

First token. Prompts wait in line while decodes go on, so a backlog of both kinds of work melts as fast as the line: the
wait is taken for that of one server with the whole cost of a request as its service time, in heavy traffic. It exceeds
x with probability `load · exp(-2x (1 - load) / (mean cost · (ca² + cs²)))` (Kingman 1962), `ca` and `cs` the variations
of arrivals and costs. Then comes the own prompt, chunk by chunk. Where places or KV run out before the chunk does, it
is these that are waited for: likewise, with Sakasegawa's (1977) factor for many servers.

Pace. The mean step, spread by how many prompt tokens happen to come while an answer is written, and never above a full
step.

A rate that changes over minutes is taken window by window, each as if it stayed.

How far from simulation all this is: `tests/bench/test_capacity.py`.
"""

import math
import statistics
from collections.abc import Callable, Sequence

from msgspec import Struct

from bench.costs import Engine, Traffic, costs
from policies.steptime import PACE_ROOM, StepModel, prefill_work
from policies.types import Objective

SAMPLE = 100  # rows by prompt length, and as many by answer, that stand for all
HEADROOM = 0.95  # of the KV tokens that may be planned with
DEVIATIONS = 2.0  # kept free of the sum of what runs
FAST = 0.4  # of the exponent of waits that the line of prompts alone has; by comparison with simulations
TINY = 1e-12
TIGHT = 1e-3  # relative width at which a search ends
GOALS = ("ttft", "tpot", "e2el")

Missed = Callable[[float], float]
"""The part of requests that miss an objective at a rate."""


class Wait(Struct, frozen=True):
    """How long is waited: beyond x with the largest of the probabilities `some · exp(-slope · x)`."""

    lines: tuple[tuple[float, float], ...]

    def beyond(self, seconds: float) -> float:
        if seconds < 0:
            return 1.0
        return max(some * math.exp(-slope * seconds) for some, slope in self.lines)


class Limit(Struct, frozen=True):
    """One thing that bounds the rate: beyond `rate` requests/s it is the objective's or the engine's end."""

    what: str
    rate: float
    why: str


class Capacity(Struct, frozen=True, kw_only=True):
    """What one engine carries at an objective: `rate` requests/s, with what breaks first at the head of `limits`.

    The rest is at that rate: mean step, decodes and KV tokens, part of the time that the engine is full.
    """

    engine: Engine
    rate: float
    limits: tuple[Limit, ...]
    step_s: float
    running: float
    kv_tokens: float
    load: float
    most_running: int
    prefill_tokens_per_s: float


class Model:
    """An engine under a traffic. `level` is the part of requests that must attain the objective."""

    def __init__(self, engine: Engine, traffic: Traffic, objective: Objective, level: float = 0.95) -> None:
        rows = traffic.rows
        self.engine, self.objective, self.level = engine, objective, level
        self.costs = costs(engine, rows)
        self._arrivals = traffic.cv**2
        self._windows = traffic.windows
        self._prompts = stand_ins([row.input_tokens for row in rows])
        self._answers = stand_ins([row.output_tokens for row in rows])
        self.places = self._places()
        self.full = 1 / self.costs.whole_s
        self.seats = self._seats_rate()

    # at a rate

    def step_s(self, rate: float) -> float:
        """The mean step; that of a full one where the engine is past full."""
        room = 1 - rate * self.costs.own_s
        a0 = self.engine.times.a0_s
        return min(a0 / room, self.full_step_s(rate)) if room > 0 else self.full_step_s(rate)

    def full_step_s(self, rate: float) -> float:
        """A step whose chunk is full, with the decodes that there are when all steps are."""
        times, chunk = self.engine.times, self.engine.chunk_tokens
        step = times.a0_s + times.a1_s * chunk
        for _ in range(20):
            decodes = min(rate * self.costs.decodes * step, self.places, chunk - 1.0)
            step = times.a0_s + times.a1_s * (chunk - decodes) + decodes * (
                times.a2_s + times.a3_s * self.costs.context
            )  # fmt: skip
        return step

    def running(self, rate: float) -> float:
        """Mean decodes at once (Little)."""
        return min(self.places, rate * self.costs.decodes * self.step_s(rate))

    def first_missed(self, rate: float) -> float:
        """The part of requests whose first token comes too late."""
        aim_s = self.objective.ttft_ms / 1000
        if not aim_s:
            return 0.0
        wait, decodes = self.wait(rate), min(self.running(rate), self.engine.chunk_tokens - 1.0)
        missed = [wait.beyond(aim_s - self._own_s(prompt, decodes)) for prompt in self._prompts]
        return statistics.fmean(missed)

    def _own_s(self, prompt: int, decodes: float) -> float:
        """What a prompt itself takes, chunk by chunk beside the decodes there are."""
        work = prefill_work(prompt, self.engine.chunk_tokens, decodes, decodes * self.costs.context)
        return self.engine.times.seconds(work)

    def pace_missed(self, rate: float) -> float:
        """The part of answers that come too slowly."""
        aim_s = self.objective.tpot_ms / 1000
        if not aim_s:
            return 0.0
        step, full = self.step_s(rate), self.full_step_s(rate)
        if full <= aim_s:
            return 0.0
        echo = 1 / max(0.05, 1 - rate * self.costs.own_s)  # while a step takes longer, more comes
        spread = echo * self.engine.times.a1_s * math.sqrt(rate * self.costs.prompt_square)
        missed = [
            1 - normal((aim_s - step) / max(1e-9, spread * math.sqrt(step / max(1, output - 1))))
            for output in self._answers
        ]
        return statistics.fmean(missed)

    def total_missed(self, rate: float) -> float:
        """The part whose last token comes too late."""
        aim_s = self.objective.total_ms / 1000
        if not aim_s:
            return 0.0
        step, prompt_s = self.step_s(rate), self.costs.prompt / self.engine.chunk_tokens * self.full_step_s(rate)
        wait = self.wait(rate)
        missed = [wait.beyond(aim_s - prompt_s - (output - 1) * step) for output in self._answers]
        return statistics.fmean(missed)

    def attained(self, rate: float) -> float:
        """The part of requests that make all objectives, as if these were missed independently, at a mean rate."""
        return sum(part * self._attained(rate * times) for part, times in self._windows)

    def _attained(self, rate: float) -> float:
        if rate >= min(self.full, self.seats):
            return 0.0
        return math.prod(1 - missed(rate) for missed in (self.first_missed, self.pace_missed, self.total_missed))

    def kept(self, missed: Missed, rate: float) -> float:
        """The part of requests that make one objective at a mean rate."""
        top = min(self.full, self.seats)
        return sum(part * (1 - missed(rate * times)) for part, times in self._windows if rate * times < top)

    def _alone(self, missed: Missed) -> float:
        """The highest mean rate at which one objective by itself is attained."""
        return search(lambda at: self.kept(missed, at) >= self.level, min(self.full, self.seats))

    # in all

    def capacity(self) -> Capacity:
        """The highest rate that attains the level, and what would bound it next."""
        rate = search(lambda at: self.attained(at) >= self.level, min(self.full, self.seats))
        running = self.running(rate)
        return Capacity(
            engine=self.engine,
            rate=rate,
            limits=self._limits(),
            step_s=self.step_s(rate),
            running=running,
            kv_tokens=running * self.costs.context,
            load=rate * self.costs.whole_s,
            most_running=self._most_running(running),
            prefill_tokens_per_s=self._prefill_rate(running),
        )

    def _limits(self) -> tuple[Limit, ...]:
        """What ends the rate, the first first. An objective that holds as far as the engine goes breaks with it."""
        aim, least = self.objective, 1 - self.level
        found = [Limit("full", self.full, "every place of every chunk is taken"), Limit(*self._seat_limit())]
        goals = (
            ("ttft", aim.ttft_ms, self.first_missed),
            ("tpot", aim.tpot_ms, self.pace_missed),
            ("e2el", aim.total_ms, self.total_missed),
        )
        for what, target, missed in goals:
            if target:
                found.append(Limit(what, self._alone(missed), f"{least:.0%} of requests miss {target} ms"))
        return tuple(sorted(found, key=lambda limit: (limit.rate, limit.what in GOALS)))

    def _places(self) -> float:
        """Requests that may run at once: the engine's own limit, one token each of a chunk, and what the KV holds."""
        usable, mean, deviation = HEADROOM * self.engine.kv_tokens, self.costs.held, self.costs.held_sd
        root = (-DEVIATIONS * deviation + math.sqrt((DEVIATIONS * deviation) ** 2 + 4 * mean * usable)) / (2 * mean)
        return max(1.0, min(self.engine.max_running, self.engine.chunk_tokens, root * root))

    def _seats_rate(self) -> float:
        """The rate at which all places are taken."""
        return self.places / (self.costs.stay * self.engine.times.a0_s + self.places * self.costs.own_s)

    def _seat_limit(self) -> tuple[str, float, str]:
        if self.places < min(self.engine.max_running, self.engine.chunk_tokens):
            return "kv", self.seats, f"{self.places:.0f} requests fill {HEADROOM:.0%} of the KV"
        return "places", self.seats, f"{self.places:.0f} requests run at once"

    def wait(self, rate: float) -> Wait:
        """For a first token's turn. For chunks: between the line of prompts alone, which is right for short waits, and
        that of all work, for long ones; for places: Sakasegawa's."""
        slow, fast, taken = rate * self.costs.whole_s, rate * self._prompt_s(rate), rate / self.seats
        if max(slow, fast, taken) >= 1:
            return Wait(((1.0, 0.0),))
        whole = _slope(slow, self.costs.whole_s, self._arrivals + self.costs.variation**2)
        prompts = _slope(fast, self._prompt_s(rate), self._arrivals + self.costs.prompt_variation**2)
        some = math.exp(FAST * math.log(max(fast, TINY)) + (1 - FAST) * math.log(max(slow, TINY)))
        crowd = math.exp((math.sqrt(2 * (self.places + 1)) - 1) * math.log(max(taken, TINY)))
        seats = _slope(taken, 1 / self.seats, self._arrivals + self.costs.stay_variation**2)
        return Wait(((some, FAST * prompts + (1 - FAST) * whole), (crowd, seats)))

    def _prompt_s(self, rate: float) -> float:
        """What a mean prompt takes of full steps beside the decodes there are."""
        times, decodes = self.engine.times, min(self.running(rate), self.engine.chunk_tokens - 1.0)
        room = self.engine.chunk_tokens - decodes
        step = times.a0_s + times.a1_s * room + decodes * (times.a2_s + times.a3_s * self.costs.context)
        return self.costs.prompt / room * step

    def _model(self) -> StepModel:
        return StepModel(self.engine.times)

    def _most_running(self, running: float) -> int:
        """How many may run so that the pace holds with a full chunk in each step and the KV is enough; but no fewer
        than there are when the engine carries what it can."""
        places, least = int(self.places), math.ceil(running + 2 * math.sqrt(running))
        if not self.objective.tpot_ms:
            return places
        tpot_s, chunk = self.objective.tpot_ms / 1000, self.engine.chunk_tokens
        most = self._model().most_running(tpot_s, chunk, self.costs.context, places)
        return min(places, max(1, most, least))

    def chunk_for_pace(self) -> int:
        """The largest chunk with which a full step keeps the pace while nothing else runs."""
        times, aim_s = self.engine.times, PACE_ROOM * self.objective.tpot_ms / 1000
        if not aim_s or times.a1_s <= 0:
            return self.engine.chunk_tokens
        return max(1, min(self.engine.chunk_tokens, int((aim_s - times.a0_s) / times.a1_s)))

    def _prefill_rate(self, running: float) -> float:
        return self._model().prefill_rate(self.engine.chunk_tokens, running, running * self.costs.context)


def _slope(load: float, service_s: float, variation: float) -> float:
    """Kingman's exponent for each second, of one server."""
    return 2 * (1 - load) / max(TINY, service_s * variation)


def search(holds: Callable[[float], bool], top: float) -> float:
    """The highest rate up to `top` at which it still holds; 0 if it never does."""
    low, high = 0.0, top
    if holds(top * (1 - TIGHT)):
        return top
    while high - low > TIGHT * top:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def stand_ins(values: Sequence[int]) -> list[int]:
    """SAMPLE quantiles, each standing for as many values."""
    ordered = sorted(values)
    return [ordered[(2 * i + 1) * len(ordered) // (2 * SAMPLE)] for i in range(SAMPLE)]


def normal(deviations: float) -> float:
    """The part of a normal distribution below that many deviations."""
    return 0.5 * (1 + math.erf(deviations / math.sqrt(2)))
