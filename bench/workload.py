"""The shape of a workload: how requests come, how long they are, who sends them, what prompts share."""

import itertools
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from msgspec import Struct

from bench.sim_metrics import quantile, rounded
from bench.traces import Row, Trace

WINDOWS_S = (1.0, 10.0, 60.0)


class Spread(Struct, frozen=True):
    """Of tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    largest: float


class Arrivals(Struct, frozen=True):
    """`rate` in requests/s; `gap_cv` the variation of gaps; by window of so many seconds: `dispersion`, the variance of
    counts over their mean (1 is Poisson), and `peak`, the most requests/s in one."""

    rate: float
    gap_cv: float
    dispersion: dict[str, float]
    peak: dict[str, float]


class Group(Struct, frozen=True):
    """One tenant's or one class's part of it."""

    name: str
    requests: float
    tokens: float
    rate: float
    gap_cv: float
    input_mean: float
    output_mean: float


class Profile(Struct, frozen=True, kw_only=True):
    """A workload. `together` is the correlation of prompt and answer; `reuse` the part of prompt blocks that came
    before, None where the trace does not tell; `fairness` Jain's index of the tenants' rates, 1 is equal. `at_once` are
    the requests that a running gateway had, mean and most."""

    name: str
    requests: int
    span_s: float
    input: Spread
    output: Spread
    together: float
    arrivals: Arrivals | None = None
    reuse: float | None = None
    tenants: tuple[Group, ...] = ()
    classes: tuple[Group, ...] = ()
    fairness: float | None = None
    at_once: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()


def profile(trace: Trace) -> Profile:
    """The shape of a trace."""
    rows = trace.spread(random.Random(trace.name))
    tenants = _groups(rows, trace.span_s, lambda row: row.tenant)
    rates = [group.requests for group in tenants]
    return Profile(
        name=trace.name,
        requests=len(rows),
        span_s=rounded(trace.span_s),
        input=spread([row.input_tokens for row in rows]),
        output=spread([row.output_tokens for row in rows]),
        together=rounded(_correlation(rows)),
        arrivals=arrivals([row.arrival_s for row in rows], trace.span_s) if trace.span_s else None,
        reuse=_reuse(rows),
        tenants=tenants,
        classes=_groups(rows, trace.span_s, lambda row: row.klass),
        fairness=rounded(sum(rates) ** 2 / len(rates) / sum(rate * rate for rate in rates)) if rates else None,
        notes=trace.notes,
    )


def spread(values: Sequence[float]) -> Spread:
    p50, p90, p99 = (quantile(values, level) for level in (0.5, 0.9, 0.99))
    return Spread(rounded(statistics.fmean(values)), p50, p90, p99, max(values))


def arrivals(times: Sequence[float], span_s: float) -> Arrivals:
    """Of arrivals in order, within a span of seconds."""
    dispersion, peak = {}, {}
    for window in WINDOWS_S:
        if span_s < 3 * window:
            continue
        counts = Counter(int((at - times[0]) / window) for at in times)
        bins = [counts[i] for i in range(max(1, int(span_s / window)))]
        mean = statistics.fmean(bins)
        dispersion[f"{window:g}"] = rounded(statistics.pvariance(bins) / mean) if mean else 0.0
        peak[f"{window:g}"] = rounded(max(bins) / window)
    return Arrivals(rounded(len(times) / span_s), rounded(gap_cv(times)), dispersion, peak)


def gap_cv(times: Sequence[float]) -> float:
    """The coefficient of variation of gaps between arrivals; 1 for too few to tell."""
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = statistics.fmean(gaps) if gaps else 0.0
    return statistics.pstdev(gaps) / mean if mean > 0 else 1.0


def _groups(rows: Sequence[Row], span_s: float, key: Callable[[Row], str]) -> tuple[Group, ...]:
    """The largest first; none where the rows have no names."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    if set(found) <= {""}:
        return ()
    tokens = sum(row.input_tokens + row.output_tokens for row in rows)
    groups = [
        Group(
            name,
            rounded(len(some) / len(rows)),
            rounded(sum(row.input_tokens + row.output_tokens for row in some) / tokens),
            rounded(len(some) / span_s) if span_s else 0.0,
            rounded(gap_cv([row.arrival_s for row in some])) if span_s else 0.0,
            rounded(statistics.fmean(row.input_tokens for row in some)),
            rounded(statistics.fmean(row.output_tokens for row in some)),
        )
        for name, some in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-group.requests, group.name)))


