"""Leaving at any moment: the engine has nothing to do 100 ms later, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from backends.protocol import BackendBusy, BackendError, Kind, Refused
from tests.engines.asking import CHAT, LONG, MESSAGES, prompt, read, start

if TYPE_CHECKING:
    from backends.protocol import Stream
    from backends.vllm_engine import InProcess

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

STREAM = {"stream": True}
PREFILL = LONG | STREAM | {"max_tokens": 16, "messages": [{"role": "user", "content": "a " * 1900}]}
TRIES = 3
COUNTER = itertools.count(1)


async def idle(engine: InProcess, seconds: float = 2.0) -> float:
    """Seconds until the engine's own reports say that it has nothing to do."""
    loop = asyncio.get_running_loop()
    since = loop.time()
    async with asyncio.timeout(seconds):
        while True:
            gauge = await engine.gauge()
            if not engine._llm.get_num_unfinished_requests() and not gauge.running and not gauge.waiting:
                return loop.time() - since
            await asyncio.sleep(0.001)


async def until(engine: InProcess, running: int, waiting: int = 0) -> None:
    async with asyncio.timeout(10.0):
        while True:
            gauge = await engine.gauge()
            if (gauge.running, gauge.waiting) == (running, waiting):
                return
            await asyncio.sleep(0.001)


async def chunks(stream: Stream, count: int) -> None:
    for _ in range(count):
        assert await stream.next() is not None


async def waiting_in_the_engine(engine: InProcess) -> list[Stream]:
    streams = [(await start(engine, Kind.CHAT, LONG | STREAM))[1] for _ in range(5)]
    await until(engine, 4, 1)
    return streams[::-1]


async def prefilling(engine: InProcess) -> list[Stream]:
    _, stream = await start(engine, Kind.CHAT, PREFILL)
    await until(engine, 1)
    return [stream]


async def streaming(engine: InProcess) -> list[Stream]:
    _, stream = await start(engine, Kind.CHAT, LONG | STREAM)
    await chunks(stream, 5)
    return [stream]


async def streaming_two_choices(engine: InProcess) -> list[Stream]:
    _, stream = await start(engine, Kind.CHAT, LONG | STREAM | {"n": 2})
    await chunks(stream, 5)
    return [stream]


async def streaming_responses(engine: InProcess) -> list[Stream]:
    body = {"model": "tiny", "input": "Hello", "max_output_tokens": 1500, "ignore_eos": True, "stream": True}
    _, stream = await start(engine, Kind.RESPONSES, body)
    await chunks(stream, 5)
    return [stream]


async def compiling_a_grammar(engine: InProcess) -> list[Stream]:
    new = next(COUNTER)  # one that is known is ready at once
    regex = "(" + "|".join(f"[a-z]{{{i},{i + 40}}}x{i}" for i in range(new, new + 60)) + ")"
    body = CHAT | STREAM | {"structured_outputs": {"regex": regex}}
    return [(await start(engine, Kind.CHAT, body))[1]]


async def not_streamed(engine: InProcess) -> list[Stream]:
    _, stream = await start(engine, Kind.CHAT, LONG)
    await chunks(stream, 1)
    return [stream]


async def two_prompts_not_streamed(engine: InProcess) -> list[Stream]:
    body = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 1500, "ignore_eos": True}
    return [(await start(engine, Kind.COMPLETION, body))[1]]


async def slow_reader(engine: InProcess) -> list[Stream]:
    _, stream = await start(engine, Kind.CHAT, LONG | STREAM)
    await chunks(stream, 1)
    await asyncio.sleep(0.1)  # outputs pile up
    return [stream]


PHASES: list[Callable[[Any], Awaitable[list[Any]]]] = [
    waiting_in_the_engine,
    prefilling,
    streaming,
    streaming_two_choices,
    streaming_responses,
    compiling_a_grammar,
    not_streamed,
    two_prompts_not_streamed,
    slow_reader,
]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
async def test_engine_is_idle_100_ms_after_the_end(phase: Callable[..., Any], plain: InProcess) -> None:
    took = []
    for _ in range(TRIES):
        for stream in await phase(plain):
            await stream.aclose()
            await stream.aclose()
            assert await stream.next() is None
        took.append(await idle(plain))
    assert min(took) < 0.1, took


