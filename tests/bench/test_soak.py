"""The soak's own eyes: what it takes for an answer, and for a bound that was missed."""

import random
from typing import Any, cast

import pytest

from bench.soak import Soak, verdict


def soak() -> Soak:
    return Soak("http://nowhere", random.Random(1), cast("Any", None))


@pytest.mark.parametrize(
    ("status", "headers", "text", "stream", "fine"),
    [
        (200, {}, "data: {}\n\ndata: [DONE]\n\n", True, True),
        (200, {}, 'data: {"error":{}}\n\n', True, True),
        (200, {}, "data: {}\n\n", True, False),
        (200, {}, '{"id":"a"}', False, True),
        (503, {"x-signalbox-reason": "store_lost", "retry-after": "1"}, "{}", False, True),
        (503, {"x-signalbox-reason": "store_lost"}, "{}", False, False),
        (500, {}, "", False, False),
    ],
)
def test_what_an_answer_is(status: int, headers: dict[str, str], text: str, stream: bool, fine: bool) -> None:
    one = soak()
    one._judge(status, headers, text, stream)
    assert (not one.unanswered) == fine


def test_bounds() -> None:
    one = soak()
    one.outcomes["whole"] = 1
    one.memory_mib = [90.0, 90.0, 100.0, 100.0, 100.0, 100.0, 110.0, 110.0]
    assert verdict(one, {}, "all quiet") == []
    one.memory_mib[-2:] = [140.0, 140.0]
    one.unanswered = ["nothing for 60 s"] * 2
    missed = verdict(one, {"signalbox_ledger_leases": 2.0}, "Traceback (most recent call last)")
    assert [one.split(" ")[0] for one in missed] == ["signalbox_ledger_leases", "2", "memory", "a"]
