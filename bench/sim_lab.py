"""Runs scenarios: one site, one strategy, one load, several seeds. Finds the load that counts as 1.

Capacity is the rate at which the engine alone, first come first served, still answers 95 % within the objectives. It
and the static cap are found on the first 60 % of the traces; everything reported is from the rest.
"""

import functools
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from backends.simengine import Engine, Shape, StepTime
from bench import sim_metrics
from bench.sim_baselines import PassThrough, Queued, below, earliest_deadline, first_come, spread, unsaturated
from bench.sim_signalbox import Beliefs, Signalbox
from bench.sim_site import Site, Strategy
from bench.sim_store import Store
from bench.sim_tokens import TokenGate
from bench.sim_workload import Part, Tenant, arrivals
from policies.types import Objective

STRATEGIES = ("pass", "cap", "gate", "gate+edf", "tokens", "signalbox")
CAPS = (4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)
ATTAINED = 0.95
FIT_SEEDS = (1, 2)
MOST_RATE = 100_000.0  # requests/s: a search that comes so far has no end
TIGHT = 0.02  # relative width at which the search for capacity ends


class Scenario(Struct, frozen=True, kw_only=True):
    """Who asks for what of which engines. `rate` > 0 (requests/s) is load 1 without a search."""

    name: str
    tenants: tuple[Tenant, ...]
    engines: int = 1
    processes: int = 1
    retries: int = 0
    rate: float = 0.0
    shape: Shape = Shape(chunk_tokens=512, max_running=256, kv_tokens=200_000)
    step_time: StepTime = StepTime()


class Case(Struct, frozen=True, kw_only=True):
    """One run of a scenario. `cap` is for the strategy of that name; `cut` ends the run with the arrivals."""

    scenario: Scenario
    rate: float
    requests: int
    seed: int
    part: Part = "report"
    strategy: str = "pass"
    cap: int = 0
    beliefs: Beliefs = Beliefs()
    cut: bool = False

    @property
    def span_s(self) -> float:
        return self.requests / self.rate


def overload(engines: int = 1, processes: int = 1) -> Scenario:
    """Azure chat and code and ShareGPT, three tenants, on engines like an 8B model on an A100."""
    chat = Tenant(name="chat", trace="conv", share=0.5, cv=1.2, objective=Objective(3000, 100))
    code = Tenant(name="code", trace="code", share=0.35, cv=1.5, objective=Objective(3000, 150))
    long = Tenant(name="long", trace="sharegpt", share=0.15, cv=1.2, objective=Objective(8000, 150))
    return Scenario(name="overload", tenants=(chat, code, long), engines=engines, processes=processes)


def bursts(engines: int = 1, processes: int = 1) -> Scenario:
    """Azure chat and code on their own clocks: in its busiest second code asks for 26 times its mean."""
    chat = Tenant(name="chat", trace="conv", share=0.68, cv=0, objective=Objective(3000, 100))
    code = Tenant(name="code", trace="code", share=0.32, cv=0, objective=Objective(3000, 150))
    return Scenario(name="bursts", tenants=(chat, code), engines=engines, processes=processes)


SWEEPS = {"overload": overload, "bursts": bursts}


