"""What a plan says an engine carries, against the engine simulated; and its arithmetic by hand."""

import pytest
from msgspec.structs import replace

from backends.simengine import Shape, StepTime
from bench import traces
from bench.capacity import Model, normal, search, stand_ins
from bench.costs import Engine, Traffic, costs, drawn, replayed
from bench.plan import Wanted, plan, text
from bench.sim_lab import FIT_SEEDS, Case, Lab, Scenario
from bench.sim_store import Store
from bench.sim_workload import LONGEST_PROMPT, Tenant
from bench.traces import LENGTHS_ONLY, Row, Trace
from bench.workload import profile
from policies.steptime import START, Coefficients
from policies.types import Objective

A100 = Engine(name="a100", times=START, chunk_tokens=512, max_running=256, kv_tokens=200_000)
AIM = Objective(3000, 100)
ONE = Traffic(rows=(Row(LENGTHS_ONLY, 500, 101),))
"""Requests that are all alike: 500 tokens of prompt, 100 steps of decoding."""


def azure(name: str = "azure-chat") -> Trace:
    """The part that simulations are tuned on, of the requests that they ask."""
    trace = traces.read(name).part("fit")
    rows = [row._replace(output_tokens=min(1024, row.output_tokens)) for row in trace.rows]
    return replace(trace, rows=tuple(row for row in rows if row.input_tokens <= LONGEST_PROMPT))


def simulated(trace: str, cv: float, objective: Objective, rate: float) -> float:
    """The part of requests that an engine alone attains at a rate."""
    tenant = Tenant(name="t", trace=trace, share=1.0, cv=cv, objective=objective)
    shape = Shape(chunk_tokens=512, max_running=256, kv_tokens=200_000)
    scenario = Scenario(name="s", tenants=(tenant,), shape=shape, step_time=StepTime())
    with Store() as store:
        lab = Lab(store, 2_000, 1)
        cases = [Case(scenario=scenario, rate=rate, requests=2_000, seed=seed, part="fit") for seed in FIT_SEEDS]
        return float(sum(lab.measured(case)["all"]["attained"] for case in cases)) / len(cases)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("cv", [1.0, 0.0])
def test_the_capacity_is_within_a_tenth_of_the_simulated_engines(cv: float) -> None:
    """Poisson arrivals, and the trace's own clock."""
    traffic = drawn(azure(), cv) if cv else replayed(azure())
    rate = Model(A100, traffic, AIM).capacity().rate
    assert simulated("conv", cv, AIM, 0.9 * rate) >= 0.95
    assert simulated("conv", cv, AIM, 1.1 * rate) < 0.95


def test_costs_of_requests_that_are_all_alike() -> None:
    times = Coefficients(a0_s=10e-3, a1_s=50e-6, a2_s=100e-6, a3_s=0.0, a4_s=0.0)
    found = costs(replace(A100, times=times), ONE.rows)
    assert found.own_s == pytest.approx(500 * 50e-6 + 100 * 100e-6)
    assert found.whole_s == pytest.approx(found.own_s + 10e-3 * 600 / 512)
    assert found.variation == 0
    assert found.held == pytest.approx(601)
    model = Model(replace(A100, times=times), ONE, AIM)
    assert model.step_s(10.0) == pytest.approx(10e-3 / (1 - 10 * found.own_s))
    assert model.running(10.0) == pytest.approx(10 * 100 * model.step_s(10.0))


def test_what_breaks_first() -> None:
    chat = drawn(azure(), 1.0)
    assert Model(A100, chat, AIM).capacity().limits[0].what == "ttft"
    assert Model(A100, chat, Objective(0, 40)).capacity().limits[0].what == "tpot"
    assert Model(A100, chat, Objective(0, 0, 5_000)).capacity().limits[0].what == "e2el"
    assert Model(replace(A100, max_running=8), chat, Objective()).capacity().limits[0].what == "places"
    assert Model(replace(A100, kv_tokens=20_000), chat, Objective()).capacity().limits[0].what == "kv"
    assert Model(A100, chat, Objective()).capacity().limits[0].what == "full"


def test_more_of_anything_never_carries_less() -> None:
    chat = drawn(azure(), 1.0)
    base = Model(A100, chat, AIM).capacity().rate
    for better in (replace(A100, max_running=512), replace(A100, kv_tokens=400_000)):
        assert Model(better, chat, AIM).capacity().rate >= base
    assert Model(A100, chat, Objective(6000, 100)).capacity().rate > base
    assert Model(A100, chat, AIM, level=0.9).capacity().rate > base
    assert Model(A100, replace(chat, cv=3.0), AIM).capacity().rate < base
    assert Model(A100, replayed(azure()), AIM).capacity().rate < base


def test_an_objective_that_nobody_makes_carries_nothing() -> None:
    found = Model(A100, drawn(azure(), 1.0), Objective(5, 0)).capacity()
    assert found.rate == 0
    planned = plan(profile(azure()), drawn(azure(), 1.0), [A100], Wanted(objective=Objective(5, 0), load=3.0))
    assert planned.needs[0].replicas == 0
    assert "not even single requests" in text(planned)


def test_replicas_for_a_load() -> None:
    engines = [A100, replace(A100, name="half", times=Coefficients(
        a0_s=30e-3, a1_s=162e-6, a2_s=190e-6, a3_s=0.22e-6, a4_s=1.52e-6))]  # fmt: skip
    found = plan(profile(azure()), drawn(azure(), 1.0), engines, Wanted(objective=AIM, load=10.0, headroom=0.2))
    fast, slow = (capacity.rate for capacity in found.capacities)
    assert slow < fast / 2
    assert found.pool == pytest.approx(fast + slow)
    for need, rate in zip(found.needs, (fast, slow), strict=True):
        assert (need.replicas - 1) * rate * 0.8 < 10.0 <= need.replicas * rate * 0.8
        assert need.busy == pytest.approx(10 / need.replicas / rate, rel=1e-4)
    assert "half: a step with a full chunk takes longer than the pace allows; chunk_tokens of 370" in text(found)


def test_small_parts() -> None:
    assert search(lambda rate: rate <= 3.0, 10.0) == pytest.approx(3.0, abs=0.02)
    assert search(lambda rate: True, 10.0) == 10.0
    assert search(lambda rate: False, 10.0) == 0.0
    assert stand_ins([5])[0] == stand_ins([5])[-1] == 5
    assert normal(0) == 0.5
    assert normal(1.645) == pytest.approx(0.95, abs=0.001)
