"""Studies that a sweep over loads does not show: neighbours, fairness, KV pressure, wrong models, quotas, leavers."""

import functools
import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from backends.simengine import Shape, StepTime
from bench import sim_metrics
from bench.sim_lab import STRATEGIES, Case, Lab, Scenario, overload
from bench.sim_metrics import OUTPUT_WEIGHT, rounded
from bench.sim_signalbox import Beliefs
from bench.sim_site import Outcome, Request, Site
from bench.sim_workload import Tenant, arrivals, rows
from policies.types import Objective

Study = Callable[[Lab], dict[str, Any]]

WINDOW_MS = 60_000.0
RECOVERED = 0.9  # of the right model's goodput
RECOVERY_MS = 30_000.0
BUSY_RATE = 10.0  # requests/s that keep every tenant of the fairness study backlogged


def noisy(lab: Lab) -> dict[str, Any]:
    """One tenant at 2.4 times capacity, two at 0.3: what the two attain, and what they would attain without it."""
    aim = Objective(3000, 100)
    good = tuple(Tenant(name=name, trace="conv", share=0.3, cv=1.2, objective=aim) for name in ("one", "two"))
    noise = Tenant(name="noise", trace="conv", share=2.4, cv=1.2, objective=aim)
    beside = Scenario(name="noisy", tenants=(*good, noise))
    alone = Scenario(name="alone", tenants=good, rate=lab.capacity(beside))
    found = {}
    for strategy in STRATEGIES:
        quiet = replace(lab.case(alone, 0.6, strategy), requests=lab.requests // 5)
        alone_numbers = lab.over_seeds(quiet)
        numbers = lab.over_seeds(lab.case(beside, 3.0, strategy))
        for name in ("one", "two"):
            mine = numbers["tenants"][name]
            base = alone_numbers["tenants"][name]["attained"]
            mine["of_alone"] = rounded(mine["attained"] / base if base else 0.0)
        found[strategy] = numbers
    return found


class ServiceMeter:
    """Weighted service of each tenant, and how far any two apart while both have something queued.

    `worst` is the largest difference of normalised service in any window in which both were backlogged throughout;
    `most_held` the most tokens a tenant had in flight; `shares` the parts of service in windows of 60 s with all of
    them backlogged.
    """

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self.weights = {tenant.name: tenant.weight for tenant in tenants}
        self.service = dict.fromkeys(self.weights, 0)
        self.worst = 0.0
        self.most_held = dict.fromkeys(self.weights, 0)
        self.longest = dict.fromkeys(self.weights, 0)
        self.shares: list[dict[str, float]] = []
        self._spans: dict[tuple[str, str], tuple[float, float]] = {}
        self._window: tuple[float, dict[str, int]] | None = None

    def step(self, site: Site, work: Iterable[tuple[Request, int]]) -> None:
        held = dict.fromkeys(self.weights, 0)
        for request, tokens in work:
            name = request.call.tenant.name
            self.service[name] += OUTPUT_WEIGHT if request.decoding else tokens
            held[name] += request.known
            self.longest[name] = max(self.longest[name], request.prompt_tokens)
        for name, tokens in held.items():
            self.most_held[name] = max(self.most_held[name], tokens)
        backlogged = {name for name in self.weights if site.queued.get(name)}
        self._compare(backlogged)
        self._share(site.now_ms, len(backlogged) == len(self.weights))

    def bound(self, name: str) -> float:
        """Twice VTC's U of a tenant, by what was really in flight, in units of normalised service."""
        most = max(self.longest[name], OUTPUT_WEIGHT * self.most_held[name])
        return 2 * most / self.weights[name]

    def _compare(self, backlogged: set[str]) -> None:
        for pair in itertools.combinations(self.weights, 2):
            if not backlogged.issuperset(pair):
                self._spans.pop(pair, None)
                continue
            one, two = pair
            apart = self.service[one] / self.weights[one] - self.service[two] / self.weights[two]
            low, high = self._spans.get(pair, (apart, apart))
            self._spans[pair] = low, high = min(low, apart), max(high, apart)
            self.worst = max(self.worst, high - low)

    def _share(self, now_ms: float, everyone: bool) -> None:
        if not everyone:
            self._window = None
        elif self._window is None:
            self._window = now_ms, dict(self.service)
        elif now_ms - self._window[0] >= WINDOW_MS:
            got = {name: self.service[name] - self._window[1][name] for name in self.weights}
            self.shares.append({name: part / max(1, sum(got.values())) for name, part in got.items()})
            self._window = now_ms, dict(self.service)


def fairness(lab: Lab) -> dict[str, Any]:
    """Two to eight tenants in two processes, always backlogged, weights 1:2:4, unequal lengths: service against VTC's
    bound, and parts of it against weights, in windows of 60 s and over the run."""
    return {
        f"{count} tenants, {strategy}": sim_metrics.summary(
            [_fair_run(lab, count, strategy, seed) for seed in lab.seeds]
        )
        for count in (2, 3, 4, 8)
        for strategy in ("gate", "signalbox")
    }


def _fair_run(lab: Lab, count: int, strategy: str, seed: int) -> dict[str, float]:
    tenants = backlogged_tenants(count)
    scenario = Scenario(name=f"fair{count}", tenants=tenants, rate=BUSY_RATE, processes=2)
    case = Case(scenario=scenario, rate=BUSY_RATE, requests=2 * lab.requests, seed=seed, strategy=strategy, cut=True)
    meter = ServiceMeter(tenants)
    lab.run(case, lambda site: setattr(site, "meter", meter))
    whole = sum(meter.weights.values())
    parts = {name: [shares[name] * whole / weight for shares in meter.shares] for name, weight in meter.weights.items()}
    off = [abs(part - 1) for windows in parts.values() for part in windows]
    bound = max(meter.bound(name) for name in meter.weights)
    return {
        "difference": meter.worst,
        "bound": bound,
        "of_bound": meter.worst / bound if bound else 0.0,
        "windows": len(meter.shares),
        "share_off_worst": max(off, default=0.0),
        "share_off_median": sim_metrics.quantile(off, 0.5),
        "share_off_whole": max(abs(sum(windows) / max(1, len(windows)) - 1) for windows in parts.values()),
        "share_off_ideal": _ideal_off(meter, tenants, seed),
        "most_in_flight": max(meter.most_held.values()),
    }


def _ideal_off(meter: ServiceMeter, tenants: tuple[Tenant, ...], seed: int) -> float:
    """The worst of as many windows if one server took whole requests of the same lengths one after the other, each
    charged exactly: what no order can avoid, since requests are not small against a minute."""
    windows = len(meter.shares)
    if not windows:
        return 0.0
    rng, whole = random.Random(seed), sum(meter.weights.values())
    counters, served = dict.fromkeys(meter.weights, 0.0), dict.fromkeys(meter.weights, 0.0)
    lengths = {tenant.name: rows(tenant.trace, "report", tenant.max_tokens) for tenant in tenants}
    span = sum(meter.service.values()) / windows
    left, worst = span, 0.0
    while windows:
        name = min(counters, key=lambda one: counters[one])
        row = rng.choice(lengths[name])
        size = float(row.prompt_tokens + OUTPUT_WEIGHT * row.output_tokens)
        counters[name] += size / meter.weights[name]
        while size >= left and windows:
            served[name] += left
            worst = max(worst, *(abs(served[n] / span * whole / meter.weights[n] - 1) for n in served))
            size, left, windows, served = size - left, span, windows - 1, dict.fromkeys(served, 0.0)
        served[name] += size
        left -= size
    return worst


def backlogged_tenants(count: int) -> tuple[Tenant, ...]:
    """Tenants with weights 1, 2, 4, … and other lengths each, that all ask for equally many tokens, too many."""
    tenants = []
    for number in range(count):
        trace, weight = ("conv", "code", "sharegpt")[number % 3], (1, 2, 4)[number % 3]
        some = rows(trace, "report", 1024)
        mean = sum(row.prompt_tokens + OUTPUT_WEIGHT * row.output_tokens for row in some) / len(some)
        tenants.append(Tenant(name=f"t{number}", trace=trace, share=1000 / mean, weight=weight, objective=Objective()))
    return tuple(tenants)


def kv(lab: Lab) -> dict[str, Any]:
    """Long outputs on a small KV cache: preemptions and goodput, against reservation by `max_tokens`."""
    tenant = Tenant(name="translate", trace="bwb", share=1.0, max_tokens=4096, objective=Objective(20_000, 100))
    scenario = Scenario(name="kv", tenants=(tenant,), shape=Shape(chunk_tokens=512, max_running=256, kv_tokens=60_000))
    lab_kv = Lab(lab.store, max(20, lab.requests // 5), len(lab.seeds))
    lab_kv.log, lab_kv.rates = lab.log, lab.rates
    found = lab_kv.sweep(scenario, [1.5], ["pass", "cap", "gate", "tokens", "signalbox"])
    for strategy in ("tokens", "signalbox"):
        reserving = replace(lab_kv.case(scenario, 1.5, strategy), beliefs=Beliefs(reserve=True))
        found[f"1.5x {strategy}, max_tokens reserved"] = lab_kv.over_seeds(reserving)
    return found


def model(lab: Lab) -> dict[str, Any]:
    """At 2x: speeds wrong by a factor of 2 either way, until learned or for good, prompts by 15 %, engines that change
    speed."""
    return {
        f"{strategy}, {name}": numbers
        for strategy in ("tokens", "signalbox")
        for name, numbers in _model_runs(lab, lab.case(overload(), 2.0, strategy)).items()
    }


def _model_runs(lab: Lab, case: Case) -> dict[str, Any]:
    half_ms = case.span_s * 500
    found: dict[str, Any] = {}
    named = (
        ("rate 0.5", Beliefs(start_rate=0.5)),
        ("rate 2", Beliefs(start_rate=2.0)),
        ("rate 0.5 for good", Beliefs(rate=0.5)),
        ("rate 2 for good", Beliefs(rate=2.0)),
        ("prompt 0.85", Beliefs(prompt=0.85)),
        ("prompt 1.15", Beliefs(prompt=1.15)),
    )
    for name, beliefs in named:
        if case.strategy == "tokens" and beliefs.rate != 1.0:
            continue  # it reads its models, not what the queue is told
        wrong = replace(case, beliefs=beliefs)
        found[f"believed {name}"] = _recovery(lab, wrong, case, lambda site: None, 0.0)
    for name, factor in (("slower", 2.0), ("faster", 0.5)):
        step_time = _times(case.scenario.step_time, factor)
        there = replace(case, scenario=replace(case.scenario, step_time=step_time))

        change = functools.partial(_change_speed, half_ms, step_time)
        found[f"half-way {name}"] = _recovery(lab, case, there, change, half_ms)
    return found


def _change_speed(at_ms: float, to: StepTime, site: Site) -> None:
    def change() -> None:
        for engine in site.engines:
            engine.step_time = to

    site.change(at_ms, change)


def _recovery(lab: Lab, wrong: Case, right: Case, prepare: Callable[[Site], None], from_ms: float) -> dict[str, Any]:
    """Goodput of `wrong` over that of `right`, in all and in each 30 s from `from_ms` on."""
    windows: dict[int, list[int]] = {}
    whole = [0, 0]
    for seed in lab.seeds:
        sites = lab.run(replace(wrong, seed=seed), prepare), lab.run(replace(right, seed=seed))
        for side, site in enumerate(sites):
            for call in site.calls:
                if call.good and call.came_ms >= from_ms:
                    whole[side] += 1
                    windows.setdefault(int((call.came_ms - from_ms) // RECOVERY_MS), [0, 0])[side] += 1
    pairs = [windows.get(i, [0, 0]) for i in range(max(windows, default=-1) + 1)]
    parts = [rounded(mine / max(1, theirs)) for mine, theirs in pairs]
    recovered = next((i for i, part in enumerate(parts) if part >= RECOVERED), len(parts))
    return {
        "of_right": rounded(whole[0] / max(1, whole[1])),
        "recovered_s": recovered * RECOVERY_MS / 1000,
        "windows": parts[:8],
    }


def _times(of: StepTime, factor: float) -> StepTime:
    return StepTime(**{name: getattr(of, name) * factor for name in of.__struct_fields__})


def quotas(lab: Lab) -> dict[str, Any]:
    """Three processes, 6,000 tokens a minute per tenant, clients that come again once, when they were told to."""
    tenants = tuple(
        Tenant(name=f"t{i}", trace="conv", share=1.0, objective=Objective(), tokens_per_minute=6000) for i in range(4)
    )
    scenario = Scenario(name="quotas", tenants=tenants, processes=3, retries=1, rate=2.0)
    found = {}
    for seed in lab.seeds:
        case = replace(lab.case(scenario, 1.0, "signalbox"), seed=seed, requests=min(lab.requests, 1200))
        site = lab.run(case)
        most = max(_most_in_a_minute(site, tenant.name) for tenant in tenants)
        numbers = sim_metrics.measure(site, case.span_s)["all"]
        found[f"seed {seed}"] = {"most_of_quota": rounded(most / tenants[0].tokens_per_minute)} | {
            name: rounded(numbers[name])
            for name in ("attained", "refused", "refuse_ms", "retried", "retried_done", "goodput_rps")
        }
    return found


def _most_in_a_minute(site: Site, name: str) -> int:
    """The most tokens of a tenant that were let in within any 60 s, by what they came to."""
    let_in = sorted(
        (call.sent_ms, call.prompt_tokens + call.produced)
        for call in site.calls
        if call.tenant.name == name and call.engine >= 0
    )
    most = now = first = 0
    for at_ms, tokens in let_in:
        now += tokens
        while at_ms - let_in[first][0] >= WINDOW_MS:
            now -= let_in[first][1]
            first += 1
        most = max(most, now)
    return most


def leavers(lab: Lab) -> dict[str, Any]:
    """A fifth of the clients leave at random, at 2x: what their work goes on to cost, and who gets the room."""
    base = overload()
    scenario = replace(base, tenants=tuple(replace(tenant, leave=0.2) for tenant in base.tenants))
    found = {}
    for strategy in ("pass", "gate", "tokens", "signalbox"):
        case = replace(lab.case(base, 2.0, strategy), scenario=scenario)
        runs = [_left_run(lab, replace(case, seed=seed), base) for seed in lab.seeds]
        found[strategy] = sim_metrics.summary(runs)
    return found


def _left_run(lab: Lab, case: Case, base: Scenario) -> dict[str, Any]:
    left, stayed = lab.run(case), lab.run(replace(case, scenario=base))
    asked = arrivals(case.scenario.tenants, case.rate, case.requests, case.seed, case.part)
    gone = {number for number, one in enumerate(asked) if left.calls[number].outcome is Outcome.LEFT}
    freed = _spent(stayed, gone) - _spent(left, gone)
    gained = _spent(left, set(range(len(asked))) - gone) - _spent(stayed, set(range(len(asked))) - gone)
    numbers = sim_metrics.measure(left, case.span_s)
    numbers["all"]["regained"] = gained / freed if freed else 0.0
    return numbers


def _spent(site: Site, numbers: set[int]) -> int:
    return sim_metrics.spent(site.calls[number] for number in sorted(numbers))


STUDIES: dict[str, Study] = {
    "noisy": noisy,
    "fairness": fairness,
    "kv": kv,
    "model": model,
    "quotas": quotas,
    "leavers": leavers,
}
