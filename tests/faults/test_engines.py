"""A simulated engine that crashes or hangs: its clients hear of it, and it is replaced by itself."""

import asyncio
from typing import Any

import pytest

from policies.lifecycle import State
from tests.support.quiet import zero
from tests.support.site import Site, running
from tests.support.wire import Wire, chat_body, events, request, wire

PAIR = """
[[pool]]
model = "demo"
[[pool.backend]]
kind = "simulated"
name = "one"
a0_ms = 4.0
watchdog_s = 0.3
limits = { max_running = 2 }
"""
TWO = PAIR + PAIR.partition("[[pool.backend]]")[1] + PAIR.partition("[[pool.backend]]")[2].replace('"one"', '"two"')


def engine(site: Site, nth: int = 0) -> Any:
    return list(site.trunk.members())[nth].backend


async def start(line: Wire) -> None:
    await line.send(request(chat_body(stream=True, max_tokens=8_000, min_tokens=8_000)))
    assert (await line.head()).status == 200


async def last(line: Wire) -> Any:
    async with asyncio.timeout(10):
        return events(b"".join([part async for part in line.parts()]))[-1]


@pytest.mark.parametrize("fault", ["crash", "hang"])
async def test_running_streams_end_with_the_error_and_the_engine_is_replaced(fault: str) -> None:
    async with running(PAIR) as site, wire(site) as line, wire(site) as other:
        await start(line)
        await start(other)
        broken = engine(site)
        getattr(broken, fault)()
        for each in (line, other):
            said = await last(each)
            assert said["error"]["code"] == "engine_lost"
            assert said["usage"]["completion_tokens"] >= 1
        await site.until(lambda: site.trunk.ready and engine(site) is not broken)
        async with site.chat(max_tokens=2) as answer:
            assert answer.status == 200
        await zero(site)


@pytest.mark.parametrize("fault", ["crash", "hang"])
async def test_before_the_first_token_the_other_answers(fault: str) -> None:
    async with running(TWO) as site:
        one, two = engine(site), engine(site, 1)
        one.hang()
        two.hang()
        asking = asyncio.ensure_future(_answer(site))
        await site.until(lambda: [x.state for x in site.live()] == [State.GRANTED])
        member = site.live()[0].member
        assert member is not None
        victim, other = (one, two) if member.position == 0 else (two, one)
        other.resume()
        if fault == "crash":
            victim.crash()
        status, fingerprint = await asking
        assert (status, fingerprint) == (200, f"simulated-{other.name}")
        await zero(site)


async def _answer(site: Site) -> tuple[int, str]:
    async with site.chat(max_tokens=2) as answer:
        return answer.status, (await answer.json())["system_fingerprint"]
