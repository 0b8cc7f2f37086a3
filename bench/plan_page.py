"""A profile, and a plan, as a page of the same kind as a report's."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

from bench import plan as plans
from bench.plan import MEANING, Planned
from bench.report_page import document, figure, grid, text
from bench.traces import LENGTHS_ONLY, Row, Trace
from bench.workload import Group, Profile, Spread

BINS = 120


def profile_page(found: Profile, rows: Sequence[Row]) -> str:
    """The shape of a workload."""
    return document(f"Workload: {found.name}", "".join(_profile_body(found, rows)), _profile_figures(rows))


def plan_page(found: Planned, rows: Sequence[Row]) -> str:
    """The plan first, then the workload that it is for."""
    body = "".join([*_plan_body(found), *_profile_body(found.profile, rows)])
    return document(f"Plan: {found.profile.name}", body, _plan_figures(found) | _profile_figures(rows))


def rows_of(trace: Trace) -> tuple[Row, ...]:
    """Rows as they are shown."""
    return trace.spread(random.Random(trace.name))


def _profile_body(found: Profile, rows: Sequence[Row]) -> Iterable[str]:
    span = f" in {found.span_s:.0f} s" if found.span_s else ""
    yield f"<h1>Workload: {text(found.name)}</h1><p>{found.requests} requests{span}.</p>"
    notes = "".join(f"<li>{text(note)}</li>" for note in found.notes)
    yield f'<ul class="notes">{notes}</ul>' if notes else ""
    yield '<div class="figures">' + figure("lengths", "Lengths", "Part of requests with so many tokens or fewer.")
    if rows[0].arrival_s != LENGTHS_ONLY:
        yield figure("arrivals", "Arrivals", "Requests per second over the trace's time.")
    yield "</div>"
    lengths = [(word, _spread(one)) for word, one in (("prompt", found.input), ("answer", found.output))]
    yield grid("Tokens", "", ("mean", "p50", "p90", "p99", "largest"), lengths)
    if found.arrivals is not None:
        come = found.arrivals
        yield f"<p>{come.rate:.3g} requests/s, variation of gaps {come.gap_cv:.2f}.</p>"
        lines = [(f"{name} s", (f"{come.peak[name]:.3g}", f"{come.dispersion[name]:.3g}")) for name in come.peak]
        yield grid("Bursts", "window", ("most requests/s", "variance of counts / mean (Poisson: 1)"), lines)
    if found.at_once is not None:
        yield f"<p>{found.at_once[0]:.3g} requests at once, at most {found.at_once[1]:.0f} (of all models).</p>"
    if found.reuse is not None:
        yield f"<p>{found.reuse:.0%} of prompt blocks came before (a cache that never forgets).</p>"
    for word, groups in (("tenant", found.tenants), ("class", found.classes)):
        heads = ("of requests", "of tokens", "per s", "variation of gaps", "prompt", "answer")
        yield grid(f"By {word}", word, heads, [(text(group.name or "–"), _group(group)) for group in groups])


def _plan_body(found: Planned) -> Iterable[str]:
    aim = found.objective
    goals = {"first token": aim.ttft_ms, "per token": aim.tpot_ms, "in all": aim.total_ms}
    said = ", ".join(f"{name} {value} ms" for name, value in goals.items() if value) or "no objective"
    yield f"<h1>Plan</h1><p>{said}; attained by {found.level:.0%} of requests.</p>"
    notes = "".join(f"<li>{text(note)}</li>" for note in found.notes)
    yield f'<ul class="notes">{notes}</ul>' if notes else ""
    lines = [(text(line[0]), line[1:]) for line in map(plans.cells, found.capacities)]
    yield grid("What each engine carries, and limits to set", plans.HEADS[0], plans.HEADS[1:], lines)
    if len(found.capacities) > 1:
        yield f"<p>The pool carries {found.pool:.3g} requests/s.</p>"
    needs = [(text(need.engine), (str(need.replicas or "–"), f"{need.busy:.0%}")) for need in found.needs]
    caption = f"For {found.load:.3g} requests/s, {found.headroom:.0%} of what they carry kept free"
    yield grid(caption, "engine", ("replicas", "busy"), needs)
    limits = [
        (f"{text(capacity.engine.name)}: {MEANING[limit.what]}", (f"{limit.rate:.3g}", text(limit.why)))
        for capacity in found.capacities
        for limit in capacity.limits
    ]
    yield grid("What breaks, and in which order", "", ("at requests/s", ""), limits)
    yield '<div class="figures">' + figure("attained", "Attained", "Part of requests, by the rate of one engine.")
    yield figure("step", "Mean step", "By the rate of one engine.")
    yield figure("running", "Decodes at once", "By the rate of one engine.") + "</div>"


def _spread(one: Spread) -> tuple[str, ...]:
    return tuple(f"{value:,.0f}" for value in (one.mean, one.p50, one.p90, one.p99, one.largest))


def _group(group: Group) -> tuple[str, ...]:
    return (
        f"{group.requests:.1%}", f"{group.tokens:.1%}", f"{group.rate:.3g}", f"{group.gap_cv:.2f}",
        f"{group.input_mean:,.0f}", f"{group.output_mean:,.0f}",
    )  # fmt: skip


def _profile_figures(rows: Sequence[Row]) -> dict[str, Any]:
    curves = [
        _cumulative("prompt", 0, [row.input_tokens for row in rows]),
        _cumulative("answer", 1, [row.output_tokens for row in rows]),
    ]
    found: dict[str, Any] = {
        "lengths": {"x": "tokens", "y": "part of requests", "curves": curves, "percent": True, "logX": True}
    }
    if rows[0].arrival_s != LENGTHS_ONLY:
        bin_s = max(1.0, rows[-1].arrival_s / BINS)
        counts = [0] * (int(rows[-1].arrival_s / bin_s) + 1)
        for row in rows:
            counts[int(row.arrival_s / bin_s)] += 1
        x, y = [(at + 0.5) * bin_s for at in range(len(counts))], [count / bin_s for count in counts]
        curve = {"label": f"per s, over {bin_s:.3g} s", "color": 0, "x": x, "y": y}
        found["arrivals"] = {"x": "seconds", "y": "requests/s", "curves": [curve]}
    return found


def _cumulative(label: str, color: int, values: Sequence[int]) -> dict[str, Any]:
    ordered = sorted(values)
    parts = {max(1, ordered[min(len(ordered) - 1, len(ordered) * p // 100)]): p / 100 for p in range(101)}
    return {"label": label, "color": color, "x": list(parts), "y": list(parts.values())}


def _plan_figures(found: Planned) -> dict[str, Any]:
    attained, steps, running, lines = [], [], [], []
    for nth, (capacity, curve) in enumerate(zip(found.capacities, found.curves, strict=True)):
        name, base = capacity.engine.name, {"color": nth, "x": curve.rates}
        attained.append({**base, "label": name, "y": curve.attained})
        if found.objective.ttft_ms:
            attained.append({**base, "label": f"{name}, first token", "dash": True, "y": curve.ttft})
        if found.objective.tpot_ms:
            attained.append({**base, "label": f"{name}, pace", "dash": True, "y": curve.tpot})
        steps.append({**base, "label": name, "y": curve.step_ms})
        running.append({**base, "label": name, "y": curve.running})
        lines.append({"at": capacity.rate, "label": f"{capacity.rate:.3g}/s"})
    x = "requests/s"
    return {
        "attained": {"x": x, "y": "part of requests", "curves": attained, "percent": True, "lines": lines},
        "step": {"x": x, "y": "ms", "curves": steps, "lines": lines},
        "running": {"x": x, "y": "requests", "curves": running, "lines": lines},
    }
