"""The breaker opens on the backend's own failures only, tries again carefully, and never sticks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import ValidationError, convert

from policies.breaker import Breaker, BreakerRule, Circuit

RULE = BreakerRule(failures=3, share=0.5, window_s=10.0, open_s=1.0, growth=2.0, most_s=5.0, probe_s=4.0)


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(RULE)
    for _ in range(3):
        breaker.failure(at)
    assert breaker.circuit(at) is Circuit.OPEN
    return breaker


def test_it_opens_at_the_count_and_not_before() -> None:
    breaker = Breaker(RULE)
    breaker.failure(0.0)
    breaker.failure(0.1)
    assert breaker.allows(0.1)
    assert breaker.opens_in_s(0.1) == 0.0
    breaker.failure(0.2)
    assert not breaker.allows(0.2)
    assert breaker.opens_in_s(0.2) == 1.0


def test_a_few_failures_among_many_answers_do_not_open_it() -> None:
    breaker = Breaker(RULE)
    for n in range(100):
        breaker.success(n / 100)
    for _ in range(20):
        breaker.failure(1.0)
    assert breaker.circuit(1.0) is Circuit.CLOSED


def test_old_failures_are_forgotten() -> None:
    breaker = Breaker(RULE)
    for at in (0.0, 11.0, 22.0, 33.0):
        breaker.failure(at)
        assert breaker.allows(at)


def test_failures_on_both_sides_of_half_a_window_count_together() -> None:
    breaker = Breaker(RULE)
    breaker.failure(4.9)
    breaker.failure(5.1)
    breaker.failure(5.2)
    assert not breaker.allows(5.2)


def test_half_open_lets_one_through() -> None:
    breaker = opened()
    assert breaker.circuit(1.0) is Circuit.HALF_OPEN
    assert breaker.allows(1.0)
    assert not breaker.allows(1.0)
    assert not breaker.allows(4.9)
    breaker.success(4.9)
    assert breaker.circuit(4.9) is Circuit.CLOSED
    assert breaker.allows(4.9)


def test_a_probe_without_an_outcome_is_replaced() -> None:
    breaker = opened()
    assert breaker.allows(1.0)
    assert breaker.opens_in_s(1.0) == 4.0
    assert not breaker.allows(4.9)
    assert breaker.allows(5.0)
    assert not breaker.allows(5.0)


def test_each_failed_probe_keeps_it_open_longer_up_to_a_bound() -> None:
    breaker, at, lasted = opened(), 0.0, []
    for _ in range(5):
        lasted.append(breaker.opens_in_s(at))
        at += lasted[-1]
        assert breaker.allows(at)
        breaker.failure(at)
    assert lasted == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_closed_breaker_starts_anew() -> None:
    breaker = opened()
    assert breaker.allows(1.0)
    breaker.failure(1.0)  # open for two seconds now
    assert breaker.allows(3.0)
    breaker.success(3.0)
    breaker.failure(3.1)
    breaker.failure(3.1)
    assert breaker.allows(3.1)
    breaker.failure(3.1)
    assert breaker.opens_in_s(3.1) == pytest.approx(1.0)


def test_outcomes_of_requests_from_before_change_nothing_while_open() -> None:
    breaker = opened()
    breaker.success(0.5)
    breaker.failure(0.5)
    assert breaker.opens_in_s(0.5) == 0.5
    assert not breaker.allows(0.9)


def test_the_status_line() -> None:
    assert repr(Breaker()) == "<Breaker closed, 0 failures>"
    assert repr(opened()) == "<Breaker open, 3 failures>"


@pytest.mark.parametrize("field", ["failures", "window_s", "open_s", "probe_s", "most_s"])
def test_a_rule_of_nothing_is_an_error(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        convert({field: 0}, BreakerRule)


EVENTS = st.lists(st.tuples(st.sampled_from("sfa"), st.floats(0.0, 3.0)), max_size=60)


@given(EVENTS)
def test_whatever_happens_it_is_open_at_most_the_bound(events: list[tuple[str, float]]) -> None:
    breaker, at = Breaker(RULE), 0.0
    for kind, passed in events:
        at += passed
        if kind == "s":
            breaker.success(at)
        elif kind == "f":
            breaker.failure(at)
        else:
            breaker.allows(at)
        assert 0.0 <= breaker.opens_in_s(at) <= max(RULE.most_s, RULE.probe_s)
    assert breaker.allows(at + max(RULE.most_s, RULE.probe_s))


@given(st.lists(st.floats(0.0, 1.0), max_size=50))
def test_answers_alone_never_open_it(gaps: list[float]) -> None:
    breaker, at = Breaker(RULE), 0.0
    for gap in gaps:
        at += gap
        breaker.success(at)
        assert breaker.allows(at)
