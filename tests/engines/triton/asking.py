"""Ways to the real server: a backend per dialect, scripted prompts, and what its engines say they hold."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from backends.triton import Triton
from backends.triton_engine import TritonEngine
from tests.engines.triton.server import TritonServer

CONTEXT_TOKENS = 2_048
MODELS = {
    "inflight-tokens": "tensorrt_llm",
    "inflight-ensemble": "ensemble",
    "llmapi": "llmapi",
}
DIALECTS = tuple(MODELS)
INFLIGHT = ("tensorrt_llm", "preprocessing", "postprocessing", "ensemble")


def engine_of(model: str) -> str:
    """The model that generates."""
    return "tensorrt_llm" if model == "ensemble" else model


def config(server: TritonServer, tokenizer: Path, dialect: str, **more: Any) -> Triton:
    """A backend without canaries, which would count as requests, unless `more` says so."""
    given: dict[str, Any] = {
        "name": "triton",
        "url": f"grpc://127.0.0.1:{server.grpc}",
        "metrics_url": f"http://127.0.0.1:{server.metrics}/metrics",
        "tokenizer": str(tokenizer),
        "dialect": dialect,
        "model": MODELS[dialect],
        "canary_s": 0.0,
    }
    return Triton(**(given | more))


@asynccontextmanager
async def connected(server: TritonServer, tokenizer: Path, dialect: str, **more: Any) -> AsyncIterator[TritonEngine]:
    backend: Any = await config(server, tokenizer, dialect, **more).connect("demo")
    try:
        yield backend
    finally:
        await backend.aclose()


def scripted(**script: Any) -> str:
    """A prompt that tells the stand-in what to do: say, fail_after, stall_after, crash_after, prefill_ms."""
    return f"@{json.dumps(script, ensure_ascii=False)}@"


class Watch:
    """Asks the stand-ins what they hold, beside the backend under test."""

    def __init__(self, server: TritonServer, session: aiohttp.ClientSession, model: str) -> None:
        self._server, self._session, self._model = server, session, engine_of(model)

    async def active(self) -> int:
        return int(await self._sample("standin_active"))

    async def ended(self, reason: str) -> int:
        return int(await self._sample("standin_ended", f'reason="{reason}"'))

    async def idle(self, within_s: float = 5.0) -> float:
        """Waits until it holds nothing; the seconds that took."""
        return await until(self._is_idle, within_s)

    async def _is_idle(self) -> bool:
        return await self.active() == 0

    async def _sample(self, name: str, label: str = "") -> float:
        samples = await self._server.samples(name, self._session)
        return sum(value for labels, value in samples.items() if f'model="{self._model}"' in labels and label in labels)


async def until(holds: Callable[[], Awaitable[bool]], within_s: float) -> float:
    """The seconds until it held. Fails after `within_s`."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not await holds():
        assert loop.time() - start < within_s, f"not within {within_s} s"
        await asyncio.sleep(0.002)
    return loop.time() - start


@asynccontextmanager
async def watching(server: TritonServer, model: str) -> AsyncIterator[Watch]:
    async with aiohttp.ClientSession() as session:
        yield Watch(server, session, model)
