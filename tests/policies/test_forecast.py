"""Forecasts against the simulated engine, and each feasibility test on numbers."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.simengine import Engine, Sequence, Shape, StepTime
from policies.forecast import (
    NOTHING_AHEAD,
    REFUSES,
    Ahead,
    Check,
    Demand,
    Due,
    Forecast,
    Load,
    Safety,
    decoding_after,
    due,
    failed,
    first_token_test,
    forecast,
    idle_tests,
    kv_test,
    load_tests,
    pace_test,
    total_test,
)
from policies.kv import KvSums
from policies.lengths import Outlook
from policies.reasons import Reason
from policies.steptime import START, StepModel, Work
from policies.types import Objective

ANY_TIME = Due()
OUTPUT = Outlook(200.0, 100.0**2, 20, 400, 512)
CHUNK = 512


def idle(**change: float) -> Load:
    return Load(**{"chunk_tokens": CHUNK, "max_running": 64, "kv_usable_tokens": 200_000, **change})  # type: ignore[arg-type]


def asking(prompt: int, uncached: int | None = None, output: Outlook = OUTPUT, until: Due = ANY_TIME) -> Demand:
    return Demand(prompt, prompt if uncached is None else uncached, output, until)


# Against an engine.


def first_token_s(engine: Engine, newcomer: Sequence) -> float:
    """Run `engine` until its newcomer's first token; the seconds that took."""
    seconds = 0.0
    while newcomer.produced == 0:
        stepped = engine.step()
        assert stepped is not None
        seconds += stepped[0].seconds
    return seconds


def busy_engine(rng: random.Random, running: int, mean: float = 200.0) -> tuple[Engine, list[Sequence], Load]:
    """`running` requests in the middle of their decode, and the load as a ledger would have it."""
    engine = Engine(Shape(chunk_tokens=CHUNK, max_running=64, kv_tokens=400_000), StepTime())
    sequences = [Sequence(rng.randint(50, 1000), 1 + round(rng.expovariate(1 / mean))) for _ in range(running)]
    for one in sequences:
        engine.add(one)
    while any(one.produced == 0 for one in sequences):
        engine.step()
    alive = [one for one in sequences if not one.done]
    load = idle(
        running=len(alive),
        kv_tokens=sum(one.known for one in alive),
        remaining_tokens=mean * len(alive),  # memoryless lengths: the mean is always still to come
    )
    return engine, alive, load


@pytest.mark.parametrize(("running", "queued", "prompt"), [(0, 0, 3000), (30, 0, 2000), (50, 12, 1500), (20, 60, 700)])
def test_the_first_token_comes_when_it_was_said_to(running: int, queued: int, prompt: int) -> None:
    rng = random.Random(running)
    ratios = []
    for _ in range(4):
        engine, _, load = busy_engine(rng, running)
        sizes = [rng.randint(100, 2000) for _ in range(queued)]
        for size in sizes:
            engine.add(Sequence(size, 1 + round(rng.expovariate(1 / 200))))
        newcomer = Sequence(prompt, 10)
        engine.add(newcomer)
        said = forecast(StepModel(START), load, asking(prompt), Ahead(sum(sizes), queued))
        ratios.append(first_token_s(engine, newcomer) / said.first_token_s)
    assert sum(ratios) / 4 == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize(("queued", "mean"), [(20, 300.0), (40, 600.0)])
def test_with_long_outputs_it_is_places_that_are_waited_for(queued: int, mean: float) -> None:
    rng = random.Random(4)
    ratios = []
    for _ in range(3):
        engine, _, load = busy_engine(rng, 62, mean)
        for _ in range(queued):
            engine.add(Sequence(500, 1 + round(rng.expovariate(1 / mean))))
        newcomer = Sequence(500, 10)
        engine.add(newcomer)
        demand = asking(500, output=Outlook(mean, mean * mean, 100, 3000, 512))
        said = forecast(StepModel(START), load, demand, Ahead(500 * queued, queued))
        ratios.append(first_token_s(engine, newcomer) / said.first_token_s)
    assert sum(ratios) / 3 == pytest.approx(1.0, abs=0.25)


def test_the_decode_state_is_that_of_the_first_token() -> None:
    """A long prompt outlives most of what decodes now: Mooncake's lesson."""
    rng = random.Random(9)
    left = []
    for _ in range(8):
        engine, alive, load = busy_engine(rng, 50)
        newcomer = Sequence(60_000, 10)
        engine.add(newcomer)
        said = forecast(StepModel(START), load, asking(60_000))
        first_token_s(engine, newcomer)
        left.append((sum(not one.done for one in alive), said.running, load.running))
    seen, predicted, before = (sum(column) / 8 for column in zip(*left, strict=True))
    assert predicted == pytest.approx(seen, abs=4)
    assert predicted < 0.7 * before


# What a forecast says.


