"""Ten thousand bodies that no client means to send: each gets its answer, none a 5xx, and nothing gets stuck."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from tests.http.mutator import mutated
from tests.support.quiet import zero
from tests.support.site import Site, running
from tests.support.upstream import Seen, Upstream
from tests.support.upstream_frames import Script
from tests.support.wire import request, wire

SIMULATED, REMOTE, CLIENTS = 8_000, 2_000, 16

POOLS = """
[[pool]]
model = "demo"
[[pool.backend]]
kind = "simulated"
name = "sim"
a0_ms = 0.02
context_tokens = 256
output_mean_tokens = 4

[[pool]]
model = "remote"
[[pool.backend]]
kind = "openai"
name = "up"
model = "demo"
url = "%s"
"""


async def ask(site: Site, bodies: int, model: str, dice: random.Random) -> Counter[int]:
    """Sends mutated bodies over kept connections, and counts the statuses. Every answer comes whole."""
    statuses: Counter[int] = Counter()
    left = iter(range(bodies))

    async def client() -> None:
        async with wire(site) as line:
            for _ in left:
                path, body = mutated(dice, model)
                await line.send(request(body, path=path))
                answer = await line.answer()
                assert answer.status < 500, (path, body, answer)
                statuses[answer.status] += 1
                if answer.status != 200:
                    error = answer.json()["error"]
                    assert error["message"], (path, body)

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())
    return statuses


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_ten_thousand_mutated_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: Seen) -> Any:
        return {}  # the remote refuses unread

    monkeypatch.setattr(Seen, "json", nothing)
    async with Upstream("demo") as upstream, running(POOLS % upstream.url) as site:
        upstream.script = Script(status=400)
        dice = random.Random(10_000)
        statuses = await ask(site, SIMULATED, "demo", dice)
        assert sum(statuses.values()) == SIMULATED
        assert statuses[200] > SIMULATED / 20
        assert statuses[400] > SIMULATED / 2
        statuses = await ask(site, REMOTE, "remote", dice)
        assert sum(statuses.values()) == REMOTE
        assert len(upstream.generations) > REMOTE / 10
        for seen in upstream.generations:
            assert seen.body.rstrip().endswith(b"}")
        await zero(site)
        assert all(member.breaker.circuit(0.0) == "closed" for member in site.trunk.members())
        async with site.chat(max_tokens=2) as answer:
            assert answer.status == 200
