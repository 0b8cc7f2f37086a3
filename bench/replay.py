"""Sends a plan of requests from several processes, open loop: each at its time, whatever became of those before it."""

import asyncio
import math
import os
import statistics
import sys
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct

from bench.arrivals import Source, planned
from bench.goodput import Record
from bench.prompts import Words
from bench.replay_worker import READY, Health, Part, Told
from bench.sim_metrics import quantile
from bench.target import Target

TOKENS_PER_PROCESS = 6_000.0  # chunks/s that one process reads without being pressed
REQUESTS_PER_PROCESS = 300.0
LEAD_S = 0.2  # from when all processes are ready to the begin
LINE_BYTES = 64 * 1024 * 1024
LATE_MS = 20.0  # 99th percentile, above which the generator held the requests up
BUSY = 0.9  # of a core: the same

_told = msgspec.json.Decoder(Told).decode


class ReplayError(Exception):
    """A load process failed. Its text says how."""


class Plan(Struct, frozen=True, kw_only=True):
    """One run: about `requests` at `rate` per second. `processes` 0 is as many as the load needs."""

    target: Target
    sources: tuple[Source, ...]
    words: Words
    rate: float
    requests: int
    seed: int = 1
    processes: int = 0
    context_tokens: int = 0

    @property
    def span_s(self) -> float:
        return self.requests / self.rate


class Generator(Struct, frozen=True):
    """How the load generator itself did. Times in ms; `pressed` says why its numbers may be wrong, else empty."""

    processes: int
    cores: int
    sent: int
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    loop_p99_ms: float
    busiest: float
    pressed: str = ""


class Replayed(Struct, frozen=True):
    """What came of a plan, in the order of the plan."""

    records: list[Record]
    generator: Generator


class Sight(Struct):
    """Where a run stands."""

    planned: int
    sent: int = 0
    ended: int = 0


Watcher = Callable[[Sight], None]


async def replay(plan: Plan, watch: Watcher = lambda sight: None) -> Replayed:
    """Run it. Raises ReplayError; its processes end with it, also when it is cancelled."""
    whole = planned(plan.sources, plan.rate, plan.requests, plan.seed, plan.context_tokens)
    if not whole:
        raise ReplayError(
            f"no request falls into {plan.span_s:.3g} s at {plan.rate:g} requests/s with seed {plan.seed}"
        )
    count = plan.processes or fitting(plan.rate, statistics.fmean(one.output_tokens for one in whole))
    sight, sent = Sight(len(whole)), [0] * count
    records: list[Record] = []

    def hearer(index: int) -> Callable[[Told], None]:
        def hear(told: Told) -> None:
            sent[index] = told.sent
            records.extend(told.records)
            sight.sent, sight.ended = sum(sent), len(records)
            watch(sight)

        return hear

    start = Start(count)
    try:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(_process(_part(plan, index, count), start, hearer(index))) for index in range(count)
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    records.sort(key=lambda one: one.number)
    return Replayed(records, generator(records, [task.result() for task in running]))


def fitting(rate: float, output_tokens: float) -> int:
    """Processes for a load, no more than there are cores."""
    wanted = max(rate / REQUESTS_PER_PROCESS, rate * output_tokens / TOKENS_PER_PROCESS)
    return max(1, min(math.ceil(wanted), os.cpu_count() or 1))


def generator(records: list[Record], healths: list[Health]) -> Generator:
    lags = sorted(one.lag_s * 1000 for one in records if one.attempts == 1)
    late, busiest = max(one.late_p99_ms for one in healths), max(one.cpu for one in healths)
    p99 = quantile(lags, 0.99)
    pressed = ""
    if p99 > LATE_MS:
        pressed = f"one request in a hundred was sent {p99:.0f} ms late or later"
    elif late > LATE_MS:
        pressed = f"a load process came {late:.0f} ms late to its answers (99th percentile)"
    elif busiest > BUSY:
        pressed = f"a load process used {busiest:.0%} of a core"
    largest = lags[-1] if lags else 0.0
    return Generator(
        len(healths), os.cpu_count() or 1, len(records), quantile(lags, 0.5), p99, largest, late, busiest, pressed
    )  # fmt: skip


def _part(plan: Plan, index: int, count: int) -> Part:
    return Part(
        target=plan.target,
        sources=plan.sources,
        words=plan.words,
        rate=plan.rate,
        requests=plan.requests,
        seed=plan.seed,
        index=index,
        processes=count,
        context_tokens=plan.context_tokens,
    )


class Start:
    """One begin for all processes, once the last of them is ready."""

    def __init__(self, processes: int) -> None:
        self._missing = processes
        self._begun = asyncio.Event()
        self._begin_s = 0.0

    async def ready(self) -> float:
        """Wait for the others. Returns the begin, on time.perf_counter."""
        self._missing -= 1
        if not self._missing:
            self._begin_s = time.perf_counter() + LEAD_S
            self._begun.set()
        await self._begun.wait()
        return self._begin_s


async def _process(part: Part, start: Start, hear: Callable[[Told], None]) -> Health:
    """One load process from its start to its end. Keys go through its standard input, never its arguments."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.replay_worker",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, limit=LINE_BYTES,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    health: Health | None = None
    try:
        process.stdin.write(msgspec.json.encode(part) + b"\n")
        if await process.stdout.readline() == READY:
            process.stdin.write(b"%f\n" % await start.ready())
            async for line in process.stdout:
                told = _told(line)
                hear(told)
                health = told.health
        said = await process.stderr.read()
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code or health is None:
        raise ReplayError(f"load process {part.index} ended with {code}: {said.decode(errors='replace')[-2_000:]}")
    return health


def unlike(records: list[Record]) -> float:
    """How far prompts were from the planned lengths: the median of the relative error, of those that were counted."""
    errors = [
        abs(one.prompt_tokens - one.asked_prompt_tokens) / max(1, one.asked_prompt_tokens)
        for one in records
        if one.counted and one.prompt_tokens
    ]
    return statistics.median(errors) if errors else 0.0
