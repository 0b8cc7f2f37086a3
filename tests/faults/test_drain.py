"""Shutting down: new work is refused, what runs may finish for a while, then it is cut."""

import asyncio
from contextlib import AsyncExitStack

from policies.lifecycle import State
from tests.support.quiet import held, zero
from tests.support.site import Site, running
from tests.support.wire import Wire, chat_body, events, request, wire

ONE = """
[server]
drain_s = {drain_s}
[[pool]]
model = "demo"
[[pool.backend]]
kind = "simulated"
name = "one"
a0_ms = 5.0
limits = {{ max_running = 1 }}
"""


async def start_stream(line: Wire, tokens: int) -> None:
    await line.send(request(chat_body(stream=True, max_tokens=tokens, min_tokens=tokens)))
    assert (await line.head()).status == 200


async def refused(site: Site) -> str:
    async with site.chat() as answer:
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        body = await answer.json()
        return str(body["error"]["code"])


async def test_new_work_is_refused_while_a_running_stream_finishes() -> None:
    async with running(ONE.format(drain_s=20)) as site, wire(site) as line:
        await start_stream(line, tokens=60)
        draining = asyncio.ensure_future(site.trunk.drain(20))
        await site.until(lambda: site.trunk.draining)
        assert await refused(site) == "draining"
        async with site.client.get(f"{site.url}/readyz") as answer:
            assert answer.status == 503
        said = events(b"".join([part async for part in line.parts()]))
        assert said[-1] == "[DONE]"
        await draining
        await zero(site)


async def test_who_still_runs_or_waits_at_the_limit_is_cut_with_the_reason() -> None:
    async with running(ONE.format(drain_s=20)) as site, wire(site) as first, wire(site) as second:
        await start_stream(first, tokens=5_000)
        await second.send(request(chat_body(stream=True)))
        await site.until(lambda: [one.state for one in site.live()] == [State.STREAMING, State.QUEUED])
        await site.trunk.drain(0.1)
        said = events(b"".join([part async for part in first.parts()]))
        assert said[-1]["error"]["code"] == "draining"
        assert said[-1]["usage"]["completion_tokens"] > 0
        answer = await second.answer()
        assert (answer.status, answer.code) == (503, "draining")
        await zero(site)


async def test_a_server_that_is_told_to_end_lets_streams_finish_and_closes_idle_connections() -> None:
    async with AsyncExitStack() as later:
        async with running(ONE.format(drain_s=20)) as site:
            line, idle = [await later.enter_async_context(wire(site)) for _ in range(2)]
            await start_stream(line, tokens=40)
        assert events(b"".join([part async for part in line.parts()]))[-1] == "[DONE]"
        assert await idle.closed() == b""
        assert not held(site)


async def test_a_server_that_is_told_to_end_waits_no_longer_than_its_limit() -> None:
    async with AsyncExitStack() as later:
        async with running(ONE.format(drain_s=0.05)) as site:
            line = await later.enter_async_context(wire(site))
            await start_stream(line, tokens=5_000)
        assert events(b"".join([part async for part in line.parts()]))[-1]["error"]["code"] == "draining"
        assert not held(site)
