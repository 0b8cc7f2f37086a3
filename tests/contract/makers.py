"""The backends that the contract suite runs over here. Real engines come in through `tests/engines`."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from backends import words
from backends.openai import OpenAI
from backends.simulated import Simulated
from backends.trtllm import TrtLlm
from tests.contract.bench import Bench
from tests.contract.suite import MakeBench
from tests.support import fake_trtllm, virtual
from tests.support.tokenizers import byte_level, save
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


@asynccontextmanager
async def trtllm() -> AsyncIterator[Bench]:
    """TensorRT-LLM in this process, by its stand-in."""
    with tempfile.TemporaryDirectory() as folder:
        save(byte_level(), Path(folder))
        known = await asyncio.to_thread(words.load, folder)
        with fake_trtllm.install(known.encode(fake_trtllm.TEXT, special=False)):
            backend: Any = await TrtLlm(name="trt", model=folder, args={"max_seq_len": 512}).connect("trt-model")
            (llm,) = fake_trtllm.LLM.built

            async def busy() -> int:
                return llm.held

            async def kill() -> None:
                llm.crash()

            async with asyncio.timeout(10):
                while llm.held:  # the token that it was asked for to see that it works
                    await asyncio.sleep(0.005)

            yield Bench(
                backend=backend,
                model="trt-model",
                busy=busy,
                kill=kill,
                can=frozenset({"kill", "stop", "exact", "choices", "checks", "repeats", "busy-gauge"}),
                unsupported={"tools": [{"type": "function", "function": {"name": "f"}}], "logit_bias": {"5": 1}},
                idle_s=1.0,
            )
            await backend.aclose()


MAKERS = [
    Maker("simulated", simulated, virtual.run),
    Maker("simulated in real time", simulated, asyncio.run),
    Maker("openai", remote, asyncio.run),
    Maker("trtllm", trtllm, asyncio.run),
]
