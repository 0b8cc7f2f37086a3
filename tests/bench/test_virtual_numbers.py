"""What the virtual-time driver asks and how it counts: arrivals, metrics, the sweep of caps, the service meter."""

import itertools
import math

import pytest

from backends.simengine import Engine, Shape, StepTime
from bench import sim_metrics
from bench.sim_baselines import PassThrough, spread
from bench.sim_lab import overload
from bench.sim_site import Call, Request, Site
from bench.sim_studies import ServiceMeter, backlogged_tenants
from bench.sim_workload import Arrival, Tenant, arrivals, rows
from policies.types import Objective

AIM = Objective(1000, 100)
CHAT = Tenant(name="chat", trace="conv", share=1.0, objective=AIM)


def come(at_ms: float, prompt: int, output: int, tenant: Tenant = CHAT) -> Arrival:
    return Arrival(at_ms, tenant, prompt, output, math.inf)


def site_of(*asked: Arrival) -> Site:
    return Site([Engine(Shape(chunk_tokens=512, max_running=64, kv_tokens=20_000), StepTime())], list(asked))


def test_arrivals_keep_rate_shares_and_order_at_every_load() -> None:
    tenants = overload().tenants
    slow, fast = (arrivals(tenants, rate, 4000, seed=3) for rate in (2.0, 8.0))
    assert [(one.tenant.name, one.prompt_tokens) for one in slow] == [
        (one.tenant.name, one.prompt_tokens) for one in fast
    ]
    assert fast[-1].at_ms == pytest.approx(slow[-1].at_ms / 4)
    assert len(fast) == pytest.approx(4000, rel=0.06)
    assert sum(one.tenant.name == "code" for one in fast) / len(fast) == pytest.approx(0.35, abs=0.03)
    assert [one.at_ms for one in fast] == sorted(one.at_ms for one in fast)
    assert arrivals(tenants, 8.0, 4000, seed=3) == fast
    assert arrivals(tenants, 8.0, 4000, seed=4) != fast
    assert arrivals(tenants, 8.0, 4000, seed=3, part="fit") != fast


def test_a_replayed_trace_keeps_its_clock_at_the_wanted_rate() -> None:
    tenant = Tenant(name="code", trace="code", share=1.0, cv=0, objective=AIM)
    found = arrivals([tenant], 5.0, 8000, seed=1)
    assert len(found) == pytest.approx(8000, rel=0.25)
    gaps = [after.at_ms - before.at_ms for before, after in itertools.pairwise(found)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation / mean > 4, "the bursts of the trace are gone"
    with pytest.raises(ValueError, match="lengths only"):
        arrivals([Tenant(name="t", trace="sharegpt", share=1.0, cv=0, objective=AIM)], 1.0, 10, seed=1)


def test_a_fit_sees_nothing_of_what_is_reported() -> None:
    fit, report = rows("conv", "fit", 1024), rows("conv", "report", 1024)
    assert max(row.arrival_ms for row in fit) <= min(row.arrival_ms for row in report)
    assert len(fit) / (len(fit) + len(report)) == pytest.approx(0.6, abs=0.01)
    assert all(1 <= row.output_tokens <= 1024 for row in report)


def test_a_tenant_that_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match="trace"):
        Tenant(name="t", trace="none", share=1.0, objective=AIM)
    with pytest.raises(ValueError, match="tenant t: share"):
        Tenant(name="t", trace="conv", share=0.0, objective=AIM)
    with pytest.raises(ValueError, match="same name"):
        arrivals([CHAT, CHAT], 1.0, 10, seed=1)


def test_a_sweep_of_caps_ends_past_its_best() -> None:
    tried = []

    def judge(cap: int) -> float:
        tried.append(cap)
        return -abs(cap - 16)

    best, marks = spread((4, 8, 16, 32, 64, 128), judge)
    assert best == 16
    assert tried == [4, 8, 16, 32, 64]
    assert marks[8] == -8


def test_summaries_are_means_with_students_interval() -> None:
    merged = sim_metrics.summary([{"a": {"x": value}} for value in (1.0, 2.0, 3.0)])
    assert merged == {"a": {"x": 2.0, "x_ci95": pytest.approx(4.303 / math.sqrt(3), rel=1e-4)}}
    assert sim_metrics.summary([{"x": 1.0}]) == {"x": 1.0}
    assert sim_metrics.quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert sim_metrics.quantile([], 0.5) == 0.0


def test_numbers_of_a_run_add_up() -> None:
    late = Tenant(name="late", trace="conv", share=1.0, objective=Objective(1, 100))
    site = site_of(come(0.0, 400, 10), come(2_000.0, 600, 20, late))
    site.run(PassThrough(site))
    found = sim_metrics.measure(site, 10.0)
    assert found["all"]["goodput_rps"] == 0.1
    assert found["all"]["goodput_tps"] == (400 + 2 * 10) / 10
    assert found["all"]["wasted"] == pytest.approx(640 / (640 + 420))
    assert found["tenants"]["late"]["attained"] == 0
    assert found["tenants"]["chat"]["attained"] == 1
    assert sum(part["requests"] for part in found["quartiles"].values()) == 2


def test_the_service_meter_compares_only_while_both_are_backlogged() -> None:
    tenants = backlogged_tenants(2)
    one, two = (Tenant(name=tenant.name, trace="conv", share=1, objective=AIM, weight=2) for tenant in tenants)
    site, meter = site_of(), ServiceMeter((one, two))

    def serve(tenant: Tenant, tokens: int, *backlogged: Tenant) -> None:
        site.queued = {each.name: 1 for each in backlogged}
        site.now_ms += 1000
        meter.step(site, [(Request(Call(0, come(0, 9000, 10, tenant)), 5), tokens)])

    serve(one, 4000, one)
    assert meter.worst == 0
    serve(one, 100, one, two)
    serve(one, 300, one, two)
    assert meter.worst == 150
    serve(two, 1000, two)
    serve(two, 600, one, two)
    serve(one, 100, one, two)
    assert meter.worst == 150
    assert meter.bound(one.name) == 2 * 2 * 9000 / 2
