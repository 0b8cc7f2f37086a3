"""A client that leaves at any moment: the engine is free soon after, in every dialect."""

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.triton.asking import prompt
from tests.engines.triton.asking import DIALECTS, MODELS, Watch, connected, scripted, until, watching
from tests.engines.triton.server import TritonServer

IDLE_S = 0.15
TRIES = 9
LONG = 1_500

Phase = Callable[[Any, Watch], Awaitable[Any]]


async def at_once(backend: Any, watch: Watch) -> Any:
    return await opened(backend)


async def on_the_way(backend: Any, watch: Watch) -> Any:
    stream = await opened(backend)
    await asyncio.sleep(0.003)
    return stream


async def in_prefill(backend: Any, watch: Watch) -> Any:
    stream = await opened(backend, scripted(prefill_ms=100))
    await until(lambda: holds(watch), 5.0)
    return stream


async def after_the_first_token(backend: Any, watch: Watch) -> Any:
    stream = await opened(backend)
    assert await stream.next() is not None
    return stream


async def in_the_middle(backend: Any, watch: Watch) -> Any:
    stream = await opened(backend)
    for _ in range(20):
        assert await stream.next() is not None
    return stream


async def while_it_stalls(backend: Any, watch: Watch) -> Any:
    stream = await opened(backend, scripted(stall_after=2))
    for _ in range(2):
        assert await stream.next() is not None
    return stream


async def unstreamed(backend: Any, watch: Watch) -> Any:
    stream = await opened(backend, stream=False)
    assert await stream.next() is not None
    return stream


async def opened(backend: Any, text: str = "Tell me all.", *, stream: bool = True) -> Any:
    asked = prompt(text, stream=stream, max_tokens=LONG)
    return await backend.open(await backend.plan(asked))


async def holds(watch: Watch) -> bool:
    return await watch.active() > 0


PHASES = [at_once, on_the_way, in_prefill, after_the_first_token, in_the_middle, while_it_stalls, unstreamed]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
async def test_the_engine_is_idle(phase: Phase, dialect: str, triton: TritonServer, tokenizer: Path) -> None:
    async with connected(triton, tokenizer, dialect) as backend, watching(triton, MODELS[dialect]) as watch:
        took_s = []
        for _ in range(TRIES):
            stream = await phase(backend, watch)
            await stream.aclose()
            took_s.append(await watch.idle())
            assert await stream.next() is None
        # The half that a busy machine does not slow down; none of them may run to its end, which takes 7 s.
        assert statistics.median(took_s) < IDLE_S, took_s


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_in_the_engines_queue(dialect: str, triton: TritonServer, tokenizer: Path) -> None:
    async with connected(triton, tokenizer, dialect) as backend, watching(triton, MODELS[dialect]) as watch:
        running = [await opened(backend) for _ in range(16)]
        for stream in running:
            assert await stream.next() is not None
        waiting = [await opened(backend) for _ in range(8)]
        await until(lambda: _has(watch, 24), 5.0)
        await asyncio.gather(*(stream.aclose() for stream in waiting))
        await until(lambda: _has(watch, 16), 5.0)
        assert await running[0].next() is not None
        await asyncio.gather(*(stream.aclose() for stream in running))
        await watch.idle()


async def _has(watch: Watch, count: int) -> bool:
    return await watch.active() == count


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_lost_reader_is_as_good_as_a_close(dialect: str, triton: TritonServer, tokenizer: Path) -> None:
    """Its task is cancelled while it waits, as at a shutdown, and the stream closed after that."""
    async with connected(triton, tokenizer, dialect) as backend, watching(triton, MODELS[dialect]) as watch:
        stream = await while_it_stalls(backend, watch)
        reader = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await stream.aclose()
        await watch.idle()


async def test_closing_the_backend_stops_its_requests(triton: TritonServer, tokenizer: Path) -> None:
    async with watching(triton, "ensemble") as watch:
        async with connected(triton, tokenizer, "inflight-ensemble") as backend:
            streams = [await opened(backend) for _ in range(4)]
            for stream in streams:
                assert await stream.next() is not None
        await watch.idle()
        await asyncio.gather(*(stream.aclose() for stream in streams))


async def test_500_random_leavers(triton: TritonServer, tokenizer: Path) -> None:
    dice = random.Random(4)
    room = asyncio.Semaphore(32)

    async def leave(backend: Any, number: int) -> None:
        async with room:
            text = scripted(say="of " * dice.randrange(1, 60), prefill_ms=dice.choice([0, 0, 5]))
            asked = prompt(f"{number} {text}", stream=dice.random() < 0.7, max_tokens=60)
            stream = await backend.open(await backend.plan(asked))
            reader = asyncio.ensure_future(_read(stream, dice.randrange(12)))
            await asyncio.wait([reader], timeout=dice.random() * dice.choice([0.01, 0.1, 0.3]))
            if dice.random() < 0.5:
                await stream.aclose()
            reader.cancel()
            await asyncio.wait([reader])
            if not reader.cancelled():
                assert reader.exception() is None
            await stream.aclose()

    async with (
        connected(triton, tokenizer, "inflight-tokens") as tokens,
        connected(triton, tokenizer, "inflight-ensemble") as ensemble,
        connected(triton, tokenizer, "llmapi") as llmapi,
        watching(triton, "tensorrt_llm") as inflight_watch,
        watching(triton, "llmapi") as llmapi_watch,
    ):
        backends = [tokens, ensemble, llmapi]
        await asyncio.gather(*(leave(backends[number % 3], number) for number in range(500)))
        await inflight_watch.idle()
        await llmapi_watch.idle()
        for backend in backends:
            assert "0 running" in repr(backend)
            gauge = await backend.gauge()
            assert not (gauge.running or gauge.waiting or gauge.kv_used)


async def _read(stream: Any, chunks: int) -> None:
    for _ in range(chunks):
        if await stream.next() is None:
            return
