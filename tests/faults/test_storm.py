"""Upstreams that fail in every way while clients leave at random: nothing is left, nobody gets a wrong answer."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from policies.breaker import Breaker, BreakerRule
from policies.retry import RetryBudgets, RetryRule
from tests.support.engines import pool
from tests.support.quiet import zero
from tests.support.site import Site, running
from tests.support.upstream import Upstream
from tests.support.upstream_frames import Script
from tests.support.wire import chat_body, events, request, wire

REQUESTS, CLIENTS = 600, 24
MOODS = [
    Script(),
    Script(),
    Script(status=500),
    Script(status=429, headers={"retry-after": "1"}),
    Script(status=503),
    Script(status=400),
    Script(close_at=0),
    Script(close_at=0, reset=False),
    Script(close_at=2),
    Script(close_at=2, reset=False),
    Script(error_at=2),
    Script(content_type="text/html"),
    Script(done=False),
    Script(usage=False),
    Script(until_close=True),
]
ENDS = {"engine_lost", "engine_error", "expired", "no_backend", "invalid_request"}


async def one(site: Site, dice: random.Random, ends: Counter[str]) -> None:
    stream = dice.random() < 0.6
    fields: dict[str, Any] = {"stream": stream, "max_tokens": dice.choice((1, 4, 20))}
    async with wire(site) as line:
        await line.send(request(chat_body(**fields)))
        if dice.random() < 0.3:
            await asyncio.sleep(dice.expovariate(1 / 0.01))
            line.leave()
            ends["left"] += 1
            return
        answer = await line.answer()
    if not stream or answer.status != 200:
        code = "whole" if answer.status == 200 else answer.headers["x-signalbox-reason"]
    else:
        last = events(answer.body)[-1]
        code = "whole" if last == "[DONE]" or last.get("choices") else last["error"]["code"]
    ends[code] += 1


@pytest.mark.slow
async def test_a_storm_of_failures_and_cancels_leaves_nothing() -> None:
    dice, ends = random.Random(7), Counter[str]()
    async with (
        Upstream("demo", itl_s=0.001) as a,
        Upstream("demo", itl_s=0.001) as b,
        running(pool(a.url, b.url, more="limits = { max_running = 6 }")) as site,
    ):
        site.trunk.retries = RetryBudgets(RetryRule(burst=REQUESTS))
        for member in site.trunk.members():
            member.breaker = Breaker(BreakerRule(failures=REQUESTS))
        left = iter(range(REQUESTS))

        async def client() -> None:
            for _ in left:
                a.script, b.script = dice.choice(MOODS), dice.choice(MOODS)
                await one(site, dice, ends)

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client())
        await zero(site)
        a.script = b.script = Script()
        async with site.chat(max_tokens=2) as answer:
            assert answer.status == 200
        assert (a.running, b.running, site.trunk.reaper.failed) == (0, 0, 0)
    assert sum(ends.values()) == REQUESTS
    assert min(ends[end] for end in ("whole", "left", "engine_lost", "engine_error")) > 10, ends
    assert ends.keys() <= ENDS | {"whole", "left"}
