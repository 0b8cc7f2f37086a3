"""A minute never holds more than its limit, whenever it begins; refused and corrected amounts return."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.quota import MINUTE_MS, SLOT_MS, SLOTS, Minute


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 60)), max_size=80))
def test_no_sixty_seconds_hold_more(asks: list[tuple[int, int]]) -> None:
    minute, now_ms, taken = Minute(100), 0, list[tuple[int, int]]()
    for later_ms, units in asks:
        now_ms += later_ms
        if minute.wait_ms(units, now_ms) == 0:
            minute.take(units, now_ms)
            taken.append((now_ms, units))
        window = [n for at, n in taken if at > now_ms - MINUTE_MS]
        assert sum(window) <= 100


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 60)), min_size=1, max_size=40))
def test_after_the_wait_it_fits_and_not_a_millisecond_before(asks: list[tuple[int, int]]) -> None:
    minute, now_ms = Minute(100), 0
    for later_ms, units in asks:
        now_ms += later_ms
        wait_ms = minute.wait_ms(units, now_ms)
        if wait_ms:
            assert minute.wait_ms(units, now_ms + wait_ms - 1) > 0
            now_ms += wait_ms
        assert minute.wait_ms(units, now_ms) == 0
        minute.take(units, now_ms)


def test_the_whole_limit_may_be_taken_at_once_and_again_after_the_window() -> None:
    minute = Minute(10)
    minute.take(10, 4999)
    assert minute.left(5000) == 0
    assert minute.wait_ms(1, 5000) == SLOTS * SLOT_MS - 5000
    assert minute.left(SLOTS * SLOT_MS) == 10


def test_what_was_reserved_too_much_returns_and_what_is_missing_is_spent_now() -> None:
    minute = Minute(100)
    slot = minute.take(60, 0)
    minute.correct(slot, 60, 20, 1000)
    assert minute.left(1000) == 80
    slot = minute.take(20, 1000)
    minute.correct(slot, 20, 90, 30_000)
    assert minute.left(30_000) == 0
    assert minute.left(SLOTS * SLOT_MS) == 30  # the first slot has left; the 70 were spent at 30 s
    assert repr(minute) == "<Minute 70 of 100>"


def test_what_never_fits_waits_a_window() -> None:
    assert Minute(10).wait_ms(11, 0) == MINUTE_MS + SLOT_MS
    with pytest.raises(ValueError, match="limit must be at least 1"):
        Minute(0)
