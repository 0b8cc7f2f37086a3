"""What metrics cost: `python -m bench.metrics [--requests N] [--models N]`.

Microseconds of CPU per request and per turn, on requests as an exchange leaves them, and milliseconds per scrape with
so many models in three classes. The whole request, metrics always on, is measured by `bench.overhead`.
"""

import argparse
import time
from collections.abc import Callable
from typing import cast

from msgspec import Struct

from backends.protocol import Kind, Prompt, Usage
from backends.simulated import Simulated
from gateway.clock import now
from gateway.exchange import Exchange
from gateway.job import Job
from gateway.pool import Pool
from gateway.reaper import Reaper
from gateway.telemetry.metrics import Metrics, MetricsConfig
from gateway.telemetry.metrics_sheet import Board
from gateway.telemetry.metrics_text import render
from gateway.tenants import Tenant
from gateway.trunk import Trunk
from policies.lifecycle import State
from policies.types import ServiceClass


class Cost(Struct):
    """CPU, in microseconds per request and turn, milliseconds per scrape; series is how many samples that one has."""

    streamed_us: float
    whole_us: float
    turn_us: float
    scrape_ms: float
    series: int


def ended(model: str, service: ServiceClass, stream: bool) -> Exchange:
    """A request after a whole answer. It has no trunk: what is measured does not look at it."""
    pool = Pool(model, (Simulated(name="one"), Simulated(name="two")), Reaper())
    at = now()
    exchange = Exchange(cast("Trunk", None), at)
    prompt = Prompt(kind=Kind.CHAT, model=model, body=b"{}", stream=stream)
    exchange.job = Job(Tenant("alice"), service, pool, prompt, {}, at + 10, at + 100, 50)
    exchange.asked_at, exchange.submitted_at = at + 1e-4, at + 2e-4
    exchange.granted_at, exchange.started_at, exchange.ended_at = at + 1e-3, at + 0.1, at + 1.7
    exchange.member, exchange.usage, exchange.state = pool.members[0], Usage(300, 200), State.DONE
    return exchange


def timed(what: Callable[[], object], times: int) -> float:
    """CPU microseconds per call, the least of five rounds."""
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        for _ in range(times):
            what()
        best = min(best, (time.process_time() - began) / times)
    return best * 1e6


def measure(requests: int, models: int) -> Cost:
    board = Board()
    metrics = Metrics(board, MetricsConfig())
    classes = [ServiceClass(name=name, rank=rank) for rank, name in enumerate(("interactive", "standard", "batch"))]
    for number in range(models):
        for service in classes:
            metrics.ended(ended(f"model-{number}", service, stream=True))
    streamed, whole = (ended("model-0", classes[1], stream) for stream in (True, False))
    text, _ = render([*board.rows(0.0)], "")
    return Cost(
        streamed_us=timed(lambda: metrics.ended(streamed), requests),
        whole_us=timed(lambda: metrics.ended(whole), requests),
        turn_us=timed(lambda: metrics.turned(0.001, 3), requests),
        scrape_ms=timed(lambda: render([*board.rows(0.0)], ""), 1) / 1e3,
        series=sum(not line.startswith(b"#") for line in text.splitlines()),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--models", type=int, default=10)
    args = parser.parse_args(argv)
    cost = measure(args.requests, args.models)
    print(f"a streamed request's end  {cost.streamed_us:8.2f} us")
    print(f"an unstreamed one's       {cost.whole_us:8.2f} us")
    print(f"a turn                    {cost.turn_us:8.2f} us")
    print(f"a scrape                  {cost.scrape_ms:8.2f} ms, {cost.series} samples, {args.models} models")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
