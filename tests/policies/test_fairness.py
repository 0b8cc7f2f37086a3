"""Prices, settlement and the bound, on numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.fairness import MOST_PRICE, OUTPUT_RATIO, Prices, bound, output_ratio, prices, settled


def test_weights_divide_prices() -> None:
    assert [prices(w) for w in (1, 2, 4)] == [Prices(1000, 2000), Prices(500, 1000), Prices(250, 500)]
    assert prices(4).charge(400, 0) == prices(1).charge(100, 0)


def test_prices_stay_integers_from_one_to_the_most() -> None:
    assert prices(1e9) == Prices(1, 1)
    assert prices(1e-9) == Prices(MOST_PRICE, MOST_PRICE)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_is_positive(weight: float) -> None:
    with pytest.raises(ValueError, match="weight must be above 0"):
        prices(weight)
    with pytest.raises(ValueError, match="output_ratio must be above 0"):
        prices(1.0, weight)


def test_an_output_token_costs_what_it_takes_within_bounds() -> None:
    assert output_ratio(81e-6, 243e-6) == pytest.approx(3.0)
    assert output_ratio(81e-6, 1e-6) == 1.0
    assert output_ratio(1e-6, 1e-3) == 8.0
    assert output_ratio(0.0, 1e-3) == OUTPUT_RATIO


def test_the_bound_is_the_larger_of_prompt_and_flight() -> None:
    assert bound(Prices(1, 2), longest_prompt=1000, tokens_in_flight=300) == 2000
    assert bound(Prices(1, 2), longest_prompt=1000, tokens_in_flight=3000) == 12_000


@given(*[st.integers(0, 10**6)] * 4)
def test_a_settlement_never_refunds_below_the_classes_time(
    counter: int, charged: int, truth: int, virtual: int
) -> None:
    after = settled(counter, charged, truth, virtual)
    if truth >= charged:
        assert after == counter + truth - charged
    else:
        assert counter - (charged - truth) <= after <= counter
        assert after >= min(counter, virtual)
