"""The remote backend keeps the contract of every backend, over a scripted upstream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop

from backends.openai import OpenAI
from tests.contract.bench import Bench
from tests.contract.suite import CASES, Case, play
from tests.support.upstream import Upstream


@asynccontextmanager
async def remote() -> AsyncIterator[Bench]:
    async with Upstream("m", ttft_s=0.005, itl_s=0.002) as upstream:
        backend = await OpenAI(name="remote", url=upstream.url).connect("m")

        async def busy() -> int:
            return upstream.running

        yield Bench(
            backend=backend,
            model="m",
            busy=busy,
            kill=upstream.aclose,
            can=frozenset({"kill", "choices", "repeats", "busy-gauge"}),
        )
        await backend.aclose()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("one", CASES, ids=lambda one: one.__name__)
def test_contract(one: Case, loop: type[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(play(remote, one))
