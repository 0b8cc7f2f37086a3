"""What the last defences are worth: forecasts that stay wrong, with and without them; and right ones."""

from typing import Any

from msgspec.structs import replace

from bench import sim_metrics
from bench.sim_lab import Case, Lab, bursts, overload
from bench.sim_signalbox import Beliefs
from bench.sim_site import Site
from policies.reasons import Reason

RIGHT = (1.0, 2.0, 5.0)  # loads with right forecasts
WRONG = ((2.0, 4.0), (2.0, 8.0), (4.0, 8.0))  # loads, and by what speeds are taken for too high
SHED_AFTER = 0.95


def wrong(lab: Lab) -> dict[str, Any]:
    """By load and error: goodput, what became of accepted ones, waits as parts of the deadline, and what was shed."""
    found: dict[str, Any] = {}
    for scenario in (overload(), bursts()):
        rate = lab.capacity(scenario)
        base = Case(scenario=scenario, rate=rate, requests=lab.requests, seed=1, strategy="signalbox")
        for load in RIGHT:
            case = replace(base, rate=load * rate)
            found[f"{scenario.name} {load:g}x, right"] = _over_seeds(lab, case)
        for load, factor in WRONG:
            for after in (0.0, SHED_AFTER):
                beliefs = Beliefs(rate=factor, shed_after=after)
                label = f"{scenario.name} {load:g}x, {factor:g} times too fast, {'with' if after else 'without'}"
                found[label] = _over_seeds(lab, replace(base, rate=load * rate, beliefs=beliefs))
    return found


def _over_seeds(lab: Lab, case: Case) -> dict[str, Any]:
    runs = []
    for seed in lab.seeds:
        site = lab.run(replace(case, seed=seed))
        runs.append(_numbers(site, case.span_s))
    return sim_metrics.summary(runs)


def _numbers(site: Site, span_s: float) -> dict[str, float]:
    numbers = sim_metrics.measure(site, span_s)["all"]
    waits = [
        (max(call.sent_ms, call.refused_ms) - call.arrival_ms) / call.tenant.objective.ttft_ms
        for call in site.calls
        if call.sent_ms > call.arrival_ms or call.refused_ms > call.arrival_ms
    ]
    kept = ("goodput_rps", "goodput_tps", "attained_accepted", "wasted", "refuse_of_deadline")
    return {name: numbers[name] for name in kept} | {
        "wait_p50": sim_metrics.quantile(waits, 0.5),
        "wait_p99": sim_metrics.quantile(waits, 0.99),
        "shed": sum(call.reason == Reason.OVERLOADED for call in site.calls) / len(site.calls),
    }
