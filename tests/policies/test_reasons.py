"""The closed list of reasons."""

import pytest

from policies.reasons import Reason, Refusal


def test_reasons_are_words_for_a_wire() -> None:
    for reason in Reason:
        assert reason.value == reason.name.lower()
        assert reason.value.replace("_", "").isalpha()


def test_a_refusal_does_not_change() -> None:
    refusal = Refusal(Reason.QUEUE_FULL, "the queue is full", retry_after_s=1.5)
    assert refusal.param is None
    with pytest.raises(AttributeError):
        refusal.message = "no"  # type: ignore[misc]
