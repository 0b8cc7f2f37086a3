"""The client leaves: at every await the engine stops, the lease comes back, and nothing of the request stays."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import Struct

from gateway.exchange import Exchange
from gateway.http import relay
from policies.lifecycle import State
from tests.support.quiet import quiet, zero
from tests.support.site import Site, running
from tests.support.twist import never, twisted
from tests.support.upstream import Upstream
from tests.support.upstream_frames import Script
from tests.support.wire import Wire, chat_body, events, request, wire

GONE_S = 0.1
"""From the client's leaving until the engine runs nothing."""

SERVER = "[server]\nstall_s = 0.4\n"
SIMULATED = """
[[pool]]
model = "demo"
[[pool.backend]]
kind = "simulated"
name = "one"
a0_ms = 5.0
limits = { max_running = 1 }
"""
REMOTE = """
[[pool]]
model = "demo"
[[pool.backend]]
kind = "openai"
name = "one"
url = "%s"
limits = { max_running = 1 }
"""
ENDLESS = {"max_tokens": 8_000, "min_tokens": 8_000}


class Case(Struct):
    """A site whose only backend is of one kind and has one place. `upstream` is what a remote one talks to."""

    site: Site
    upstream: Upstream | None

    async def gone(self) -> None:
        """The engine stops at once; then nothing is left; a remote engine saw an abort and no whole answer."""
        await quiet(self.site, GONE_S)
        await zero(self.site)
        if self.upstream is not None:
            assert self.upstream.running == 0

    def aborted(self, times: int = 1) -> None:
        if self.upstream is not None:
            assert (self.upstream.aborted, self.upstream.completed) == (times, 0)


@pytest.fixture(params=["simulated", "remote"])
async def case(request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    if request.param == "simulated":
        async with running(SERVER + SIMULATED) as site:
            yield Case(site, None)
    else:
        async with Upstream("demo", itl_s=0.005) as upstream, running(SERVER + REMOTE % upstream.url) as site:
            yield Case(site, upstream)


@asynccontextmanager
async def asking(case: Case, *states: State, **fields: Any) -> AsyncIterator[tuple[Wire, Exchange]]:
    """A request of a client of its own that has come as far as one of `states`."""
    before = len(case.site.live())
    async with wire(case.site) as line:
        await line.send(request(chat_body(**{"stream": True, **ENDLESS, **fields})))
        await case.site.until(lambda: [one.state for one in case.site.live()[before:]][:1] in [[s] for s in states])
        yield line, case.site.live()[before]


async def test_while_it_sends_its_body(case: Case) -> None:
    async with wire(case.site) as line:
        await line.send(request(chat_body())[:-5])
        await case.site.until(lambda: len(case.site.live()) == 1)
        (exchange,) = case.site.live()
        line.leave()
        await case.gone()
    assert exchange.state is State.CANCELLED


async def test_while_it_is_planned(case: Case) -> None:
    async with twisted(*case.site.trunk.members(), plan=never), asking(case, State.RECEIVED) as (line, exchange):
        await case.site.until(lambda: exchange.job is not None)
        line.leave()
        await case.site.until(lambda: not case.site.live())
    assert exchange.state is State.CANCELLED
    await case.gone()


async def test_while_it_waits_in_the_queue(case: Case) -> None:
    async with asking(case, State.STREAMING) as (first, _):
        async with asking(case, State.QUEUED) as (line, exchange):
            line.leave()
            await case.site.until(lambda: len(case.site.live()) == 1)
        assert exchange.state is State.CANCELLED
        assert not case.site.trunk.queue.book.waiting
        first.leave()
        await case.gone()
        case.aborted()


@pytest.mark.parametrize("stream", [True, False])
async def test_before_its_first_token(case: Case, stream: bool) -> None:
    if case.upstream is not None:
        case.upstream.script = Script(hold_at=0)
    long = {"messages": [{"role": "user", "content": "word " * 6_000}], "min_tokens": 1, "max_tokens": 100}
    async with asking(case, State.GRANTED, **long, stream=stream) as (line, exchange):
        if case.upstream is not None:
            await case.upstream.until(lambda: case.upstream.running == 1)  # type: ignore[union-attr]
        line.leave()
        await case.gone()
        case.aborted()
    assert exchange.state is State.CANCELLED


@pytest.mark.parametrize("stream", [True, False])
async def test_in_the_middle_of_its_answer(case: Case, stream: bool) -> None:
    async with asking(case, State.STREAMING, State.GRANTED, stream=stream) as (line, exchange):
        if stream:
            await line.head()
            for _ in range(5):
                await line.part()
        elif case.upstream is not None:
            await case.upstream.until(lambda: case.upstream.running == 1)  # type: ignore[union-attr]
        else:
            await case.site.until(lambda: exchange.state is State.STREAMING)
        line.leave()
        await case.gone()
        case.aborted()
    assert exchange.state is State.CANCELLED


async def test_after_the_engine_is_done_and_before_all_is_read(case: Case) -> None:
    async with asking(case, State.STREAMING, State.GRANTED, max_tokens=20, min_tokens=20) as (line, _):
        await line.head()
        await case.site.until(lambda: not case.site.trunk.queue.book.held)
        line.leave()
        await case.gone()


async def test_a_client_that_stops_reading_is_cut_off(case: Case) -> None:
    if case.upstream is not None:
        case.upstream.itl_s, case.upstream.script = 0.0, Script(chunk="x" * 8_000)
        many: dict[str, Any] = {}
    else:
        many = {"n": 64}
    async with asking(case, State.STREAMING, State.GRANTED, **many) as (line, exchange):
        line.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await case.site.until(lambda: not case.site.live())
        await case.gone()
        assert exchange.state is State.CANCELLED
        line.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert not (await line.closed()).endswith(b"0\r\n\r\n")
        case.aborted()
        if case.upstream is not None:
            assert case.upstream.sent_bytes < 30_000_000


async def test_a_client_that_reads_slowly_gets_it_all() -> None:
    async with Upstream("demo") as upstream, running(SERVER + REMOTE % upstream.url) as site:
        upstream.script = Script(chunk="x" * 8_000)
        async with wire(site, receive_bytes=65_536) as line:
            await line.send(request(chat_body(stream=True, max_tokens=1_000)))
            await line.head()
            body = bytearray()
            async for part in line.parts():
                if len(body) // 100_000 != (len(body) + len(part)) // 100_000:
                    await asyncio.sleep(0.01)  # this is the slowness
                body += part
        assert len(body) > 8_000_000
        assert events(bytes(body))[-1] == "[DONE]"
        await zero(site)
        assert (upstream.aborted, upstream.completed) == (0, 1)


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_in_the_same_tick_as_its_grant(case: Case, cancel_first: bool) -> None:
    book: Any = case.site.trunk.queue.book
    real = book._grant
    async with asking(case, State.STREAMING) as (first, _), asking(case, State.QUEUED) as (_, second):
        leaver: Any = case.site.trunk.ticker.members()[1]

        def grant(*given: Any) -> None:
            book._grant = real
            if cancel_first:
                leaver.cut(relay._GONE)
                real(*given)
            else:
                real(*given)
                leaver.cut(relay._GONE)

        async with asking(case, State.QUEUED) as (third, last):
            book._grant = grant
            first.leave()
            await case.site.until(lambda: last.state is State.STREAMING)
            assert second.state is State.CANCELLED
            third.leave()
            await case.gone()
            case.aborted(times=2)
