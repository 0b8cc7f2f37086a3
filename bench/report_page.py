"""The report as one HTML page that opens from a file: no network, light and dark, on a phone too.

Figures are drawn by uPlot (MIT, `gateway/http/console/uPlot-LICENSE.txt`), which goes into the page whole; every number
is also in a table, which needs no script.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import gateway.http
from bench.report import Report
from bench.report_figures import figures, loads, over_load

PAGE = Path(__file__).with_name("page")
PLOTS = Path(gateway.http.__file__).with_name("console")
GROUPS = {"sources": "source", "classes": "class", "tenants": "tenant", "quartiles": "prompt quartile"}

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("requests", "requests", "{:.0f}"),
    ("good/s", "goodput_rps", "{:.3g}"),
    ("good tokens/s", "goodput_tps", "{:,.0f}"),
    ("attained", "attained", "{:.1%}"),
    ("of accepted", "attained_accepted", "{:.1%}"),
    ("refused", "refused", "{:.1%}"),
    ("failed", "failed", "{:.1%}"),
    ("refused after, ms", "refuse_ms", "{:.0f}"),
    ("of objective", "refuse_of_deadline", "{:.1%}"),
    ("TTFT p50", "ttft_p50_ms", "{:.0f}"),
    ("p90", "ttft_p90_ms", "{:.0f}"),
    ("p99", "ttft_p99_ms", "{:.0f}"),
    ("TPOT p50", "tpot_p50_ms", "{:.1f}"),
    ("p90", "tpot_p90_ms", "{:.1f}"),
    ("p99", "tpot_p99_ms", "{:.1f}"),
)
_HALVES: tuple[tuple[str, str, str], ...] = (
    ("prompt tokens/s", "prompt_tps", "{:,.0f}"),
    ("output tokens/s", "output_tps", "{:,.0f}"),
    ("found in cache", "cached", "{:.1%}"),
    ("TTFT attained", "ttft_attained", "{:.1%}"),
    ("TPOT attained", "tpot_attained", "{:.1%}"),
    ("only TTFT missed", "missed_ttft_only", "{:.1%}"),
    ("only TPOT missed", "missed_tpot_only", "{:.1%}"),
    ("tokens wasted", "wasted", "{:.1%}"),
    ("tokens for leavers", "spent_on_left", "{:.1%}"),
    ("came again", "retried", "{:.0f}"),
    ("then answered", "retried_done", "{:.1%}"),
    ("good", "retried_good", "{:.1%}"),
    ("good from the first", "retried_good_from_first", "{:.1%}"),
    ("stall p99", "stall_p99_ms", "{:.0f}"),
)
_GENERATOR: tuple[tuple[str, str, str], ...] = (
    ("processes", "processes", "{:.0f}"),
    ("sent", "sent", "{:.0f}"),
    ("late p50, ms", "lag_p50_ms", "{:.2f}"),
    ("p99", "lag_p99_ms", "{:.2f}"),
    ("largest", "lag_max_ms", "{:.2f}"),
    ("loop late p99, ms", "loop_p99_ms", "{:.2f}"),
    ("busiest core", "busiest", "{:.0%}"),
)

_TOLD: tuple[tuple[str, str, str], ...] = (
    ("requests", "requests", "{:.0f}"),
    ("of all", "of_all", "{:.1%}"),
    ("told after p50, ms", "after_p50_ms", "{:.0f}"),
    ("p99", "after_p99_ms", "{:.0f}"),
)

Row = tuple[str, Mapping[str, Any]]


def page(reports: Sequence[Report]) -> str:
    """The page for one report, or for several side by side."""
    title = "Goodput" if len(reports) == 1 else "Goodput side by side"
    return document(title, "".join(_body(title, reports)), figures(reports))


def document(title: str, body: str, shown: Mapping[str, Any]) -> str:
    """A whole page: its body in HTML, and the data of the figures that `figure` has places for."""
    data = msgspec.json.encode(shown).decode().replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_file('uPlot.min.css', PLOTS)}\n{_file('report.css')}</style></head>\n<body><main>{body}</main>\n"
        f"<!--\nuPlot:\n{_file('uPlot-LICENSE.txt', PLOTS)}-->\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>{_file('uPlot.iife.min.js', PLOTS)}</script>\n<script>{_file('report.js')}</script>\n</body></html>\n"
    )


def _body(title: str, reports: Sequence[Report]) -> Iterable[str]:
    yield f"<h1>{title}</h1>"
    for nth, report in enumerate(reports):
        yield f"<p>{_dot(nth)}<strong>{text(report.label)}</strong> <span class=soft>{text(report.made)}</span></p>"
    notes = "".join(f"<li>{text(note)}</li>" for note in _notes(reports))
    yield f'<ul class="notes">{notes}</ul>' if notes else ""
    yield "<h2>At a glance</h2>" + _glance(reports)
    if any(len(report.points) > 1 for report in reports):
        yield "<h2>Over the load</h2>"
        yield '<p class="soft">Shaded: 95 % confidence over seeds. Drag to zoom, double-click to go back.</p>'
        yield f'<div class="figures">{"".join(figure(*one) for one in over_load())}</div>'
    yield "<h2>At one load</h2>" + _chooser(reports) + '<div class="figures">'
    yield figure("ttft_cdf", "Time to first token", "Part of answers whose first token came by then.")
    yield figure("tpot_cdf", "Time per output token", "Part of answers at that pace or faster.")
    yield figure("series", "Over time", "Requests by when they came, of the first seed.") + "</div>"
    yield "<h2>All numbers</h2>"
    for nth, report in enumerate(reports):
        yield from _numbers(nth, report)


def _notes(reports: Sequence[Report]) -> Iterable[str]:
    for report in reports:
        for note in report.notes:
            yield note if len(reports) == 1 else f"{report.label}: {note}"


def _glance(reports: Sequence[Report]) -> str:
    columns = ("95 % attained up to", "peak good/s", "peak good tokens/s", "at load", "attained", "of accepted",
               "refused", "refused after, ms", "tokens wasted")  # fmt: skip
    rows = []
    for nth, report in enumerate(reports):
        peak = max(report.points, key=lambda point: float(point.numbers["all"]["goodput_rps"]))
        most = max(float(point.numbers["all"]["goodput_tps"]) for point in report.points)
        last = report.points[-1]
        numbers = last.numbers["all"]
        carried = f"{report.capacity['95%']:.3g}/s" if "95%" in report.capacity else "not crossed"
        cells = (
            carried, f"{peak.numbers['all']['goodput_rps']:.3g}", f"{most:,.0f}", f"{last.load:.3g}/s",
            f"{numbers['attained']:.1%}", f"{numbers['attained_accepted']:.1%}", f"{numbers['refused']:.1%}",
            f"{numbers['refuse_ms']:.0f}", f"{numbers['wasted']:.1%}",
        )  # fmt: skip
        rows.append((_dot(nth) + text(report.label), cells))
    return grid("", "", columns, rows)


def _chooser(reports: Sequence[Report]) -> str:
    found = loads(reports)
    if len(found) == 1:
        return f'<p class="soft">{found[0]:.4g} requests/s offered.</p>'
    options = "".join(
        f'<option value="{load:g}"{" selected" if load == found[-1] else ""}>{load:.4g} requests/s</option>'
        for load in found
    )
    return f'<p><label for="load">Load offered: </label><select id="load">{options}</select></p>'


def _numbers(nth: int, report: Report) -> Iterable[str]:
    yield f"<h3>{_dot(nth)}{text(report.label)}</h3>"
    goals = "; ".join(f"{name}: {_goals(aim)}" for name, aim in report.objectives.items())
    yield f'<p class="soft">Objectives: {text(goals)}</p>'
    rows = [(f"{point.load:.4g}/s", point.numbers["all"]) for point in report.points]
    yield _table("All requests, by load", "load", _COLUMNS, rows)
    yield _table("Prefill, decode, waste, by load", "load", _HALVES, rows)
    last = report.points[-1]
    for group, word in GROUPS.items():
        if group in last.numbers:
            parts = [(name or "–", numbers) for name, numbers in last.numbers[group].items()]
            yield _table(f"By {word}, at {last.load:.4g}/s", word, _COLUMNS, parts)
    yield _reasons(report)
    healths = [
        (f"{point.load:.4g}/s, seed {run.seed}", msgspec.to_builtins(run.generator))
        for point in report.points
        for run in point.runs
        if run.generator is not None
    ]
    how = html.escape(msgspec.json.format(msgspec.json.encode(report.asked), indent=1).decode())
    yield "<details><summary>The load generator, and how it was asked</summary>"
    yield (
        _table("The load generator itself", "run", _GENERATOR, healths) if healths else ""
    ) + f"<pre>{how}</pre></details>"


def _reasons(report: Report) -> str:
    rows = [
        (f"{reason}, at {point.load:.4g}/s", part)
        for point in report.points
        for reason, part in point.numbers.get("reasons", {}).items()
    ]
    return _table("Refused or failed, by reason", "reason", _TOLD, rows)


def _goals(aim: Any) -> str:
    parts = {"first token": aim.ttft_ms, "per token": aim.tpot_ms, "in all": aim.total_ms}
    return ", ".join(f"{name} {value} ms" for name, value in parts.items() if value) or "none"


def figure(name: str, title: str, caption: str) -> str:
    return (
        f'<figure><h3>{text(title)}</h3><div class="plot" data-figure="{name}" role="img" '
        f'aria-label="{text(title)}: a chart; its numbers are in the tables below"></div>'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


def _table(caption: str, first: str, columns: Sequence[tuple[str, str, str]], rows: Sequence[Row]) -> str:
    shown = [column for column in columns if any(column[1] in numbers for _, numbers in rows)]
    lines = [(text(name), tuple(_cell(numbers, key, form) for _, key, form in shown)) for name, numbers in rows]
    return grid(caption, first, [head for head, _, _ in shown], lines)


def _cell(numbers: Mapping[str, Any], key: str, form: str) -> str:
    if key not in numbers:
        return "–"
    half = numbers.get(f"{key}_ci95", 0.0)
    return form.format(numbers[key]) + (f' <span class="ci">±{form.format(half)}</span>' if half else "")


def grid(caption: str, first: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A table of cells that are HTML already; nothing for no rows."""
    if not rows:
        return ""
    head = f'<th scope="col">{text(first)}</th>' + "".join(f'<th scope="col">{text(name)}</th>' for name in columns)
    lines = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for name, cells in rows
    )
    said = f"<caption>{text(caption)}</caption>" if caption else ""
    table = f"<table>{said}<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _dot(nth: int) -> str:
    return f'<span class="dot r{nth % 6}" aria-hidden="true"></span>'


def text(value: str) -> str:
    return html.escape(value)


def _file(name: str, folder: Path = PAGE) -> str:
    return (folder / name).read_text(encoding="utf-8")
