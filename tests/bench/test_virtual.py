"""The virtual-time driver: repeatable, blind to the future, and its numbers checked by hand where they can be."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.simengine import Engine, Shape, StepTime
from bench import sim_metrics, virtual
from bench.sim_baselines import PassThrough, Queued, below, earliest_deadline, first_come, unsaturated
from bench.sim_lab import Case, Lab, Scenario, overload
from bench.sim_signalbox import Beliefs, Estimates, Signalbox, ticket_for
from bench.sim_site import Call, Outcome, Site, Strategy
from bench.sim_store import SimulationFault, Store
from bench.sim_tokens import Ledger, TokenGate
from bench.sim_workload import Arrival, Tenant
from gateway.queue import wire
from policies.types import Objective

AIM = Objective(1000, 100)
CHAT = Tenant(name="chat", trace="conv", share=1.0, objective=AIM)
SHAPE = Shape(chunk_tokens=512, max_running=64, kv_tokens=20_000)
NEVER = math.inf


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with Store() as one:
        yield one


def come(at_ms: float, prompt: int = 500, output: int = 10, tenant: Tenant = CHAT, leave_ms: float = NEVER) -> Arrival:
    return Arrival(at_ms, tenant, prompt, output, leave_ms)


def site_of(*asked: Arrival, engines: int = 1, retries: int = 0) -> Site:
    return Site([Engine(SHAPE, StepTime()) for _ in range(engines)], list(asked), retries)


def burst(count: int, gap_ms: float = 20.0, output: int = 20) -> list[Arrival]:
    return [come(i * gap_ms, 300 + 37 * (i % 11), output + i % 7) for i in range(count)]


def strategies(site: Site, store: Store) -> dict[str, Strategy]:
    return {
        "cap": Queued(site, first_come, below(4)),
        "gate": Queued(site, first_come, unsaturated),
        "gate+edf": Queued(site, earliest_deadline, unsaturated),
        "tokens": TokenGate(site),
        "signalbox": Signalbox(site, store),
    }


NAMES = ("cap", "gate", "gate+edf", "tokens", "signalbox")


def command(file: Path, *more: str) -> bytes:
    code = virtual.main(
        ["--requests", "60", "--seeds", "2", "--load", "2", "--capacity", "3", "--quiet", "--json", str(file), *more]
    )
    assert code == 0
    return file.read_bytes()


def test_the_same_command_gives_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again = command(tmp_path / "one"), command(tmp_path / "two")
    assert first == again
    other = command(tmp_path / "three", "--seeds", "1")
    assert json.loads(other)["overload"] != json.loads(first)["overload"]
    results = json.loads(first)["overload"]
    assert set(results) == {"2x pass", "2x cap", "2x gate", "2x gate+edf", "2x tokens", "2x signalbox"}
    assert "good tok/s" in capsys.readouterr().out


def test_a_lone_request_takes_the_steps_it_needs() -> None:
    site = site_of(come(5.0, 1000, 3))
    site.run(PassThrough(site))
    (call,) = site.calls
    prefill = StepTime().seconds(512, 0, 0, 0) + StepTime().seconds(488, 0, 0, 512)
    decode = StepTime().seconds(0, 1, 1001, 0) + StepTime().seconds(0, 1, 1002, 0)
    assert call.first_ms == pytest.approx(5 + 1000 * prefill)
    assert call.end_ms == pytest.approx(5 + 1000 * (prefill + decode))
    assert call.tpot_ms == pytest.approx(500 * decode)
    assert call.good


def test_what_is_good_is_done_and_within_all_objectives() -> None:
    def done(first_ms: float, end_ms: float, aim: Objective) -> Call:
        call = Call(0, come(0.0, tenant=Tenant(name="t", trace="conv", share=1, objective=aim)))
        call.outcome, call.first_ms, call.end_ms, call.produced = Outcome.DONE, first_ms, end_ms, 11
        return call

    assert done(1000, 2000, Objective(1000, 100, 2000)).good
    assert not done(1001, 2000, Objective(1000, 100, 2000)).good
    assert not done(1000, 2001, Objective(1000, 100, 0)).good
    assert not done(900, 1900, Objective(1000, 100, 1899)).good
    assert done(9000, 90_000, Objective()).good


@pytest.mark.parametrize("name", NAMES)
def test_every_request_ends_once_and_nothing_is_left(name: str, store: Store) -> None:
    site = site_of(*burst(150))
    site.run(strategies(site, store)[name])
    assert site.open == 0
    assert site.in_flight == [0]
    assert site.engines[0].idle
    assert site.engines[0].kv_used == 0
    assert {call.outcome for call in site.calls} == {Outcome.DONE, Outcome.REFUSED}
    assert all(call.produced == 0 for call in site.calls if call.outcome is Outcome.REFUSED)
    assert all((call.engine < 0) == (call.outcome is Outcome.REFUSED) for call in site.calls)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_starts_after_its_deadline(name: str, store: Store) -> None:
    site = site_of(*burst(150))
    site.run(strategies(site, store)[name])
    sent = [call for call in site.calls if call.engine >= 0]
    assert sent
    assert all(call.sent_ms <= call.deadline_ms for call in sent)


@pytest.mark.parametrize("name", NAMES)
def test_no_decision_knows_how_long_an_answer_will_be(name: str, store: Store) -> None:
    """Until the first answer has ended nothing may depend on any length."""
    decided = []
    for output in (40, 90):
        site = site_of(*burst(60, output=output))
        site.run(strategies(site, store)[name])
        first_end = min(call.end_ms for call in site.calls if call.outcome is Outcome.DONE)
        decided.append((first_end, [(call.number, call.sent_ms, call.refused_ms) for call in site.calls]))
    until = min(end for end, _ in decided)
    before = [
        [(number, sent if sent < until else -1, no if no < until else -1) for number, sent, no in all_of_them]
        for _, all_of_them in decided
    ]
    assert before[0] == before[1]
    assert sum(sent >= 0 for _, sent, _ in before[0]) > 3
    assert not [name for name in Call.__slots__ if "output" in name]


def test_the_cap_is_kept_and_every_engine_used() -> None:
    most = [0, 0]

    class Watched(Queued):
        def act(self) -> None:
            super().act()
            most[:] = [max(pair) for pair in zip(most, self._site.in_flight, strict=True)]

    site = site_of(*burst(100), engines=2)
    site.run(Watched(site, first_come, below(3)))
    assert most == [3, 3]


def test_the_gate_closes_at_five_waiting_or_at_four_fifths_of_the_cache() -> None:
    site = site_of(*(come(0.0, 30) for _ in range(7)))
    site.run(Queued(site, first_come, unsaturated))
    assert [call.sent_ms == 0.0 for call in site.calls] == [True] * 5 + [False] * 2
    patient = Tenant(name="patient", trace="conv", share=1.0, objective=Objective())
    full = site_of(come(0.0, 17_000, 3, patient), come(500.0, tenant=patient))
    full.run(Queued(full, first_come, unsaturated))
    assert full.calls[1].sent_ms == full.calls[0].end_ms > 2_000


def test_the_earliest_deadline_goes_first() -> None:
    hasty = Tenant(name="hasty", trace="conv", share=1.0, objective=Objective(400))
    site = site_of(come(0.0), come(1.0), come(2.0, tenant=hasty))
    site.run(Queued(site, earliest_deadline, below(1)))
    assert site.calls[2].sent_ms < site.calls[1].sent_ms


def test_a_client_that_leaves_costs_at_most_the_step_it_is_in(store: Store) -> None:
    asked = [come(0.0, 500, 200, leave_ms=1000.0), come(0.0, 500, 5), come(900.0, 500, 5, leave_ms=0.5)]
    for make in (PassThrough, lambda site: Signalbox(site, store), lambda site: Queued(site, first_come, below(2))):
        site = site_of(*asked)
        site.run(make(site))
        runs, stays, brief = site.calls
        assert (runs.outcome, stays.outcome, brief.outcome) == (Outcome.LEFT, Outcome.DONE, Outcome.LEFT)
        assert 10 < runs.produced < 70
        assert site.late_work <= 2
        assert site.queued == {"chat": 0}


def test_a_refused_client_comes_again_when_told() -> None:
    class Once(PassThrough):
        def arrive(self, call: Call) -> None:
            if call.attempts == 0:
                self._site.refuse(call, "rate_limited", 700.0)
            else:
                super().arrive(call)

    site = site_of(come(10.0), retries=1)
    site.run(Once(site))
    (call,) = site.calls
    assert (call.came_ms, call.refused_ms, call.arrival_ms) == (10.0, 10.0, 710.0)
    assert call.good
    numbers = sim_metrics.measure(site, 1.0)["all"]
    assert (numbers["retried"], numbers["retried_done"], numbers["refuse_of_deadline"]) == (1, 1, 0)
    stubborn = site_of(come(10.0))
    stubborn.run(Once(stubborn))
    assert stubborn.calls[0].outcome is Outcome.REFUSED


def test_an_answer_is_given_once() -> None:
    site = site_of(come(0.0))

    class Twice(PassThrough):
        def arrive(self, call: Call) -> None:
            super().arrive(call)
            with pytest.raises(ValueError, match="not waiting"):
                site.refuse(call, "expired")
            with pytest.raises(ValueError, match="not waiting"):
                site.start(call, 0)

    site.run(Twice(site))
    assert site.calls[0].good


def test_several_processes_share_one_queue(store: Store) -> None:
    site = site_of(*burst(300, gap_ms=2.0), engines=2)
    strategy = Signalbox(site, store, processes=3)
    site.run(strategy)
    assert {call.number % 3 for call in site.calls if call.engine >= 0} == {0, 1, 2}
    assert all(gateway.process.session.cursor for gateway in strategy.gateways), "no grant came by mail"
    assert store.ask("DBSIZE") == 0


def test_an_event_that_the_queue_cannot_apply_ends_the_run(store: Store) -> None:
    site = site_of(come(0.0))
    strategy = Signalbox(site, store)
    with pytest.raises(SimulationFault, match="no such thing"):
        strategy.gateways[0].process.book.deliver([(1, wire.ERROR, "no such thing", 0)], 0.0)


def test_what_is_impossible_is_refused_at_once(store: Store) -> None:
    hopeless = Tenant(name="hopeless", trace="conv", share=1.0, objective=Objective(50))
    site = site_of(come(0.0, 4000, tenant=hopeless), come(0.0))
    site.run(Signalbox(site, store))
    assert (site.calls[0].reason, site.calls[0].refused_ms) == ("deadline_impossible", 0.0)
    assert site.calls[1].good


def test_tickets_stand_on_answers_that_have_ended() -> None:
    estimates = Estimates(SHAPE, 1, Beliefs())
    call = Call(0, come(100.0, 700, 33))
    call.arrival_ms = 100.0
    cold = ticket_for(call, 100.0, estimates)
    assert (cold.prompt_tokens, cold.output_tokens, cold.waits_ms, cold.tpot_ms) == (700, 512, 1000, 100)
    for _ in range(30):
        ended = Call(1, come(0.0))
        ended.outcome, ended.produced = Outcome.DONE, 21
        estimates.ended(ended)
    warm = ticket_for(call, 350.0, estimates)
    assert (warm.output_tokens, warm.output_variance, warm.output_high, warm.waits_ms) == (21, 0, 21, 750)
    assert warm.key_ms == 750 + 700
    reserving = Estimates(SHAPE, 1, Beliefs(reserve=True, prompt=1.15))
    assert ticket_for(call, 350.0, reserving).output_tokens == CHAT.max_tokens
    assert ticket_for(call, 350.0, reserving).prompt_tokens == 805


def test_wrong_step_times_are_unlearned(store: Store) -> None:
    site = site_of(*burst(200, gap_ms=60.0))
    strategy = Signalbox(site, store, beliefs=Beliefs(start_rate=0.5))
    (model,) = strategy.gateways[0].estimates.models
    assert model.coefficients.a0_s == pytest.approx(0.03)
    site.run(strategy)
    assert model.warm
    assert model.prefill_rate(512, 5, 2000) == pytest.approx(507 / StepTime().seconds(507, 5, 2000, 0), rel=0.15)


def test_capacity_is_where_the_engine_alone_attains_95_percent(store: Store) -> None:
    lab = Lab(store, requests=250, seeds=1)
    scenario = Scenario(name="small", tenants=(CHAT,))
    rate = lab.capacity(scenario)

    def attained(factor: float) -> float:
        case = Case(scenario=scenario, rate=factor * rate, requests=250, seed=1, part="fit")
        return float(lab.measured(case)["all"]["attained"])

    assert attained(0.8) >= 0.95 > attained(1.4)
    assert lab.rates == {"small": rate}


@pytest.mark.parametrize("name", ["tokens", "signalbox"])
def test_refusing_early_keeps_what_was_promised(name: str, store: Store) -> None:
    lab = Lab(store, requests=350, seeds=1)
    lab.rates["overload"] = 3.25
    results = lab.sweep(overload(), [2.0], ["pass", name])
    alone, gated = results["2x pass"]["all"], results[f"2x {name}"]["all"]
    assert gated["goodput_rps"] > 3 * alone["goodput_rps"]
    assert gated["attained_accepted"] >= 0.95
    assert gated["wasted"] <= 0.05


@pytest.mark.parametrize("name", sorted(virtual.ALL_STUDIES))
def test_every_study_runs(name: str, store: Store) -> None:
    lab = Lab(store, requests=60, seeds=1)
    lab.rates = {"overload": 3.25, "bursts": 3.5, "noisy": 4.0, "kv": 0.6, "chat": 4.5}
    found = virtual.ALL_STUDIES[name](lab)
    assert all(found.values())
    virtual.show({name: found})


def test_the_ledger_forgets_what_has_ended() -> None:
    estimates = Estimates(SHAPE, 1, Beliefs())
    ledger, call = Ledger(estimates), Call(0, come(0.0, 700, 33))
    ledger.take(call)
    load = ledger.load()
    assert (load.outstanding_tokens, load.prefilling, load.running, load.tightest_tpot_s) == (700, 1, 0, 0.1)
    call.first_ms, call.produced = 50.0, 1
    ledger.first(call)
    load = ledger.load()
    assert (load.outstanding_tokens, load.prefilling, load.running, load.kv_tokens) == (0, 0, 1, 701)
    assert load.remaining_tokens == 511
    ledger.give_back(call)
    assert ledger.load() == Ledger(estimates).load()
