"""What a run was worth: goodput, attainment, refusals, waste, latencies; means over seeds with their 95 % intervals."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.sim_site import Call, Outcome, Site

Numbers = dict[str, float]
OUTPUT_WEIGHT = 2  # of an output token, in units of a prompt token

_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # by degrees of freedom, from 1


def tokens(calls: Iterable[Call]) -> int:
    """Weighted tokens of answers."""
    return sum(call.prompt_tokens + OUTPUT_WEIGHT * call.produced for call in calls)


def spent(calls: Iterable[Call]) -> int:
    """Weighted tokens that engines worked for; a prompt counts whole once it has a first token."""
    return sum(call.prompt_tokens + OUTPUT_WEIGHT * call.produced for call in calls if call.first_ms >= 0)


def measure(site: Site, span_s: float) -> dict[str, Any]:
    """The numbers of one run in which requests came for `span_s` seconds. Times in ms."""
    calls = site.calls
    staying = [call for call in calls if call.outcome is not Outcome.LEFT]
    return {
        "all": _group(staying, span_s) | _refusals(staying) | _latencies(staying) | _engines(site, span_s),
        "tenants": {
            name: _group(group, span_s) | _latencies(group)
            for name, group in _by(staying, lambda call: str(call.tenant.name))
        },
        "quartiles": {name: _group(group, span_s) for name, group in _quartiles(staying)},
    }


def _group(calls: Sequence[Call], span_s: float) -> Numbers:
    good = [call for call in calls if call.good]
    sent = [call for call in calls if call.engine >= 0]
    return {
        "requests": len(calls),
        "goodput_rps": len(good) / span_s,
        "goodput_tps": tokens(good) / span_s,
        "attained": _part(len(good), len(calls)),
        "attained_accepted": _part(len(good), len(sent)),
        "refused": _part(sum(call.outcome is Outcome.REFUSED for call in calls), len(calls)),
    }


def _refusals(calls: Sequence[Call]) -> Numbers:
    refused = [call for call in calls if call.refused_ms >= 0]
    waits = [call.refused_ms - call.came_ms for call in refused]
    parts = [
        (call.refused_ms - call.came_ms) / call.tenant.objective.ttft_ms
        for call in refused
        if call.tenant.objective.ttft_ms
    ]
    come_again = [call for call in calls if call.attempts]
    return {
        "refuse_ms": quantile(waits, 0.5),
        "refuse_of_deadline": quantile(parts, 0.5),
        "retried": len(come_again),
        "retried_done": _part(sum(call.outcome is Outcome.DONE for call in come_again), len(come_again)),
    }


def _latencies(calls: Sequence[Call]) -> Numbers:
    ttft = sorted(call.first_ms - call.arrival_ms for call in calls if call.first_ms >= 0)
    tpot = sorted(call.tpot_ms for call in calls if call.outcome is Outcome.DONE and call.produced > 1)
    return {
        f"{name}_p{level}_ms": quantile(times, level / 100)
        for name, times in (("ttft", ttft), ("tpot", tpot))
        for level in (50, 90, 99)
    }


def _engines(site: Site, span_s: float) -> Numbers:
    staying = [call for call in site.calls if call.outcome is not Outcome.LEFT]
    left = [call for call in site.calls if call.outcome is Outcome.LEFT]
    all_spent = spent(site.calls)
    return {
        "wasted": _part(spent(call for call in staying if not call.good), all_spent),
        "left": _part(len(left), len(site.calls)),
        "spent_on_left": _part(spent(left), all_spent),
        "steps_after_leaving": _part(site.late_work, len(left)),
        "preemptions": sum(engine.preemptions for engine in site.engines),
        "preempted": _part(sum(engine.preemptions for engine in site.engines), len(site.calls)),
        "busy": site.busy_ms / len(site.engines) / max(site.now_ms, 1.0),
        "drained_s": max(0.0, site.now_ms / 1000 - span_s),
    }


def _by(calls: Sequence[Call], key: Any) -> list[tuple[str, list[Call]]]:
    groups: dict[str, list[Call]] = {}
    for call in calls:
        groups.setdefault(key(call), []).append(call)
    return sorted(groups.items())


def _quartiles(calls: Sequence[Call]) -> list[tuple[str, list[Call]]]:
    """By prompt length, shortest first."""
    ordered = sorted(calls, key=lambda call: (call.prompt_tokens, call.number))
    cuts = [len(ordered) * i // 4 for i in range(5)]
    return [(f"q{i + 1}", ordered[cuts[i] : cuts[i + 1]]) for i in range(4) if cuts[i] < cuts[i + 1]]


def _part(some: float, whole: float) -> float:
    return some / whole if whole else 0.0


def quantile(values: Sequence[float], level: float) -> float:
    """The smallest value that at least `level` of them do not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(level * len(ordered) - 1e-9) - 1)]


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of equal reports, number by number; with several runs the half-width of the 95 % interval beside each."""
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        values = [run[name] for run in runs if name in run]
        if isinstance(values[0], Mapping):
            merged[name] = summary(values)
            continue
        merged[name] = rounded(statistics.fmean(values))
        if len(values) > 1:
            merged[f"{name}_ci95"] = rounded(interval(values))
    return merged


def interval(values: Sequence[float]) -> float:
    """Half the width of Student's 95 % interval of the mean."""
    freedom = len(values) - 1
    t = _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.5 / freedom
    return t * statistics.stdev(values) / math.sqrt(len(values))


def rounded(value: float) -> float:
    """Six digits: what a report shows."""
    return float(f"{value:.6g}")


_COLUMNS = (
    ("good/s", "goodput_rps", "{:.2f}"),
    ("+-", "goodput_rps_ci95", "{:.2f}"),
    ("good tok/s", "goodput_tps", "{:.0f}"),
    ("attained", "attained", "{:.3f}"),
    ("of accepted", "attained_accepted", "{:.3f}"),
    ("refused", "refused", "{:.3f}"),
    ("after", "refuse_of_deadline", "{:.2f}"),
    ("wasted", "wasted", "{:.3f}"),
    ("TTFT p50", "ttft_p50_ms", "{:.0f}"),
    ("p99", "ttft_p99_ms", "{:.0f}"),
    ("TPOT p50", "tpot_p50_ms", "{:.0f}"),
    ("p99", "tpot_p99_ms", "{:.0f}"),
    ("preempted", "preempted", "{:.3f}"),
)


def table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Labelled summaries as lines of text. `after`: median time to refuse, as part of the deadline."""
    width = max(len(label) for label, _ in rows)
    lines = [" " * width + "".join(f"{head:>12}" for head, _, _ in _COLUMNS)]
    for label, numbers in rows:
        cells = (form.format(numbers[name]) if name in numbers else "" for _, name, form in _COLUMNS)
        lines.append(f"{label:{width}}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)