def test_an_idle_backend_needs_its_own_prompt_only() -> None:
    said = forecast(StepModel(START), idle(), asking(400))
    assert said.first_token_s == pytest.approx(START.seconds(Work(1, 400, 0, 0)))
    assert (said.running, said.kv_tokens) == (0, 0)
    assert said.tpot_s == pytest.approx(START.seconds(Work(1, CHUNK - 1, 1, 400)))
    cached = forecast(StepModel(START), idle(), asking(4000, uncached=100))
    assert cached.first_token_s == pytest.approx(START.seconds(Work(1, 100, 0, 0, 3900)))


def test_the_trim_stretches_a_forecast() -> None:
    model = StepModel(START)
    before = forecast(model, idle(), asking(4000))
    model.trim.theta = 0.5
    after = forecast(model, idle(), asking(4000))
    assert after.first_token_s == pytest.approx(2 * before.first_token_s)
    assert after.tpot_s == pytest.approx(2 * before.tpot_s)


loads = st.builds(
    idle,
    outstanding_tokens=st.integers(0, 5000),
    prefilling=st.integers(0, 8),
    running=st.integers(0, 64),
    kv_tokens=st.integers(0, 200_000),
    remaining_tokens=st.integers(0, 50_000),
    prefill_share=st.floats(0, 1),
)


@given(loads, st.integers(1, 20_000), st.integers(0, 100_000), st.integers(0, 200))
def test_nothing_is_sooner_than_on_an_idle_engine(load: Load, prompt: int, tokens: int, requests: int) -> None:
    model = StepModel(START)
    said = forecast(model, load, asking(prompt), Ahead(tokens, requests))
    assert said.first_token_s > 0.0
    assert said.tpot_s > 0.0
    assert 0.0 <= said.running <= load.max_running
    assert 0.0 <= said.kv_tokens <= load.kv_usable_tokens
    assert said.first_token_s >= forecast(model, idle(), asking(prompt)).first_token_s * 0.999


@given(loads, st.floats(0, 1e6), st.floats(0, 1e6))
def test_those_who_decode_only_become_fewer(load: Load, steps: float, later: float) -> None:
    joined = load.prefilling
    now, then = (decoding_after(load, NOTHING_AHEAD, at)[0] for at in sorted((steps, steps + later)))
    assert min(joined, load.max_running) <= then <= now <= min(load.running + joined, load.max_running)


def test_due_counts_from_the_first_byte() -> None:
    objective = Objective(ttft_ms=2000, tpot_ms=50, total_ms=30_000)
    assert due(objective, first_byte_s=10.0, now=10.5) == Due(1.5, 0.05, 29.5)
    assert due(objective, first_byte_s=10.0, now=13.0).first_token_s == -1.0
    assert due(Objective(), first_byte_s=0.0, now=99.0) == Due(math.inf, math.inf, math.inf)


def test_a_demand_cannot_have_more_to_compute_than_there_is() -> None:
    with pytest.raises(ValueError, match="uncached_tokens"):
        asking(10, uncached=11)
    with pytest.raises(ValueError, match="uncached_tokens"):
        asking(10, uncached=-1)


# Safety.


def test_safety_is_learned_from_how_forecasts_turned_out() -> None:
    safety, rng = Safety(), random.Random(2)
    for _ in range(29):
        safety.observe(1.0, 9.0)
        assert safety.factor == 1.15
    for _ in range(600):
        safety.observe(2.0, 2.0 * rng.uniform(0.8, 1.4))
    assert safety.factor == pytest.approx(1.37, abs=0.02)
    assert repr(safety).startswith("<Safety 1.3")


def test_the_ratios_of_short_predictions_do_not_count_but_their_errors_do() -> None:
    safety = Safety()
    assert safety.error is None
    for _ in range(100):
        safety.observe(0.02, 0.05, left_s=3.0)
    assert safety.factor == Safety.START
    assert safety.error == pytest.approx(1.5)
    for _ in range(50):
        safety.observe(0.5, 0.6, left_s=3.0)
        safety.observe(0.5, 5.0, left_s=math.inf)
    assert safety.factor == pytest.approx(1.2)
    for _ in range(600):
        safety.observe(2.0, 1.0)
    assert safety.factor == 1.0
    for _ in range(600):
        safety.observe(2.0, 100.0)
    assert safety.factor == 3.0
    for predicted, observed, field in ((0.0, 1.0, "predicted_s"), (1.0, math.inf, "observed_s")):
        with pytest.raises(ValueError, match=field):
            safety.observe(predicted, observed)


# The tests, each just within and just beyond.

SEEN = Forecast(2.0, 0.04, Work(10, 3000, 20, 20_000), 20.0, 20_000.0)


