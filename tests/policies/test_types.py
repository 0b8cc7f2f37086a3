"""What a scheduler reasons about."""

import msgspec
import pytest

from policies.types import Objective, ServiceClass


def test_a_class_carries_its_objective() -> None:
    one = ServiceClass(name="interactive", rank=0, ttft_ms=500, tpot_ms=50, total_ms=9_000)
    assert one.objective == Objective(500, 50, 9_000)


@pytest.mark.parametrize("wrong", [{"rank": -1}, {"rank": 10}, {"rank": 0, "ttft_ms": -1}, {"rank": 0, "wat": 1}])
def test_a_class_refuses_what_makes_no_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": "x", **wrong}, ServiceClass)
