"""Clients that are refused and come again once, when they were told to: how many get in then.

Load comes in spells: in the first it is past the capacity, in the second below. While a spell lasts there is no time at
which all could come; what counts is whether those who were refused come one after the other once there is room.
"""

from typing import Any

from msgspec import Struct

from backends.simengine import Engine
from bench import sim_metrics
from bench.sim_lab import Lab, Scenario, overload
from bench.sim_signalbox import Signalbox
from bench.sim_site import Outcome, Site
from bench.sim_workload import Arrival, Tenant, arrivals
from policies.types import Objective

PROCESSES = 3


class Spell(Struct, frozen=True):
    """`load` in multiples of the capacity, for so many seconds."""

    load: float
    seconds: float


SPELLS = {
    "3x for 30 s, then 0.5x": (Spell(3.0, 30.0), Spell(0.5, 150.0)),
    "2x for 60 s, then 0.5x": (Spell(2.0, 60.0), Spell(0.5, 150.0)),
    "5x for 10 s, then 0.7x": (Spell(5.0, 10.0), Spell(0.7, 150.0)),
    "2x all the time": (Spell(2.0, 200.0),),
}


def chat() -> Scenario:
    """One tenant with chat lengths."""
    aim = Objective(3000, 150)
    return Scenario(name="chat", tenants=(Tenant(name="chat", trace="conv", share=1.0, cv=1.2, objective=aim),))


def returns(lab: Lab) -> dict[str, Any]:
    """By scenario and spells: the part that was refused at first, how many of those got in when they came again, and
    when they were told to come."""
    found: dict[str, Any] = {}
    for scenario in (overload(), chat()):
        rate = lab.capacity(scenario)
        for name, spells in SPELLS.items():
            runs = [_run(lab, scenario, rate, spells, seed) for seed in lab.seeds]
            found[f"{scenario.name} {name}"] = sim_metrics.summary(runs)
    return found


def _run(lab: Lab, scenario: Scenario, rate: float, spells: tuple[Spell, ...], seed: int) -> dict[str, float]:
    engines = [Engine(scenario.shape, scenario.step_time) for _ in range(scenario.engines)]
    site = Site(engines, _arrivals(scenario, rate, spells, seed), retries=1)
    site.run(Signalbox(site, lab.store, PROCESSES))
    again = [call for call in site.calls if call.attempts]
    waits_s = [(call.arrival_ms - call.refused_ms) / 1000 for call in again]
    return {
        "refused_first": sum(call.refused_ms >= 0 for call in site.calls) / len(site.calls),
        "got_in": sum(call.outcome is Outcome.DONE for call in again) / max(1, len(again)),
        "told_p50_s": sim_metrics.quantile(waits_s, 0.5),
        "told_p90_s": sim_metrics.quantile(waits_s, 0.9),
        "good": sum(call.good for call in site.calls) / len(site.calls),
    }


def _arrivals(scenario: Scenario, rate: float, spells: tuple[Spell, ...], seed: int) -> list[Arrival]:
    found: list[Arrival] = []
    begin_ms = 0.0
    for number, spell in enumerate(spells):
        count = max(1, int(spell.load * rate * spell.seconds))
        part = arrivals(scenario.tenants, spell.load * rate, count, 100 * seed + number)
        found += [one._replace(at_ms=begin_ms + one.at_ms) for one in part]
        begin_ms += spell.seconds * 1000
    return found
