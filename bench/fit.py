"""The simulated engine fitted to a real one: step times that make it answer a recorded run as the engine did.

A record says when a request was sent, when its first token came and when its last; not what else each step had to do.
The simulated engine supplies that: it is given the same requests, and each request's first token and each of its paces
become one equation, with the work of the steps that it went through on one side and the measured time on the other. The
time of steps is linear in their work, so the coefficients are nonnegative least squares, weighted again and again so
that it is relative errors that count, and not their squares (IRLS): real runs stall. They change the schedule, so all
of it is done a few times, and the best is kept (Gauss-Newton with the schedule held).
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bench.costs import Engine
from bench.goodput import Outcome, Record
from bench.sim_baselines import PassThrough
from bench.sim_metrics import quantile, rounded
from bench.sim_site import Call, Seen, Site
from bench.sim_workload import Arrival
from bench.simulate import Client, engine_of
from policies.nonnegative import nonnegative
from policies.steptime import Coefficients
from policies.types import Objective

ROUNDS = 12
SCALINGS = 4  # rounds before, in which only the speed of it all is found
FIT = 0.6  # of a single run, by time; the rest is what it is judged by
LEAST = 20  # requests on each side
IRLS = 8
CLOSE = 0.02  # relative error under which a sample weighs no more
RIDGE = 1e-6  # of a column's own size: what nothing excites stays near 0
SIZE = 6  # steps, prompt tokens, decodes, contexts, computed before; and once per first token
NEVER = float("inf")
SLOWEST_S = 600.0

Vector = tuple[float, ...]
Equation = tuple[Vector, float]
ASKER = Client(name="recorded", source="recorded", objective=Objective())


class FitError(Exception):
    """A recording can't be used. Its text names the file."""


class Fit(Struct, frozen=True, kw_only=True):
    """Step times, and what comes before a first token's steps (HTTP, reading the prompt).

    Errors are of requests that were not fitted: the median over them of how far the simulated time is from the measured
    one, as a part of that. `ttft_ms` and `tpot_ms` are their medians, measured and simulated.
    """

    engine: Engine
    before_s: float
    fitted: int
    judged: int
    ttft_error: float
    tpot_error: float
    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]


class Heard(Struct, frozen=True):
    """One recorded request, in seconds from the run's begin; the first token after `ttft_s`, the rest `pace_s` each."""

    sent_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    pace_s: float
    whole: bool


