"""The backends that the contract suite runs over here. Real engines come in through `tests/engines`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from backends.openai import OpenAI
from backends.simulated import Simulated
from tests.contract.bench import Bench
from tests.contract.suite import MakeBench
from tests.support import virtual
from tests.support.upstream import Upstream


class Maker(NamedTuple):
    """A way to a bench, and the loop it runs on."""

    name: str
    make: MakeBench
    run: Callable[[Coroutine[Any, Any, None]], None]


@asynccontextmanager
async def simulated() -> AsyncIterator[Bench]:
    backend = await Simulated(name="sim", a0_ms=5.0, context_tokens=2_048, max_running=8).connect("sim-model")

    async def busy() -> int:
        gauge = await backend.gauge()
        return (gauge.running or 0) + (gauge.waiting or 0)

    async def kill() -> None:
        backend.crash()

    yield Bench(
        backend=backend,
        model="sim-model",
        busy=busy,
        kill=kill,
        can=frozenset({"kill", "stop", "exact", "choices", "checks", "repeats", "busy-gauge"}),
        unsupported={"tools": [{"type": "function"}], "logprobs": True, "response_format": {"type": "json_object"}},
    )
    await backend.aclose()


@asynccontextmanager
async def remote() -> AsyncIterator[Bench]:
    """A server over HTTP. Its text is the same for every prompt, and it checks nothing."""
    async with Upstream("mock", ttft_s=0.01, itl_s=0.002) as upstream:
        backend = await OpenAI(name="remote", url=upstream.url).connect("mock")

        async def busy() -> int:
            return upstream.running

        yield Bench(
            backend=backend,
            model="mock",
            busy=busy,
            kill=upstream.aclose,
            can=frozenset({"kill", "choices", "repeats", "busy-gauge"}),
        )
        await backend.aclose()


MAKERS = [
    Maker("simulated", simulated, virtual.run),
    Maker("simulated in real time", simulated, asyncio.run),
    Maker("openai", remote, asyncio.run),
]
