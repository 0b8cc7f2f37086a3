"""The report of a series of runs: loads, seeds, numbers, as JSON and as a table in a terminal.

A report is data only, so that runs of other days and other servers can be put side by side. Its numbers are those of
`bench.goodput.measure` or of `bench.sim_metrics.measure`, which have the same names.
"""

import datetime
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from bench import sim_metrics
from bench.goodput import Outcome, Record, measure
from bench.replay import Generator
from bench.sim_metrics import rounded
from policies.types import Objective

KIND = "signalbox-goodput"
VERSION = 1
BINS = 60  # of a run's time
PERCENTILES = tuple(range(101))
CAPACITY_LEVELS = (0.90, 0.95, 0.99)


class ReportError(Exception):
    """A file is no report. Its text names the file."""


class Series(Struct, frozen=True):
    """Requests per second over a run's time, in bins of `bin_s` by when they came: all, good ones, refused ones."""

    bin_s: float
    came: tuple[float, ...]
    good: tuple[float, ...]
    refused: tuple[float, ...]


class Run(Struct, frozen=True, kw_only=True):
    """One load with one seed. `quantiles` are times in ms at 0, 1, ..., 100 %."""

    seed: int
    span_s: float
    numbers: dict[str, Any]
    quantiles: dict[str, tuple[float, ...]] = {}
    series: Series | None = None
    generator: Generator | None = None


class Point(Struct, frozen=True, kw_only=True):
    """One load, in requests/s asked for: the mean over its runs, with `..._ci95` beside each number of several."""

    load: float
    numbers: dict[str, Any]
    runs: tuple[Run, ...]


class Report(Struct, frozen=True, kw_only=True):
    """One server (or strategy) under its loads. `objectives` are by source, `asked` is how it was asked."""

    kind: Literal["signalbox-goodput"] = "signalbox-goodput"
    version: Literal[1] = 1
    label: str
    made: str
    objectives: dict[str, Objective]
    asked: dict[str, Any]
    points: tuple[Point, ...]
    capacity: dict[str, float] = {}
    notes: tuple[str, ...] = ()


def run_of(
    records: Sequence[Record], aims: Mapping[str, Objective], span_s: float, seed: int, generator: Generator | None
) -> Run:
    """The report of one run."""
    started = [one for one in records if one.started and one.outcome is not Outcome.LEFT]
    times = {
        "ttft": [one.ttft_ms for one in started],
        "tpot": [one.tpot_ms for one in started if one.outcome is Outcome.DONE and one.output_tokens > 1],
    }
    return Run(
        seed=seed,
        span_s=rounded(span_s),
        numbers=_rounded(measure(records, aims, span_s)),
        quantiles={name: percentiles(some) for name, some in times.items() if some},
        series=_series(records, aims, span_s),
        generator=generator,
    )


def point_of(load: float, runs: Sequence[Run]) -> Point:
    """One load over its seeds."""
    return Point(load=load, numbers=sim_metrics.summary([run.numbers for run in runs]), runs=tuple(runs))


def report_of(
    label: str, aims: Mapping[str, Objective], asked: dict[str, Any], points: Sequence[Point], notes: Sequence[str] = ()
) -> Report:
    """All of it, loads in order."""
    ordered = tuple(sorted(points, key=lambda point: point.load))
    curve = [(point.load, float(point.numbers["all"]["attained"])) for point in ordered]
    found = {f"{level:.0%}": carries(curve, level) for level in CAPACITY_LEVELS}
    return Report(
        label=label,
        made=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        objectives=dict(aims),
        asked=asked,
        points=ordered,
        capacity={level: rounded(load) for level, load in found.items() if load is not None},
        notes=tuple(dict.fromkeys((*notes, *_pressed(ordered)))),
    )


def carries(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """The load up to which at least `level` is attained, between two measured loads on a straight line; None where the
    loads that were measured do not enclose it."""
    for (load, attained), (next_load, next_attained) in itertools.pairwise(curve):
        if attained >= level > next_attained:
            return load + (next_load - load) * (attained - level) / (attained - next_attained)
    return None


def percentiles(values: Sequence[float]) -> tuple[float, ...]:
    """Values at 0, 1, ..., 100 %."""
    ordered = sorted(values)
    return tuple(rounded(ordered[min(len(ordered) - 1, len(ordered) * p // 100)]) for p in PERCENTILES)


def _series(records: Sequence[Record], aims: Mapping[str, Objective], span_s: float) -> Series:
    bin_s = span_s / BINS
    came, good, refused = ([0.0] * BINS for _ in range(3))
    for one in records:
        at = min(BINS - 1, max(0, int(one.came_s / bin_s)))
        came[at] += 1 / bin_s
        if one.good(aims[one.source]):
            good[at] += 1 / bin_s
        if one.outcome is Outcome.REFUSED:
            refused[at] += 1 / bin_s
    return Series(rounded(bin_s), *(tuple(map(rounded, values)) for values in (came, good, refused)))


def _rounded(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _rounded(value) if isinstance(value, Mapping) else rounded(value) for name, value in numbers.items()
    }  # fmt: skip


def _pressed(points: Sequence[Point]) -> list[str]:
    """One note for each load at which a run's load generator held it up: its worst."""
    found = []
    for point in points:
        pressed = [run.generator for run in point.runs if run.generator is not None and run.generator.pressed]
        if pressed:
            worst = max(pressed, key=lambda one: one.lag_p99_ms)
            runs = f"in {len(pressed)} of {len(point.runs)} runs "
            found.append(f"at {point.load:g} requests/s the load generator was the bottleneck {runs}({worst.pressed})")
    return found


# on paper


def encoded(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def load(file: Path) -> Report:
    """A report from a file. Raises ReportError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Report)
    except OSError as error:
        raise ReportError(f"{file}: {error.strerror or error}") from None
    except msgspec.MsgspecError as error:
        raise ReportError(f"{file}: not a report of signalbox bench: {error}") from None


def text(report: Report) -> str:
    """What a terminal shows: one line a load, then who had what at the highest."""
    rows = [(f"{point.load:.4g}/s", point.numbers["all"]) for point in report.points]
    lines = [report.label, sim_metrics.table(rows)]
    if report.capacity:
        found = ", ".join(f"{load:.3g}/s at {level}" for level, load in report.capacity.items())
        lines.append(f"carries {found} attained")
    last = report.points[-1].numbers
    for group in ("sources", "classes", "tenants", "quartiles"):
        parts = last.get(group, {})
        if parts:
            attained = "  ".join(f"{name or '-'} {part['attained']:.3f}" for name, part in parts.items())
            lines.append(f"attained by {group} at {report.points[-1].load:.4g}/s: {attained}")
    for reason, part in last.get("reasons", {}).items():
        lines.append(f"{reason}: {part['of_all']:.1%} of requests, told after {part['after_p50_ms']:.0f} ms (median)")
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])