def heard(file: Path) -> list[Heard]:
    """The requests of a file that `signalbox bench --records` wrote, of one run. Raises FitError."""
    try:
        lines = [line for line in file.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise FitError(f"--fit: {file}: {error.strerror or error}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(msgspec.json.decode(line, type=Record))
        except msgspec.MsgspecError as error:
            raise FitError(f"--fit: {file}:{number}: not a record of `signalbox bench --records`: {error}") from None
    numbers = [record.number for record in records]
    if len(set(numbers)) < len(numbers):
        raise FitError(f"--fit: {file}: several runs are in it: give one load and one seed")
    found = sorted((_heard(one) for one in records if one.started and one.output_tokens), key=lambda one: one.sent_s)
    if sum(one.whole for one in found) < LEAST:
        raise FitError(f"--fit: {file}: fewer than {LEAST} requests in it were answered in full")
    return found


def _heard(one: Record) -> Heard:
    sent_s = one.at_s + one.lag_s
    return Heard(
        sent_s, max(1, one.prompt_tokens or one.asked_prompt_tokens), one.output_tokens, one.first_s - sent_s,
        one.tpot_ms / 1000, one.outcome is Outcome.DONE,
    )  # fmt: skip


def fit(run: Sequence[Heard], unseen: Sequence[Heard], start: Engine) -> Fit:
    """The engine of one run, judged by another; with none, by the last 40 % of the same, which are not fitted."""
    cut = len(run) if unseen else int(FIT * len(run))
    engine, before_s = _fitted(run[:cut], start)
    judged = unseen or run
    pairs = list(zip(judged, _replayed(judged, engine, before_s), strict=True))[0 if unseen else cut :]
    first, pace = _firsts(pairs), _paces(pairs)
    if len(first) < LEAST:
        raise FitError(f"--fit: {len(first)} answers are too few to judge by: give a second run, or a longer one")
    return Fit(
        engine=engine,
        before_s=rounded(before_s),
        fitted=cut,
        judged=len(first),
        ttft_error=_error(first),
        tpot_error=_error(pace),
        ttft_ms=_medians(first),
        tpot_ms=_medians(pace),
    )


def _fitted(run: Sequence[Heard], start: Engine) -> tuple[Engine, float]:
    engine, before_s = start, 0.0
    for _ in range(SCALINGS):
        engine = replace(engine, times=_mixed(engine.times, engine.times, 0.0, _slower(run, engine)))
    best, least = (engine, before_s), math.inf
    for nth in range(ROUNDS):
        times, before_s = _solved(_equations(run, engine), engine.times, before_s)
        engine = replace(engine, times=_mixed(engine.times, times, 1.0 if nth < 2 else 0.5, 1.0))
        pairs = list(zip(run, _replayed(run, engine, before_s), strict=True))
        error = sum(map(_error, (_firsts(pairs), _paces(pairs))))
        if error < least:
            best, least = (engine, before_s), error
    return best


def _slower(run: Sequence[Heard], engine: Engine) -> float:
    """By what factor the real engine is slower, by the median of whole answers."""
    pairs = zip(run, _replayed(run, engine, 0.0), strict=True)
    return statistics.median(_whole_s(real) / max(_whole_s(simulated), 1e-6) for real, simulated in pairs)


def _whole_s(one: Heard) -> float:
    return one.ttft_s + one.pace_s * (one.output_tokens - 1)


def _firsts(pairs: Iterable[tuple[Heard, Heard]]) -> list[tuple[float, float]]:
    return [(real.ttft_s, simulated.ttft_s) for real, simulated in pairs if real.whole]


def _paces(pairs: Iterable[tuple[Heard, Heard]]) -> list[tuple[float, float]]:
    return [(real.pace_s, simulated.pace_s) for real, simulated in pairs if real.whole and real.pace_s > 0]


class _Witness(PassThrough):
    """Remembers through how much work each call went, to its first token and from there to its last."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.first: dict[int, Vector] = {}
        self.rest: dict[int, Vector] = {}
        self._site = site
        self._whole: Vector = (0.0,) * SIZE
        self._came: list[Call] = []
        self._since: dict[int, Vector] = {}

    def arrive(self, call: Call) -> None:
        self._came.append(call)
        super().arrive(call)

    def stepped(self, seen: Seen, calls: list[Call]) -> None:
        work, before, now_ms = seen.work, self._whole, self._site.now_ms
        step = (1.0, work.prefill_tokens, work.running, work.kv_tokens, work.context_tokens, 0.0)
        begun_ms = now_ms - seen.seconds * 1000
        for call in self._came:
            missed = min(1.0, max(0.0, (call.arrival_ms - begun_ms) / (now_ms - begun_ms)))
            self._since[call.number] = _plus(before, step, missed)
        self._came.clear()
        self._whole = _plus(before, step, 1.0)
        for call in calls:
            if call.produced == 1:
                self.first[call.number] = (*_minus(self._whole, self._since[call.number])[:-1], 1.0)
                self._since[call.number] = self._whole
            elif call.end_ms >= 0:
                self.rest[call.number] = _minus(self._whole, self._since[call.number])


def _run(run: Sequence[Heard], engine: Engine) -> tuple[Site, _Witness]:
    asked = [Arrival(one.sent_s * 1000, ASKER, one.prompt_tokens, one.output_tokens, NEVER) for one in run]
    site = Site([engine_of(engine)], asked)
    witness = _Witness(site)
    site.run(witness)
    return site, witness


def _replayed(run: Sequence[Heard], engine: Engine, before_s: float) -> list[Heard]:
    """The same requests as the simulated engine answers them."""
    site, _ = _run(run, engine)
    return [
        replace(one, ttft_s=(call.first_ms - call.arrival_ms) / 1000 + before_s, pace_s=call.tpot_ms / 1000)
        for one, call in zip(run, site.calls, strict=True)
    ]


def _equations(run: Sequence[Heard], engine: Engine) -> list[Equation]:
    _, witness = _run(run, engine)
    found = []
    for number, one in enumerate(run):
        if one.whole and 0 < one.ttft_s < SLOWEST_S:
            found.append((witness.first[number], one.ttft_s))
        if one.whole and number in witness.rest and one.pace_s > 0:
            found.append((witness.rest[number], one.pace_s * (one.output_tokens - 1)))
    return found


def _solved(equations: Sequence[Equation], times: Coefficients, before_s: float) -> tuple[Coefficients, float]:
    """Nonnegative least absolute relative errors, from these coefficients on."""
    found = [times.a0_s, times.a1_s, times.a2_s, times.a3_s, times.a4_s, before_s]
    for _ in range(IRLS):
        rows = []
        for work, took_s in equations:
            expected_s = max(_plain(found, work), 1e-6)
            weight = 1 / (expected_s * math.sqrt(max(abs(took_s / expected_s - 1), CLOSE)))
            rows.append((tuple(weight * value for value in work), weight * took_s))
        found = _least_squares(rows)
    a0, a1, a2, a3, a4, before_s = found
    return Coefficients(a0_s=max(a0, 1e-6), a1_s=a1, a2_s=a2, a3_s=a3, a4_s=a4), before_s


def _plain(of: Sequence[float], work: Vector) -> float:
    return sum(one * value for one, value in zip(of, work, strict=True))


def _least_squares(rows: Sequence[Equation]) -> list[float]:
    """Nonnegative; columns in units of their size."""
    size = [math.sqrt(sum(row[i] ** 2 for row, _ in rows)) or 1.0 for i in range(SIZE)]
    gram = [[sum(row[i] * row[j] for row, _ in rows) / (size[i] * size[j]) for j in range(SIZE)] for i in range(SIZE)]
    gram = [[1.0 if i == j else value / (1 + RIDGE) for j, value in enumerate(row)] for i, row in enumerate(gram)]
    right = [sum(row[i] * value for row, value in rows) / size[i] / (1 + RIDGE) for i in range(SIZE)]
    return [value / size[i] for i, value in enumerate(nonnegative(gram, right))]


def _mixed(old: Coefficients, new: Coefficients, part: float, factor: float) -> Coefficients:
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in old.__struct_fields__}
    return Coefficients(**{name: factor * (one + part * (other - one)) for name, (one, other) in pairs.items()})


def _plus(one: Vector, other: Vector, times: float) -> Vector:
    return tuple(mine + times * theirs for mine, theirs in zip(one, other, strict=True))


def _minus(one: Vector, other: Vector) -> Vector:
    return _plus(one, other, -1.0)


def _error(pairs: Sequence[tuple[float, float]]) -> float:
    """The median relative error; pairs are of the measured and the simulated time."""
    return rounded(statistics.median(abs(mine - theirs) / max(mine, 1e-6) for mine, theirs in pairs)) if pairs else 0.0


def _medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return (
        rounded(1000 * quantile([mine for mine, _ in pairs], 0.5)),
        rounded(1000 * quantile([theirs for _, theirs in pairs], 0.5)),
    )


def text(found: Fit) -> str:
    """For a terminal: what to give to `--step-times`, and how good it is."""
    times = found.engine.times
    values = (times.a0_s * 1e3, times.a1_s * 1e6, times.a2_s * 1e6, times.a3_s * 1e6, times.a4_s * 1e6)
    lines = [
        f"fitted to {found.fitted} requests, judged by {found.judged} others",
        "--step-times " + ",".join(f"{value:.4g}" for value in values),
        f"before the first step {found.before_s * 1000:.3g} ms, which step times leave out",
    ]
    for name, error, (measured, simulated) in (
        ("TTFT", found.ttft_error, found.ttft_ms), ("TPOT", found.tpot_error, found.tpot_ms),
    ):  # fmt: skip
        lines.append(
            f"{name} median error {error:.1%}; median measured {measured:.4g} ms, simulated {simulated:.4g} ms"
        )
    return "\n".join(lines)