def test_first_token_within_what_is_left() -> None:
    load = idle(outstanding_tokens=1000)
    holds = first_token_test(SEEN, load, asking(500, until=Due(first_token_s=2.3)), 1.15)
    assert holds.ok
    assert holds.reason is None
    assert holds.terms["ahead_tokens"] == 1500
    assert holds.terms["tokens_per_s"] == 1500
    late = first_token_test(SEEN, load, asking(500, until=Due(first_token_s=2.29)), 1.15)
    assert late.reason is Reason.DEADLINE_UNREACHABLE
    assert str(late).startswith("first: 2.3 > 2.29 s (safety 1.15, forecast_s 2, outstanding_tokens 1000, ")
    assert first_token_test(SEEN, load, asking(500), 1.15).ok
    assert not first_token_test(SEEN, load, asking(500, until=Due(first_token_s=-1)), 1.15).ok


def test_pace_within_the_tightest_of_all() -> None:
    assert pace_test(SEEN, idle(), asking(500)).ok
    assert pace_test(SEEN, idle(tightest_tpot_s=0.05), asking(500, until=Due(tpot_s=0.0422))).ok
    own = pace_test(SEEN, idle(tightest_tpot_s=0.05), asking(500, until=Due(tpot_s=0.042)))
    others = pace_test(SEEN, idle(tightest_tpot_s=0.042), asking(500, until=Due(tpot_s=0.05)))
    assert not own.ok
    assert not others.ok
    assert own.limit == others.limit == pytest.approx(0.95 * 0.042)
    assert others.reason is None  # it may wait
    assert others.terms["running"] == 21


def test_total_with_the_length_that_nine_in_ten_stay_within() -> None:
    needed = 1.15 * 2.0 + 399 * 0.04
    assert total_test(SEEN, asking(500, until=Due(total_s=needed + 1e-9)), 1.15).ok
    late = total_test(SEEN, asking(500, until=Due(total_s=needed - 0.01)), 1.15)
    assert late.reason is Reason.DEADLINE_UNREACHABLE
    assert late.predicted == pytest.approx(needed)


def test_kv_peak_within_what_may_be_held() -> None:
    many = KvSums(20, 150_000.0, 1e6, 160_000.0)
    need = 150_000 + 704 + 2 * math.sqrt(1e6 + 1e4)
    verdict = kv_test(idle(kv=many, kv_block=16, kv_usable_tokens=math.ceil(need)), asking(500))
    assert verdict.ok
    assert verdict.predicted == pytest.approx(need)
    full = kv_test(idle(kv=many, kv_block=16, kv_usable_tokens=math.floor(need)), asking(500))
    assert not full.ok
    assert full.reason is None
    assert full.unit == "tokens"
    first = kv_test(idle(kv_usable_tokens=900), asking(500))
    assert first.predicted == 900  # alone: its own q90
    assert first.ok


def test_what_no_idle_engine_could_do() -> None:
    model = StepModel(START)
    assert failed(idle_tests(model, idle(), asking(1000))) is None
    prefill = START.seconds(Work(2, 1000, 0, 0, 512))
    pace = START.seconds(Work(1, 0, 1, 1000))
    for until, check in (
        (Due(first_token_s=prefill * 0.99), Check.IDLE_FIRST),
        (Due(tpot_s=pace * 0.99), Check.IDLE_PACE),
        (Due(total_s=(prefill + 19 * pace) * 0.99), Check.IDLE_TOTAL),
    ):
        verdict = failed(idle_tests(model, idle(), asking(1000, until=until)))
        assert verdict is not None
        assert verdict.check is check
        assert verdict.reason is Reason.DEADLINE_IMPOSSIBLE
    enough = Due(prefill * 1.01, pace * 1.01, (prefill + 19 * pace) * 1.01)
    assert failed(idle_tests(model, idle(), asking(1000, until=enough))) is None
    model.trim.theta = 0.5  # a slow minute makes nothing impossible
    assert failed(idle_tests(model, idle(running=60, kv_tokens=60_000), asking(1000, until=enough))) is None
    never = failed(idle_tests(model, idle(kv_usable_tokens=1000), asking(1000)))
    assert never is not None
    assert never.reason is Reason.CONTEXT_LENGTH_EXCEEDED


def test_under_load_every_test_is_asked() -> None:
    model = StepModel(START)
    load = idle(running=30, kv_tokens=30_000, remaining_tokens=6000, outstanding_tokens=800, prefilling=1)
    demand = asking(1000, until=Due(3.0, 0.2, 120.0))
    verdicts = load_tests(forecast(model, load, demand), load, demand, 1.15)
    assert [verdict.check for verdict in verdicts] == [Check.FIRST, Check.PACE, Check.TOTAL, Check.KV]
    assert failed(verdicts) is None
    behind = load_tests(forecast(model, load, demand, Ahead(30_000, 20)), load, demand, 1.15)
    verdict = failed(behind)
    assert verdict is not None
    assert verdict.check is Check.FIRST


def test_every_check_says_what_it_refuses_with() -> None:
    assert REFUSES.keys() == set(Check)
