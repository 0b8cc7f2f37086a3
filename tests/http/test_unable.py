"""A field that is no feature of a bundle, and that one of a pool's engines refuses: another takes the request."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.site import Site, running
from tests.support.upstream import Upstream

ASKED = {"length_penalty": 0.5}
"""What the simulated engine refuses; the server, which checks nothing, takes it."""


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream("demo") as server:
        yield server


def pool(upstream: Upstream, simulated_first: bool) -> str:
    simulated = '[[pool.backend]]\nkind = "simulated"\nname = "sim"\na0_ms = 1.0\n'
    remote = f'[[pool.backend]]\nkind = "openai"\nname = "remote"\nurl = "{upstream.url}"\n'
    both = simulated + remote if simulated_first else remote + simulated
    return f'[[pool]]\nmodel = "demo"\n{both}'


async def ready(site: Site) -> None:
    await site.until(lambda: all(member.backend for member in site.trunk.pools["demo"].members))


async def statuses(site: Site, count: int, **fields: Any) -> list[int]:
    async def one() -> int:
        async with site.chat(max_tokens=4, **fields) as answer:
            await answer.read()
            return answer.status

    return await asyncio.gather(*(one() for _ in range(count)))


@pytest.mark.parametrize("simulated_first", [True, False])
async def test_who_can_takes_it(simulated_first: bool, upstream: Upstream) -> None:
    async with running(pool(upstream, simulated_first)) as site:
        await ready(site)
        assert await statuses(site, 24, **ASKED) == [200] * 24
        assert upstream.completed == 24
        assert all(member.breaker.closed for member in site.trunk.pools["demo"].members)
        assert set(await statuses(site, 24)) == {200}
        assert upstream.completed < 48  # what both can do goes to both


async def test_the_refusal_is_told_when_nobody_else_is_left(upstream: Upstream) -> None:
    async with running(pool(upstream, True)) as site:
        await ready(site)
        await upstream.aclose()
        remote = site.trunk.pools["demo"].members[1]
        await site.until(lambda: remote.backend is None)
        async with site.chat(**ASKED) as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
            assert (error["code"], error["param"]) == ("unsupported_feature", "length_penalty")
