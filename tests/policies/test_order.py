"""Keys: deadlines, prompts, arrival."""

import pytest

from policies.order import FCFS_KEY, NO_DEADLINE_MS, Order


@pytest.mark.parametrize(
    ("kind", "waits_ms", "tokens", "key"),
    [
        ("hybrid", 3000, 500, 3500),
        ("hybrid", 3000, 0, 3000),
        ("edf", 3000, 500, 3000),
        ("fcfs", 3000, 500, FCFS_KEY),
        ("hybrid", -5, 10, 10),
        ("edf", 10**9, 10, NO_DEADLINE_MS),
        ("hybrid", 10**9, 10, NO_DEADLINE_MS + 10),
    ],
)
def test_keys(kind: str, waits_ms: int, tokens: int, key: int) -> None:
    assert Order(kind=kind).key_ms(waits_ms, tokens) == key  # type: ignore[arg-type]


def test_a_short_prompt_with_a_later_deadline_passes_a_long_one() -> None:
    order = Order(alpha_ms=2.0)
    assert order.key_ms(3500, 100) < order.key_ms(3000, 1000)
    assert Order(kind="edf").key_ms(3500, 100) > Order(kind="edf").key_ms(3000, 1000)
