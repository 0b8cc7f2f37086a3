"""The step-time model against engines whose coefficients are known."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.nonnegative import nonnegative, solve
from policies.steptime import START, WARM, Coefficients, StepModel, Trim, Work, prefill_work

H100ISH = Coefficients(a0_s=6e-3, a1_s=30e-6, a2_s=160e-6, a3_s=0.2e-6, a4_s=1.2e-6)
TINY_CPU = Coefficients(a0_s=0.4e-3, a1_s=2e-6, a2_s=70e-6, a3_s=0.4e-6, a4_s=0.5e-6)


def values(of: Coefficients) -> tuple[float, ...]:
    return (of.a0_s, of.a1_s, of.a2_s, of.a3_s, of.a4_s)


def some_step(rng: random.Random, context_per_request: int = 3000) -> Work:
    running = rng.randint(0, 64)
    kv_tokens = running * rng.randint(50, context_per_request)
    prefill = rng.choice((0, rng.randint(1, 512 - running), 512 - running))
    return Work(1, prefill, running, kv_tokens, rng.randint(0, 4000) if prefill else 0)


def taught(true: Coefficients, count: int, noise: float, rng: random.Random, memory: int = 2000) -> StepModel:
    model = StepModel(memory=memory)
    for at in range(count):
        work = some_step(rng)
        model.observe(work, true.seconds(work) * rng.lognormvariate(0.0, noise), now=at * 0.02)
    return model


@pytest.mark.parametrize("true", [H100ISH, TINY_CPU], ids=["h100", "tiny"])
def test_it_finds_the_coefficients_in_noise(true: Coefficients) -> None:
    model = taught(true, 4000, 0.05, random.Random(11))
    assert values(model.coefficients) == pytest.approx(values(true), rel=0.05)
    assert model.error == pytest.approx(0.034, abs=0.01)  # the median of 5 % noise itself


def test_one_sample_in_a_hundred_may_be_a_stall() -> None:
    rng = random.Random(12)
    model = StepModel()
    for at in range(3000):
        work = some_step(rng)
        stall = 20.0 if rng.random() < 0.01 else 1.0
        model.observe(work, H100ISH.seconds(work) * rng.gauss(1.0, 0.02) * stall, now=at * 0.02)
    probe = Work(1, 400, 40, 40_000, 1000)
    assert model.seconds(probe) == pytest.approx(H100ISH.seconds(probe), rel=0.05)


def test_it_follows_an_engine_that_changes() -> None:
    rng = random.Random(13)
    model = taught(H100ISH, 1500, 0.03, rng, memory=500)
    slower = Coefficients(a0_s=12e-3, a1_s=60e-6, a2_s=320e-6, a3_s=0.4e-6, a4_s=2.4e-6)
    for at in range(1500):
        work = some_step(rng)
        model.observe(work, slower.seconds(work) * rng.gauss(1.0, 0.03), now=30 + at * 0.02)
    probe = Work(1, 300, 30, 30_000, 500)
    assert model.seconds(probe) == pytest.approx(slower.seconds(probe), rel=0.1)


def test_gaps_and_first_tokens_teach_it_as_steps_do() -> None:
    """No single step is seen: gaps of several tokens, and waits for a first token over many chunks."""
    rng = random.Random(14)
    model = StepModel()
    for at in range(3000):
        if rng.random() < 0.2:
            running = rng.randint(0, 40)
            work = prefill_work(rng.randint(50, 6000), 512, running, running * rng.randint(100, 2000))
        else:
            one = some_step(rng)
            steps = rng.randint(1, 4)
            work = Work(steps, one.prefill_tokens * steps, one.running, one.kv_tokens, one.context_tokens * steps)
        model.observe(work, H100ISH.seconds(work) * rng.gauss(1.0, 0.08), now=at * 0.05, inferred=True)
    for probe in (Work(1, 512, 0, 0), Work(1, 0, 30, 30_000), prefill_work(4000, 512, 20, 20_000)):
        assert model.seconds(probe) == pytest.approx(H100ISH.seconds(probe), rel=0.06)


def test_what_is_not_excited_keeps_its_value() -> None:
    """Thousands of steps without a prompt, of one request: the price of prompts stays as configured."""
    model = StepModel()
    for at in range(5000):
        model.observe(Work(1, 0, 1, 100), START.seconds(Work(1, 0, 1, 100)), now=at * 0.02)
    assert model.coefficients.a1_s == START.a1_s
    assert model.coefficients.a0_s == pytest.approx(START.a0_s, rel=0.01)
    assert model.coefficients.a4_s == 0.0


def test_contexts_that_nobody_reports_are_in_the_price_of_prompts() -> None:
    rng = random.Random(15)
    model = StepModel()
    for at in range(2000):
        work = some_step(rng)
        seen = Work(1, work.prefill_tokens, work.running, work.kv_tokens)
        model.observe(seen, H100ISH.seconds(work), now=at * 0.02)
    assert model.coefficients.a4_s == 0.0
    assert model.coefficients.a1_s > 1.1 * H100ISH.a1_s


def test_cold_it_never_promises_more_than_configured() -> None:
    rng = random.Random(16)
    model = StepModel()
    probe = Work(1, 400, 40, 40_000, 1000)
    assert (model.error, model.warm) == (None, False)
    assert repr(model) == "<StepModel cold, 0 samples, no error, <Trim 1.00>>"
    for at in range(WARM - 1):
        work = some_step(rng)
        model.observe(work, TINY_CPU.seconds(work), now=at * 0.02)
        assert model.seconds(probe) >= START.seconds(probe)
    work = some_step(rng)
    model.observe(work, TINY_CPU.seconds(work), now=9)
    assert model.warm
    assert model.seconds(probe) < START.seconds(probe) / 2
    slow = StepModel()
    for at in range(100):
        slow.observe(probe, 9.0, now=at)
    assert slow.seconds(probe) == pytest.approx(9.0, rel=0.1)


def test_bad_samples_name_what_is_wrong() -> None:
    model = StepModel()
    with pytest.raises(ValueError, match="seconds"):
        model.observe(Work(1, 0, 1, 10), 0.0, now=0)
    with pytest.raises(ValueError, match="seconds"):
        model.observe(Work(1, 0, 1, 10), math.inf, now=0)
    with pytest.raises(ValueError, match="work"):
        model.observe(Work(0, 0, 1, 10), 1.0, now=0)
    with pytest.raises(ValueError, match="work"):
        model.observe(Work(1, -1, 1, 10), 1.0, now=0)
    with pytest.raises(ValueError, match="memory"):
        StepModel(memory=100)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 2048), st.integers(0, 256), st.integers(0, 500_000), st.floats(1e-5, 10.0)),
        min_size=8,
        max_size=40,
    )
)
def test_whatever_comes_nothing_is_negative(samples: list[tuple[int, int, int, float]]) -> None:
    model = StepModel()
    for at, (prefill, running, kv_tokens, seconds) in enumerate(samples):
        model.observe(Work(1, prefill, running, kv_tokens, prefill / 2), seconds, now=at)
        assert all(0.0 <= value < math.inf for value in values(model.coefficients))
        assert model.prefill_rate(512, running, kv_tokens) > 0.0
        assert model.tpot(512, running, kv_tokens) > 0.0
        assert 0.5 <= model.trim.theta <= 1.1


@settings(max_examples=60)
@given(st.data())
def test_least_squares_is_the_best_of_all_that_are_not_negative(data: st.DataObject) -> None:
    """Against every choice of unknowns that are zero."""
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    rows = [[1.0, *(abs(rng.gauss(0.5, 0.4)) for _ in range(3))] for _ in range(8)]
    seen = [sum(row) + rng.gauss(0.0, 2.0) for row in rows]
    size = [math.sqrt(sum(row[i] ** 2 for row in rows)) for i in range(4)]
    matrix = [
        [sum(row[i] * row[j] for row in rows) / size[i] / size[j] + 0.01 * (i == j) for j in range(4)] for i in range(4)
    ]
    right = [sum(row[i] * y for row, y in zip(rows, seen, strict=True)) / size[i] for i in range(4)]

    def cost(x: list[float]) -> float:
        return sum(x[i] * (sum(matrix[i][j] * x[j] for j in range(4)) / 2 - right[i]) for i in range(4))

    best = 0.0
    for count in range(1, 5):
        for kept in itertools.combinations(range(4), count):
            part = solve([[matrix[i][j] for j in kept] for i in kept], [right[i] for i in kept])
            if min(part) >= 0.0:
                x = [0.0] * 4
                for i, value in zip(kept, part, strict=True):
                    x[i] = value
                best = min(best, cost(x))
    found = nonnegative(matrix, right)
    assert min(found) >= 0.0
    assert cost(found) <= best + 1e-3 * abs(best) + 1e-9


def test_least_squares_may_leave_nothing() -> None:
    assert nonnegative([[1.0, 0.5], [0.5, 1.0]], [-1.0, -2.0]) == [0.0, 0.0]
    assert nonnegative([], []) == []


# What follows from the model.


def test_prompts_go_through_in_chunks() -> None:
    work = prefill_work(1000, 512, 112, 5000)
    assert work == Work(3, 1000, 112, 5000, 400 * 3)
    assert prefill_work(0, 512, 0, 0).steps == 1
    assert prefill_work(400, 512, 112, 0, computed=2000).context_tokens == 2000
    assert prefill_work(3, 16, 40, 0).steps == 3  # decodes fill the chunk: one token a step, never none


def test_rate_and_pace_are_those_of_the_step() -> None:
    model = StepModel(START)
    alone = START.a0_s + 512 * START.a1_s
    assert model.prefill_rate(512, 0, 0) == pytest.approx(512 / alone)
    assert model.prefill_rate(512, 100, 10_000) < model.prefill_rate(512, 0, 0)
    full = START.seconds(Work(1, 412, 100, 10_000))
    lean = START.seconds(Work(1, 0, 100, 10_000))
    assert model.tpot(512, 100, 10_000) == pytest.approx(full)
    assert model.tpot(512, 100, 10_000, prefill_share=0.0) == pytest.approx(lean)
    assert model.tpot(512, 100, 10_000, prefill_share=0.25) == pytest.approx(0.25 * full + 0.75 * lean)
    model.trim.theta = 0.5
    assert model.prefill_rate(512, 0, 0) == pytest.approx(256 / alone)
    assert model.tpot(512, 100, 10_000) == pytest.approx(2 * full)
    assert model.prefill_seconds(Work(1, 412, 100, 10_000)) == pytest.approx(2 * full)


@given(st.floats(0.001, 0.5), st.integers(1, 600), st.floats(0, 8000))
def test_the_largest_batch_that_keeps_the_pace(tpot_s: float, limit: int, context: float) -> None:
    model = StepModel(START)
    most = model.most_running(tpot_s, 512, context, limit)
    limit = min(limit, 512)

    def pace(running: int) -> float:
        return START.seconds(Work(1, 512 - running, running, running * context))

    assert 0 <= most <= limit
    assert most == 0 or pace(most) <= 0.9 * tpot_s * (1 + 1e-9)
    assert most == limit or pace(most + 1) > 0.9 * tpot_s * (1 - 1e-9)
    model.trim.theta = 0.5
    assert model.most_running(tpot_s, 512, context, limit) == most // 2


# The trim.


def run(trim: Trim, ratio: float, seconds: int, used: float = 1.0, start: float = 0.0) -> None:
    for tenth in range(seconds * 10):
        trim.observe(ratio * 0.1, 0.1, used, start + tenth / 10)


def test_one_slow_minute_halves_and_load_brings_it_back() -> None:
    trim = Trim()
    run(trim, 0.4, 60)
    assert trim.theta == pytest.approx(0.5, abs=0.03)
    run(trim, 1.0, 60, used=0.3, start=60)
    assert trim.theta < 0.6
    run(trim, 1.0, 60, used=0.8, start=120)
    assert 0.94 <= trim.theta <= 1.0
    run(trim, 5.0, 120, start=180)
    assert 1.0 < trim.theta <= 1.1


def test_small_differences_do_not_move_it_and_large_ones_move_it_by_a_tenth() -> None:
    trim = Trim()
    run(trim, 0.97, 30)
    assert trim.theta == 1.0
    trim = Trim()
    trim.observe(0.1, 10.0, 1.0, 0.0)
    assert trim.theta == 1.0
    trim.observe(0.1, 10.0, 1.0, 1.0)
    assert trim.theta == pytest.approx(0.9)
    assert repr(trim) == "<Trim 0.90>"
