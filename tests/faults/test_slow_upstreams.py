"""An upstream that is there and says nothing, or too late."""

import asyncio

from policies.lifecycle import State
from tests.support.quiet import zero
from tests.support.site import running
from tests.support.upstream import Upstream
from tests.support.upstream_frames import Script
from tests.support.wire import chat_body, events, request, wire

ONE = """
[[pool]]
model = "demo"
[[pool.backend]]
kind = "openai"
name = "a"
url = "%s"
first_byte_s = 0.4
idle_s = 0.4
"""
TWO = ONE + '[[pool.backend]]\nkind = "openai"\nname = "b"\nurl = "%s"\n'


async def test_one_that_never_begins_is_left_for_another() -> None:
    async with Upstream("demo") as silent, Upstream("demo") as other, running(TWO % (silent.url, other.url)) as site:
        silent.script = Script(hold_at=0)
        answers = await asyncio.gather(*(said(site.chat(max_tokens=2)) for _ in range(6)))
        assert answers == [(200, "")] * 6
        await site.until(lambda: silent.aborted >= 1)
        silent.release()
        await zero(site)


async def test_alone_it_is_an_error_in_time() -> None:
    async with Upstream("demo") as silent, running(ONE % silent.url) as site:
        silent.script = Script(hold_at=0)
        assert await said(site.chat(max_tokens=2)) == (503, "no_backend")
        await zero(site)


async def test_one_that_falls_silent_ends_the_stream_with_the_error_and_the_usage() -> None:
    async with Upstream("demo") as silent, running(ONE % silent.url) as site:
        silent.script = Script(hold_at=3)
        async with wire(site) as line:
            await line.send(request(chat_body(stream=True, max_tokens=9)))
            assert (await line.head()).status == 200
            (exchange,) = site.live()
            *_, last = events(b"".join([part async for part in line.parts()]))
        assert (last["error"]["code"], last["usage"]["completion_tokens"]) == ("engine_lost", 3)
        assert exchange.state is State.FAILED
        await site.until(lambda: silent.aborted == 1)
        await zero(site)


async def test_a_deadline_ends_a_stream_that_is_too_slow() -> None:
    async with Upstream("demo", itl_s=0.05) as slow, running(ONE % slow.url) as site:
        async with wire(site) as line:
            await line.send(request(chat_body(stream=True, max_tokens=1_000), "x-deadline-ms: 1500"))
            assert (await line.head()).status == 200
            *_, last = events(b"".join([part async for part in line.parts()]))
        assert last["error"]["code"] == "expired"
        assert last["usage"]["completion_tokens"] > 0
        await site.until(lambda: slow.aborted == 1)
        await zero(site)


async def said(asked: object) -> tuple[int, str]:
    async with asked as answer:  # type: ignore[attr-defined]
        body = await answer.json()
        return answer.status, body["error"]["code"] if "error" in body else ""
