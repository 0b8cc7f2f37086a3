"""SIGKILL of the engine process under load: everybody hears of it within a second, and a new engine serves."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from backends.protocol import BackendLost, Kind
from tests.engines.asking import CHAT, LONG, MESSAGES, read, start

if TYPE_CHECKING:
    from backends.protocol import Stream
    from backends.vllm_engine import InProcess

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

RUNNING: list[tuple[Kind, dict[str, Any]]] = [
    (Kind.CHAT, LONG | {"stream": True}),
    (Kind.CHAT, LONG),
    (Kind.COMPLETION, {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 1500, "ignore_eos": True}),
    (Kind.COMPLETION, {"model": "tiny", "prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}),
    (
        Kind.RESPONSES,
        {"model": "tiny", "input": "Hello", "max_output_tokens": 1500, "ignore_eos": True, "stream": True},
    ),
    (Kind.MESSAGES, {"model": "tiny", "messages": MESSAGES, "max_tokens": 1500, "ignore_eos": True, "stream": True}),
]


async def lost_at(stream: Stream) -> float:
    """The loop's time at which the stream raised BackendLost. Fails if it ends otherwise."""
    with pytest.raises(BackendLost):
        while await stream.next() is not None:
            pass
    at = asyncio.get_running_loop().time()
    await stream.aclose()
    return at


async def test_every_stream_hears_of_a_killed_engine(engine: InProcess) -> None:
    waiting = await engine.plan((await start(engine, Kind.CHAT, CHAT))[0].prompt)
    streams = [(await start(engine, kind, body))[1] for kind, body in RUNNING]
    for stream in streams:
        assert await stream.next() is not None
    readers = [asyncio.ensure_future(lost_at(stream)) for stream in streams]
    killed_at = asyncio.get_running_loop().time()
    os.kill(engine.process_ids[0], signal.SIGKILL)
    for at in await asyncio.gather(*readers):
        assert at - killed_at < 1.0
    with pytest.raises(BackendLost):
        await engine.gauge()
    with pytest.raises(BackendLost):
        await engine.plan(waiting.prompt)
    with pytest.raises(BackendLost):
        await engine.open(waiting)


async def test_a_lost_engine_closes_at_once_and_twice(engine: InProcess) -> None:
    async with asyncio.timeout(2.0):
        await engine.aclose()
    await engine.aclose()
    with pytest.raises(BackendLost):
        await engine.gauge()


async def test_a_new_engine_serves_in_the_same_process(plain: InProcess) -> None:
    chunks = await read((await start(plain, Kind.CHAT, CHAT))[1])
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 24
