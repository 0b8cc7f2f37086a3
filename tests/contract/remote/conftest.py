"""The remote backend runs on uvloop in production and on asyncio elsewhere: its tests run on both."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from backends.http1 import Pool, Timing, parse_url
from backends.openai import OpenAI, RemoteEngine
from tests.support.upstream import Upstream

QUICK = Timing(connect_s=2.0, first_byte_s=2.0, idle_s=2.0, keep_s=2.0)


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def pool_to() -> AsyncIterator[Callable[..., Pool]]:
    """Makes pools to a URL; fails when one of them holds a connection that nobody uses and that is not idle."""
    pools: list[Pool] = []

    def make(url: str, timing: Timing = QUICK, **more: object) -> Pool:
        pools.append(Pool(parse_url(url), timing, **more))  # type: ignore[arg-type]
        return pools[-1]

    yield make
    for pool in pools:
        await settled(pool)
        pool.close()
        async with asyncio.timeout(2.0):
            while len(pool):
                await asyncio.sleep(0.001)


async def settled(pool: Pool) -> None:
    """Wait until every connection of a pool is idle."""
    async with asyncio.timeout(2.0):
        while len(pool) != pool.idle:
            await asyncio.sleep(0.001)


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream("m", "other") as site:
        yield site


@pytest.fixture
async def engine(upstream: Upstream) -> AsyncIterator[RemoteEngine]:
    backend = await OpenAI(name="far", url=upstream.url).connect("m")
    yield backend
    await settled(backend.pool)
    await backend.aclose()