class Lab:
    """A store, and how much to run. Close it."""

    def __init__(self, store: Store, requests: int, seeds: int) -> None:
        self.store = store
        self.requests = requests
        self.seeds = tuple(range(1, seeds + 1))
        self.log: Callable[[str], None] = lambda line: None
        self.rates: dict[str, float] = {}

    def site(self, case: Case) -> Site:
        scenario = case.scenario
        engines = [Engine(scenario.shape, scenario.step_time) for _ in range(scenario.engines)]
        asked = arrivals(scenario.tenants, case.rate, case.requests, case.seed, case.part)
        return Site(engines, asked, scenario.retries)

    def run(self, case: Case, prepare: Callable[[Site], None] = lambda site: None) -> Site:
        """One run, `prepare`d before its first event."""
        site = self.site(case)
        prepare(site)
        site.run(self._strategy(site, case), case.span_s * 1000 if case.cut else float("inf"))
        return site

    def measured(self, case: Case) -> dict[str, Any]:
        return sim_metrics.measure(self.run(case), case.span_s)

    def over_seeds(self, case: Case) -> dict[str, Any]:
        """The summary of a case over all seeds."""
        runs = [self.measured(replace(case, seed=seed)) for seed in self.seeds]
        return sim_metrics.summary(runs)

    def capacity(self, scenario: Scenario) -> float:
        """Requests/s that count as load 1. Searched once per scenario."""
        if scenario.rate > 0:
            return scenario.rate
        if scenario.name not in self.rates:
            self.rates[scenario.name] = self._search(scenario)
        return self.rates[scenario.name]

    def tuned_cap(self, scenario: Scenario, rate: float) -> int:
        """The cap with the highest goodput at this rate, on the fitting part."""
        case = Case(scenario=scenario, rate=rate, requests=self.requests, seed=FIT_SEEDS[0], part="fit", strategy="cap")
        best, marks = spread(CAPS, lambda cap: float(self.measured(replace(case, cap=cap))["all"]["goodput_rps"]))
        self.log(
            f"{scenario.name}: best cap {best}; good requests/s by cap: "
            + ", ".join(f"{cap}: {mark:.2f}" for cap, mark in marks.items())
        )
        return best

    def case(self, scenario: Scenario, load: float, strategy: str) -> Case:
        """A case at a multiple of the capacity, its cap tuned if it has one."""
        rate = load * self.capacity(scenario)
        cap = self.tuned_cap(scenario, rate) if strategy == "cap" else 0
        return Case(scenario=scenario, rate=rate, requests=self.requests, seed=1, strategy=strategy, cap=cap)

    def sweep(self, scenario: Scenario, loads: list[float], strategies: list[str]) -> dict[str, Any]:
        """Summaries by load and strategy."""
        found: dict[str, Any] = {}
        for load in loads:
            for strategy in strategies:
                case = self.case(scenario, load, strategy)
                self.log(f"{scenario.name} {load:g}x {strategy}")
                found[f"{load:g}x {strategy}"] = self.over_seeds(case)
        return found

    def _search(self, scenario: Scenario) -> float:
        @functools.cache
        def attained(rate: float) -> float:
            case = Case(scenario=scenario, rate=rate, requests=self.requests, seed=0, part="fit")
            runs = [self.measured(replace(case, seed=seed))["all"]["attained"] for seed in FIT_SEEDS]
            return float(sum(runs) / len(runs))

        low = highest(attained, float(scenario.engines), scenario.name)
        self.log(f"{scenario.name}: capacity {low:.3f} requests/s")
        return low

    def _strategy(self, site: Site, case: Case) -> Strategy:
        if case.strategy == "pass":
            return PassThrough(site)
        if case.strategy == "cap":
            return Queued(site, first_come, below(case.cap))
        if case.strategy == "gate":
            return Queued(site, first_come, unsaturated)
        if case.strategy == "gate+edf":
            return Queued(site, earliest_deadline, unsaturated)
        if case.strategy == "tokens":
            return TokenGate(site, case.beliefs)
        if case.strategy == "signalbox":
            return Signalbox(site, self.store, case.scenario.processes, case.beliefs)
        raise ValueError(f"strategy: one of {', '.join(STRATEGIES)}, not {case.strategy!r}")


def highest(attained: Callable[[float], float], start: float, name: str) -> float:
    """The highest rate at which ATTAINED is attained, by bisection. Raises ValueError, which begins with the name."""
    low, high = 0.0, start
    while attained(high) >= ATTAINED:
        low, high = high, high * 2
        if high > MOST_RATE:
            raise ValueError(f"{name}: even {high:.0f} requests/s attain {ATTAINED:.0%}: is there an objective?")
    while low == 0.0 or high / low > 1 + TIGHT:
        middle = (low + high) / 2
        low, high = (middle, high) if attained(middle) >= ATTAINED else (low, middle)
        if high < 1e-3:
            raise ValueError(f"{name}: not even {high:.4f} requests/s attain {ATTAINED:.0%}")
    return low
