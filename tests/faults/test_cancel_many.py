"""Two thousand clients that leave at any moment leave nothing behind."""

import asyncio
import gc
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import gateway.exchange
from gateway.exchange import Exchange
from policies.lifecycle import Event, State, step
from tests.support.quiet import zero
from tests.support.site import Site, running
from tests.support.upstream import Upstream
from tests.support.wire import chat_body, request, wire

CANCELS, AT_ONCE, WARM_UP, CLIENTS = 2_000, 600, 400, 48

LIVING = (State.RECEIVED, State.QUEUED, State.GRANTED, State.STREAMING)
MOST_GROWTH_BYTES = 20 * 1024 * 1024

POOLS = """
[[pool]]
model = "demo"
[[pool.backend]]
kind = "simulated"
name = "sim"
a0_ms = 2.0
limits = { max_running = 12 }

[[pool]]
model = "remote"
[[pool.backend]]
kind = "openai"
name = "up"
url = "%s"
model = "demo"
limits = { max_running = 12 }
"""


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


def any_request(dice: random.Random) -> bytes:
    """A request of any kind to either backend, with an answer of some length or none."""
    fields: dict[str, Any] = {"model": dice.choice(("demo", "remote")), "stream": dice.random() < 0.7}
    fields["max_tokens"] = fields["min_tokens"] = dice.choice((1, 5, 50, 2_000))
    if fields["stream"] and dice.random() < 0.5:
        fields["stream_options"] = {"include_usage": True}
    lines = [f"x-priority-class: {dice.choice(('interactive', 'standard', 'batch'))}"]
    if dice.random() < 0.1:
        lines.append(f"x-deadline-ms: {dice.randint(1, 80)}")
    if dice.random() < 0.05:
        fields["service_tier"] = "none such"
    body = chat_body("word " * dice.choice((1, 20, 2_000)), **fields)
    return request(body, *lines)


async def one(site: Site, dice: random.Random) -> None:
    """A client that sends a request, perhaps not all of it, reads for a while or not at all, and is gone."""
    data = any_request(dice)
    async with wire(site) as line:
        await line.send(data if dice.random() < 0.9 else data[: dice.randrange(len(data))])
        reading = dice.random() < 0.5
        try:
            async with asyncio.timeout(dice.expovariate(1 / 0.03)):
                if reading:
                    await line.reader.read()
                else:
                    await asyncio.get_running_loop().create_future()
        except TimeoutError:
            pass
        if dice.random() < 0.5:
            line.leave()
        else:
            line.writer.close()


async def many(site: Site, cancels: int, dice: random.Random) -> None:
    left = iter(range(cancels))

    async def client() -> None:
        for _ in left:
            await one(site, dice)

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())


def enough(taken: Counter[tuple[State, Event]], upstream: Upstream) -> bool:
    """Whether clients left often, in every state, and from the upstream too."""
    left = [taken[state, Event.LEAVE] for state in LIVING]
    return sum(left) >= CANCELS and min(left) > 20 and upstream.aborted > 100


@pytest.mark.slow
@pytest.mark.timeout(150)
async def test_two_thousand_random_cancels_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(20_261)
    taken: Counter[tuple[State, Event]] = Counter()

    def watched(state: State, event: Event) -> State:
        taken[state, event] += 1
        return step(state, event)

    monkeypatch.setattr(gateway.exchange, "step", watched)
    async with Upstream("demo", itl_s=0.002) as upstream, running(POOLS % upstream.url) as site:
        await many(site, WARM_UP, dice)
        await zero(site, 10)
        upstream.seen.clear()
        taken.clear()
        gc.collect()
        tasks, before = len(asyncio.all_tasks()), resident_bytes()
        while not enough(taken, upstream):  # some answers are faster than patience; a busy machine starts few
            await many(site, AT_ONCE, dice)
        await zero(site, 10)
        await site.until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert (upstream.running, site.trunk.reaper.failed) == (0, 0)
        assert site.trunk.queue.session.rejoins == 0
        upstream.seen.clear()
        site.trunk.watchers.flush()  # the last ones to end are kept until these have heard of them
        gc.collect()
        assert not [one for one in gc.get_objects() if isinstance(one, Exchange)]
        assert resident_bytes() - before < MOST_GROWTH_BYTES
        async with site.chat(max_tokens=2) as answer:
            assert answer.status == 200