@pytest.mark.parametrize("body", [LONG | STREAM, LONG, LONG | STREAM | {"n": 2}], ids=["plain", "whole", "events"])
async def test_reader_that_is_cancelled_and_closed(body: dict[str, Any], plain: InProcess) -> None:
    _, stream = await start(plain, Kind.CHAT, body)
    reader = asyncio.ensure_future(read(stream))
    await until(plain, 2 if "n" in body else 1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await stream.aclose()
    assert await idle(plain) < 1.0


@pytest.mark.parametrize("body", [LONG | STREAM, LONG, LONG | STREAM | {"n": 2}], ids=["plain", "whole", "events"])
async def test_close_by_another_task_ends_the_reader(body: dict[str, Any], plain: InProcess) -> None:
    _, stream = await start(plain, Kind.CHAT, body)
    reader = asyncio.ensure_future(read(stream))
    await until(plain, 2 if "n" in body else 1)
    await stream.aclose()
    async with asyncio.timeout(1.0):
        await reader
    await idle(plain)


def memory_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def test_random_cancels_leave_nothing(plain: InProcess) -> None:
    dice = random.Random(20)
    tasks_before = len(asyncio.all_tasks())
    await flood(plain, dice, 200)
    gc.collect()
    before = memory_mib()
    await flood(plain, dice, 1_800)
    await idle(plain)
    async with asyncio.timeout(2.0):
        while len(asyncio.all_tasks()) > tasks_before:
            await asyncio.sleep(0.01)
    gc.collect()
    assert memory_mib() - before < 20
    assert plain._llm.output_processor.request_states == {}
    assert plain._llm.output_processor.parent_requests == {}


async def flood(engine: InProcess, dice: random.Random, count: int) -> None:
    """Requests that are given up after a random while, 16 at a time, in every way a gateway gives up."""
    room = asyncio.Semaphore(16)

    async def one(kind: Kind, body: dict[str, Any], after_s: float, never_open: bool) -> None:
        async with room:
            work = asyncio.ensure_future(run(engine, kind, body, never_open))
            await asyncio.wait([work], timeout=after_s)
            work.cancel()
            await asyncio.wait([work])
            if not work.cancelled():
                work.result()

    bodies: list[tuple[Kind, dict[str, Any]]] = [
        (Kind.CHAT, LONG | STREAM),
        (Kind.CHAT, LONG),
        (Kind.CHAT, CHAT | STREAM),
        (Kind.CHAT, CHAT | {"max_tokens": "many"}),
        (Kind.CHAT, LONG | {"n": 3}),
        (Kind.CHAT, LONG | STREAM | {"n": 2}),
        (Kind.CHAT, PREFILL),
        (Kind.COMPLETION, {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 500, "stream": True}),
        (Kind.RESPONSES, {"model": "tiny", "input": "Hello", "max_output_tokens": 500, "stream": True}),
        (Kind.MESSAGES, {"model": "tiny", "messages": MESSAGES, "max_tokens": 500, "stream": True}),
        (Kind.TOKENIZE, {"model": "tiny", "prompt": "Hello"}),
    ]
    await asyncio.gather(
        *(one(*dice.choice(bodies), dice.expovariate(1 / 0.08), dice.random() < 0.1) for _ in range(count))
    )


async def run(engine: InProcess, kind: Kind, body: dict[str, Any], never_open: bool) -> None:
    """One request as the gateway carries it: what it holds is let go in `finally`, as the reaper would."""
    plan = stream = None
    try:
        plan = await engine.plan(prompt(kind, body))
        if never_open:
            await asyncio.sleep(60)
        stream = await engine.open(plan)
        while await stream.next() is not None:
            pass
    except (Refused, BackendBusy):
        pass
    except BackendError as error:
        raise AssertionError(f"{kind} failed") from error
    finally:
        if plan is not None:
            plan.close()
        if stream is not None:
            await asyncio.shield(asyncio.ensure_future(stream.aclose()))
