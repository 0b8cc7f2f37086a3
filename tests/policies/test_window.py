"""The window of numbers, against a list."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.window import Window


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60), st.integers(1, 12), st.floats(0.0, 1.0))
def test_a_quantile_is_that_of_the_newest_numbers(values: list[int], size: int, level: float) -> None:
    window = Window(size)
    for value in values:
        window.add(value)
    kept = values[-size:]
    found = window.quantile(level)
    assert len(window) == len(kept)
    assert found in kept
    assert sum(one <= found for one in kept) >= level * len(kept) - 1e-6
    assert sum(one < found for one in kept) <= level * len(kept)


def test_it_says_how_full_it_is_and_what_is_wrong() -> None:
    window = Window(3)
    assert repr(window) == "<Window 0/3>"
    with pytest.raises(ValueError, match="empty"):
        window.quantile(0.5)
    with pytest.raises(ValueError, match="nan"):
        window.add(math.nan)
    with pytest.raises(ValueError, match="size"):
        Window(0)