def _correlation(rows: Sequence[Row]) -> float:
    inputs, outputs = [row.input_tokens for row in rows], [row.output_tokens for row in rows]
    if len(set(inputs)) < 2 or len(set(outputs)) < 2:
        return 0.0
    return statistics.correlation(inputs, outputs)


def _reuse(rows: Sequence[Row]) -> float | None:
    """With a cache that never forgets: of the blocks of all prompts, the leading ones that were all seen before."""
    blocks = sum(len(row.blocks) for row in rows)
    if not blocks:
        return None
    seen: set[int] = set()
    found = 0
    for row in rows:
        found += next((nth for nth, block in enumerate(row.blocks) if block not in seen), len(row.blocks))
        seen.update(row.blocks)
    return rounded(found / blocks)


def text(found: Profile) -> str:
    """For a terminal."""
    lines = [f"{found.name}: {found.requests} requests" + (f" in {found.span_s:.0f} s" if found.span_s else "")]
    if found.arrivals is not None:
        come = found.arrivals
        windows = ", ".join(f"{peak:g}/s over {window} s" for window, peak in come.peak.items())
        bursts = ", ".join(f"{value:.3g} over {window} s" for window, value in come.dispersion.items())
        lines.append(f"arrivals    {come.rate:.3g}/s, variation of gaps {come.gap_cv:.2f}")
        lines.append(f"  at most   {windows}")
        lines.append(f"  bursts    variance of counts over their mean (Poisson: 1) {bursts}")
    lines.append(f"{'tokens':12}{'mean':>9}{'p50':>9}{'p90':>9}{'p99':>9}{'largest':>9}")
    for name, one in (("prompt", found.input), ("answer", found.output)):
        values = (one.mean, one.p50, one.p90, one.p99, one.largest)
        lines.append(f"{name:12}" + "".join(f"{value:9.0f}" for value in values))
    lines.append(f"correlation of prompt and answer {found.together:.2f}")
    if found.at_once is not None:
        lines.append(f"at once     {found.at_once[0]:.3g} requests, at most {found.at_once[1]:.0f} (of all models)")
    if found.reuse is not None:
        lines.append(f"{found.reuse:.0%} of prompt blocks came before (a cache that never forgets)")
    for word, groups in (("tenant", found.tenants), ("class", found.classes)):
        lines += _group_lines(word, groups)
    if found.fairness is not None and len(found.tenants) > 1:
        lines.append(f"Jain's index of the tenants' requests {found.fairness:.2f} (1: all alike)")
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _group_lines(word: str, groups: Sequence[Group]) -> list[str]:
    if not groups:
        return []
    width = max(len(word), *(len(group.name) for group in groups)) + 2
    heads = ("of requests", "of tokens", "per s", "gap cv", "prompt", "answer")
    lines = [f"{word:{width}}" + "".join(f"{head:>12}" for head in heads)]
    for group in groups:
        cells = (
            f"{group.requests:.1%}", f"{group.tokens:.1%}", f"{group.rate:.3g}", f"{group.gap_cv:.2f}",
            f"{group.input_mean:.0f}", f"{group.output_mean:.0f}",
        )  # fmt: skip
        lines.append(f"{group.name or '-':{width}}" + "".join(f"{cell:>12}" for cell in cells))
    return lines
