"""What the figures of a report's page show, as data for `page/report.js`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.report import PERCENTILES, Point, Report, Run

Figure = dict[str, Any]
"""`curves` with their axes; or `byLoad`, one such figure for each load that may be chosen."""

_OVER_LOAD: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    ("goodput_rps", "Good answers", "answers/s", (("goodput_rps", ""),)),
    ("goodput_tps", "Good tokens", "weighted tokens/s", (("goodput_tps", ""),)),
    ("attained", "Attained", "part of requests", (("attained", "all"), ("attained_accepted", "accepted"))),
    ("ttft", "Time to first token", "ms", (("ttft_p50_ms", "p50"), ("ttft_p99_ms", "p99"))),
    ("tpot", "Time per output token", "ms", (("tpot_p50_ms", "p50"), ("tpot_p99_ms", "p99"))),
    ("refused", "Refused and wasted", "part", (("refused", "refused"), ("wasted", "tokens wasted"))),
)
PERCENT = frozenset({"attained", "refused"})
CAPTIONS = {
    "goodput_rps": "In full and within all objectives, by the load that was offered.",
    "goodput_tps": "One token of output counts as two of the prompt.",
    "attained": "Good ones of all requests, and of those that were not refused.",
    "ttft": "From sending a request to its first token.",
    "tpot": "Mean time per token after the first.",
    "refused": "Requests told no, and tokens worked for in answers that were late or broken.",
}


def figures(reports: Sequence[Report]) -> dict[str, Figure]:
    """All figures by name."""
    found: dict[str, Figure] = {}
    if any(len(report.points) > 1 for report in reports):
        for name, _, unit, numbers in _OVER_LOAD:
            curves = [
                _over_load(report, color, number, word, len(reports) > 1)
                for color, report in enumerate(reports)
                for number, word in numbers
            ]
            found[name] = {"x": "requests/s offered", "y": unit, "curves": curves, "percent": name in PERCENT}
    found["ttft_cdf"] = {"byLoad": _by_load(reports, lambda load: _cdf(reports, load, "ttft", "ttft_ms"))}
    found["tpot_cdf"] = {"byLoad": _by_load(reports, lambda load: _cdf(reports, load, "tpot", "tpot_ms"))}
    found["series"] = {"byLoad": _by_load(reports, lambda load: _series(reports, load))}
    return found


def over_load() -> Iterable[tuple[str, str, str]]:
    """Name, title and caption of each figure over the loads."""
    return ((name, title, CAPTIONS[name]) for name, title, _, _ in _OVER_LOAD)


def loads(reports: Sequence[Report]) -> list[float]:
    """Every load that any report has, in order."""
    return sorted({point.load for report in reports for point in report.points})


def _over_load(report: Report, color: int, number: str, word: str, several: bool) -> dict[str, Any]:
    parts = [part for part in (report.label if several else "", word) if part]
    return {
        "label": ", ".join(parts) or report.label,
        "color": color,
        "dash": word in ("accepted", "p99", "tokens wasted"),
        "x": [point.load for point in report.points],
        "y": [point.numbers["all"].get(number, 0.0) for point in report.points],
        "ci": [point.numbers["all"].get(f"{number}_ci95", 0.0) for point in report.points],
    }


def _by_load(reports: Sequence[Report], make: Callable[[float], Figure]) -> dict[str, Figure]:
    return {f"{load:g}": make(load) for load in loads(reports)}


def _at(report: Report, load: float) -> Point | None:
    return next((point for point in report.points if point.load == load), None)


def _runs(reports: Sequence[Report], load: float) -> Iterable[tuple[int, Report, Run]]:
    """Every run at a load; of several seeds each."""
    for color, report in enumerate(reports):
        point = _at(report, load)
        for run in point.runs if point is not None else ():
            yield color, report, run


def _cdf(reports: Sequence[Report], load: float, name: str, goal: str) -> Figure:
    curves = [
        _quantile_curve(f"{report.label}, seed {run.seed}", color, run.quantiles[name])
        for color, report, run in _runs(reports, load)
        if run.quantiles.get(name)
    ]
    aims = sorted({getattr(aim, goal) for report in reports for aim in report.objectives.values()} - {0})
    lines = [{"at": aim, "label": f"{aim} ms"} for aim in aims]
    return {"x": "ms", "y": "part of answers", "curves": curves, "percent": True, "logX": True, "lines": lines}


def _quantile_curve(label: str, color: int, values: Sequence[float]) -> dict[str, Any]:
    """Each time once, with the largest part that is no later."""
    parts = {max(value, 0.1): percent / 100 for value, percent in zip(values, PERCENTILES, strict=True)}
    return {"label": label, "color": color, "x": list(parts), "y": list(parts.values())}


def _series(reports: Sequence[Report], load: float) -> Figure:
    """The first seed of each report over its own time."""
    curves = []
    for color, report, run in _runs(reports, load):
        if run.series is None or run.seed != min(one.seed for one in report.points[0].runs):
            continue
        x = [(at + 0.5) * run.series.bin_s for at in range(len(run.series.came))]
        if color == 0:
            curves.append({"label": "came", "color": 5, "x": x, "y": run.series.came})
        curves.append({"label": f"{report.label}, good", "color": color, "x": x, "y": run.series.good})
        if any(run.series.refused):
            refused = {"label": f"{report.label}, refused", "color": color, "dash": True}
            curves.append({**refused, "x": x, "y": run.series.refused})
    return {"x": "seconds", "y": "requests/s", "curves": curves}
