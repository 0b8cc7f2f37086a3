"""The shared queue's store goes away under a serving gateway, and comes back."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.queue import turns
from policies.lifecycle import State
from tests.support.quiet import zero
from tests.support.site import Site, running
from tests.support.store import StoreServer, own_server, shared_server
from tests.support.wire import Wire, chat_body, events, request, wire

__all__ = ["own_server", "shared_server"]

ONE = """
[[pool]]
model = "demo"
[[pool.backend]]
kind = "simulated"
name = "one"
a0_ms = 20.0
limits = { max_running = 1 }
"""


@asynccontextmanager
async def streaming(site: Site, tokens: int) -> AsyncIterator[Wire]:
    async with wire(site) as line:
        await line.send(request(chat_body(stream=True, max_tokens=tokens, min_tokens=tokens)))
        assert (await line.head()).status == 200
        yield line


def store(site: Site) -> int:
    """The process of the embedded store."""
    embedded = site.trunk.queue._embedded
    assert embedded is not None
    assert embedded.pid is not None
    return embedded.pid


async def status(site: Site, max_tokens: int = 2) -> tuple[int, str]:
    async with site.chat(max_tokens=max_tokens) as answer:
        body = await answer.json()
        if answer.status == 503:
            assert int(answer.headers["retry-after"]) >= 1
        return answer.status, body["error"]["code"] if "error" in body else ""


async def test_a_store_that_is_killed_starts_again_and_nobody_notices() -> None:
    async with running(ONE) as site, streaming(site, tokens=60) as line:
        waiting = [asyncio.ensure_future(status(site, max_tokens=2)) for _ in range(3)]
        await site.until(lambda: [one.state for one in site.live()][1:] == [State.QUEUED] * 3)
        before = store(site)
        os.kill(before, signal.SIGKILL)
        said = events(b"".join([part async for part in line.parts()]))
        assert said[-1] == "[DONE]"
        assert await asyncio.gather(*waiting) == [(200, "")] * 3
        assert store(site) != before
        assert site.trunk.queue.session.rejoins >= 1
        await zero(site)


async def test_while_the_store_is_away_new_work_is_refused_and_streams_go_on() -> None:
    async with running(ONE) as site, streaming(site, tokens=250) as line:
        waiting = asyncio.ensure_future(status(site, max_tokens=2))
        await site.until(lambda: [one.state for one in site.live()][1:] == [State.QUEUED])
        pid = store(site)
        os.kill(pid, signal.SIGSTOP)
        try:
            assert await waiting == (503, "store_lost")
            assert site.trunk.queue.lost
            assert await status(site) == (503, "store_lost")
            async with site.client.get(f"{site.url}/readyz") as answer:
                assert (answer.status, (await answer.json())["store"]) == (503, "lost")
            assert [one.state for one in site.live()] == [State.STREAMING]
            assert events(await line.part())[0]["choices"]
        finally:
            os.kill(pid, signal.SIGCONT)
        await site.until(lambda: not site.trunk.queue.lost)
        said = events(b"".join([part async for part in line.parts()]))
        assert said[-1] == "[DONE]"
        assert await status(site, max_tokens=2) == (200, "")
        await zero(site)


@pytest.mark.parametrize("shared_server", ["valkey"], indirect=True)
async def test_without_its_store_a_gateway_goes_on_locally(
    own_server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.5)
    config = f'[store]\nurl = "{own_server.url}"\non_loss = "local"\n{ONE}'
    async with running(config) as site:
        async with streaming(site, tokens=200) as line:
            waiting = asyncio.ensure_future(status(site, max_tokens=2))
            await site.until(lambda: [one.state for one in site.live()][1:] == [State.QUEUED])
            await asyncio.to_thread(own_server.kill)
            await site.until(lambda: site.trunk.queue.state == "local")
            async with site.client.get(f"{site.url}/readyz") as answer:
                assert (answer.status, (await answer.json())["store"]) == (200, "local")
            assert events(b"".join([part async for part in line.parts()]))[-1] == "[DONE]"
            assert await waiting == (200, "")
            assert await status(site) == (200, "")
        await asyncio.to_thread(own_server.start)
        await site.until(lambda: site.trunk.queue.state == "up")
        assert await status(site) == (200, "")
        await zero(site)


async def test_a_request_may_leave_while_the_store_is_away() -> None:
    async with running(ONE) as site:
        async with streaming(site, tokens=2_000) as line, wire(site) as other:
            await other.send(request(chat_body()))
            await site.until(lambda: [one.state for one in site.live()] == [State.STREAMING, State.QUEUED])
            pid = store(site)
            os.kill(pid, signal.SIGSTOP)
            try:
                line.leave()
                other.leave()
                await site.until(lambda: not site.live())
                assert not site.trunk.queue.book.held
            finally:
                os.kill(pid, signal.SIGCONT)
        await zero(site)
        assert await status(site, max_tokens=2) == (200, "")
