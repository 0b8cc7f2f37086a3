"""What a gateway process learns of one backend, and when the shared queue is told."""

import math

import pytest

from backends.protocol import Gauge
from gateway.estimates import LEARN_EVERY_S, Answers, Steps
from policies.forecast import Safety
from policies.kv import Deviations
from policies.lengths import Kind
from policies.steptime import START, WARM, Coefficients, Work

TRUE = Coefficients(a0_s=0.01, a1_s=1e-4, a2_s=2e-4, a3_s=0.0, a4_s=0.0)


def stepped(steps: Steps, count: int = 2 * WARM, preemptions: int | None = None, at: float = 0.0) -> None:
    """A second in which an engine made so many steps, of several sizes."""
    made = []
    for n in range(count):
        prefill, running = (n * 37) % 500, 1 + n % 20
        work = Work(1, prefill, running, 0)
        made.append((prefill, running, 0, TRUE.seconds(work)))
    steps.gauge(Gauge(steps=tuple(made), preemptions=preemptions), 32, at)


def forecast(steps: Steps, ratio: float, left_s: float = 2.0, from_s: float = 10.0) -> None:
    for n in range(Safety.ENOUGH):
        steps.first_token(1.0, ratio, left_s, from_s + n)


def test_nothing_is_told_before_anything_is_known() -> None:
    steps = Steps()
    assert steps.news() is None
    stepped(steps, WARM - 1)
    assert steps.news() is None


def test_step_times_are_told_when_they_are_warm_and_when_they_move() -> None:
    steps = Steps()
    stepped(steps)
    told = steps.news()
    assert told is not None
    assert told.steps is not None
    assert told.steps.a1_s == pytest.approx(TRUE.a1_s, rel=0.1)
    assert steps.told is told
    assert steps.news() is None


def test_the_safety_follows_forecasts_that_were_too_hopeful() -> None:
    steps = Steps()
    forecast(steps, 1.6)
    told = steps.news()
    assert told is not None
    assert (told.steps, told.safety) == (None, pytest.approx(1.6))
    assert steps.news() is None


def test_forecasts_without_step_times_say_nothing_of_those_with_them() -> None:
    steps = Steps()
    forecast(steps, 2.5)
    assert steps.news() is not None
    stepped(steps)
    told = steps.news()
    assert told is not None
    assert told.safety == Safety.START
    forecast(steps, 1.3, from_s=100.0)
    again = steps.news()
    assert again is not None
    assert again.safety == pytest.approx(1.3)


def test_a_distant_deadline_teaches_no_safety() -> None:
    steps = Steps()
    for left_s in (60.0, math.inf):
        forecast(steps, 3.0, left_s=left_s)
    assert steps.learned.safety == Safety.START
    assert steps.learned.forecast_error == pytest.approx(2.0)


def test_first_tokens_that_come_in_crowds_are_not_all_looked_at() -> None:
    steps = Steps()
    for n in range(1000):
        steps.first_token(1.0, 1.3, 1.0, 5.0 + n * LEARN_EVERY_S / 100)
    assert steps.learned.safety == Safety.START


@pytest.mark.parametrize(("expected_s", "observed_s"), [(0.0, 1.0), (1.0, 0.0)])
def test_what_was_not_forecast_is_no_sample(expected_s: float, observed_s: float) -> None:
    steps = Steps()
    steps.first_token(expected_s, observed_s, 1.0, 5.0)
    assert steps.learned.forecast_error is None


def test_preemptions_keep_more_of_the_kv_free() -> None:
    steps = Steps()
    for at, preemptions in enumerate((7, 7, 9, 9, 12)):
        steps.gauge(Gauge(preemptions=preemptions), 32, float(at))
    assert steps.learned.deviations == Deviations.START + 2 * Deviations.RISE
    told = steps.news()
    assert told is not None
    assert told.deviations == Deviations.START + 2 * Deviations.RISE


def test_what_an_engine_had_preempted_before_is_not_ours() -> None:
    steps = Steps()
    steps.gauge(Gauge(preemptions=1000), 32, 500.0)
    steps.gauge(Gauge(preemptions=0), 32, 501.0)  # it was started again
    steps.gauge(Gauge(), 32, 502.0)
    assert steps.learned.deviations == Deviations.START
    assert steps.news() is None


def test_a_quiet_engine_gets_more_after_ten_minutes_from_the_first_look() -> None:
    steps = Steps()
    steps.gauge(Gauge(preemptions=0), 32, 10_000.0)
    steps.gauge(Gauge(preemptions=0), 32, 10_001.0)
    assert steps.learned.deviations == Deviations.START
    steps.gauge(Gauge(preemptions=0), 32, 10_000.0 + Deviations.QUIET_S)
    assert steps.learned.deviations == pytest.approx(Deviations.START - Deviations.FALL)


def test_what_was_learned_can_be_looked_at() -> None:
    steps = Steps()
    cold = steps.learned
    assert (cold.coefficients, cold.samples, cold.step_error, cold.theta) == (START, 0, None, 1.0)
    stepped(steps)
    warm = steps.learned
    assert warm.samples == 2 * WARM
    assert warm.step_error is not None
    assert warm.step_error < 0.05
    assert "StepModel" in repr(steps)


def test_the_coverage_of_lengths_can_be_looked_at() -> None:
    answers, kind = Answers(), Kind("t", "m")
    assert answers.coverage.judged == 0
    for n in range(100):
        answers.lengths.add(kind, 10 + n % 7)
    assert answers.coverage.judged > 50
    assert 0.5 < answers.coverage.ratio <= 1.0
