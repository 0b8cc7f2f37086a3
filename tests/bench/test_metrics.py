"""What metrics cost a request: counted in calls, which are the same on any machine."""

import sys
from types import FrameType
from typing import Any

import pytest

from bench import metrics as bench
from gateway.telemetry.metrics import Metrics, MetricsConfig
from gateway.telemetry.metrics_sheet import Board
from policies.types import ServiceClass


async def test_the_end_of_a_request_takes_few_calls() -> None:
    metrics = Metrics(Board(), MetricsConfig())
    exchange = bench.ended("m", ServiceClass(name="standard", rank=0), stream=True)
    metrics.ended(exchange)
    calls = 0

    def count(_: FrameType, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        metrics.ended(exchange)
    finally:
        sys.setprofile(None)
    assert 10 < calls <= 50


def test_the_bench_says_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--requests", "50", "--models", "1"]) == 0
    said = capsys.readouterr().out
    assert "a streamed request's end" in said
    assert " 1 models" in said
