"""Upstream servers that are killed, busy or broken, seen from the client."""

import asyncio
from typing import Any

from gateway.exchange import Exchange
from policies.breaker import Circuit
from policies.lifecycle import State
from tests.support.engines import Engine, engine, pool
from tests.support.quiet import zero
from tests.support.site import Site, running
from tests.support.upstream import Upstream
from tests.support.upstream_frames import Script
from tests.support.wire import chat_body, events, request, wire


def text_of(body: Any) -> str:
    return str(body["choices"][0]["message"]["content"])


async def ask(site: Site, **fields: Any) -> tuple[int, Any, Any]:
    """Status, body and headers of a chat request."""
    async with site.chat(**fields) as answer:
        return answer.status, await answer.json(), answer.headers


def on(exchange: Exchange, *engines: Engine) -> Engine:
    """The engine that an exchange runs on."""
    assert exchange.member is not None
    return {one.name: one for one in engines}[exchange.member.config.name]


async def test_killed_in_mid_stream_the_client_gets_the_error_with_the_usage_so_far() -> None:
    async with engine("a") as a, engine("b") as b, running(pool(a.url, b.url)) as site:
        async with wire(site) as line:
            await line.send(request(chat_body(stream=True, max_tokens=5_000)))
            assert (await line.head()).status == 200
            said = [await line.part() for _ in range(8)]
            (exchange,) = site.live()
            victim = on(exchange, a, b)
            await victim.kill()
            said += [part async for part in line.parts()]
        *frames, last = events(b"".join(said))
        assert last["error"]["code"] == "engine_lost"
        told = sum(bool(frame["choices"][0]["delta"]["content"]) for frame in frames)
        assert last["usage"]["completion_tokens"] == told >= 7
        assert last["usage"]["total_tokens"] == told + last["usage"]["prompt_tokens"]
        assert exchange.state is State.FAILED
        other = b if victim is a else a
        for _ in range(6):
            status, body, _ = await ask(site, max_tokens=2)
            assert (status, text_of(body)) == (200, other.name * 2)
        await zero(site)


async def test_killed_before_the_first_token_the_answer_comes_from_the_other() -> None:
    async with engine("a") as a, engine("b") as b, running(pool(a.url, b.url)) as site:
        await a.tell(Script(hold_at=0))
        await b.tell(Script(hold_at=0))
        asking = asyncio.ensure_future(ask(site, max_tokens=3))
        await site.until(lambda: [one.state for one in site.live()] == [State.GRANTED])
        victim = on(site.live()[0], a, b)
        other = b if victim is a else a
        await victim.until_running(1)
        await other.tell(Script())
        await victim.kill()
        status, body, _ = await asking
        assert (status, text_of(body)) == (200, other.name * 3)
        await zero(site)


async def test_killed_with_twenty_prompts_in_it_all_are_answered_by_the_other() -> None:
    async with engine("a") as a, engine("b") as b, running(pool(a.url, b.url)) as site:
        await a.tell(Script(hold_at=0))
        waiting = [asyncio.ensure_future(ask(site, max_tokens=2)) for _ in range(40)]
        await site.until(lambda: len(site.live()) == 20 and {x.state for x in site.live()} == {State.GRANTED})
        await a.until_running(20)
        await a.kill()
        answers = await asyncio.gather(*waiting)
        assert [(status, text_of(body)) for status, body, _ in answers] == [(200, "bb")] * 40
        await zero(site)


async def test_all_down_is_503_until_one_is_back_by_itself() -> None:
    async with engine("a") as a, running(pool(a.url)) as site:
        assert (await ask(site, max_tokens=1))[0] == 200
        await a.kill()
        for _ in range(2):
            status, body, headers = await ask(site, max_tokens=1)
            assert (status, body["error"]["code"]) == (503, "no_backend")
            assert int(headers["retry-after"]) >= 1
            assert headers["x-should-retry"] == "true"
        await site.until(lambda: not site.trunk.ready)
        async with engine("a", port=a.port):
            await site.until(lambda: site.trunk.ready)
            assert (await ask(site, max_tokens=1))[0] == 200
        await zero(site)


async def test_who_waits_for_a_backend_that_goes_down_gets_another_without_a_retry() -> None:
    one_each = "limits = { max_running = 1 }"
    async with engine("a") as a, engine("b") as b, running(pool(a.url, b.url, more=one_each)) as site:
        async with wire(site) as first, wire(site) as second:
            for line in (first, second):
                await line.send(request(chat_body(stream=True, max_tokens=5_000)))
                assert (await line.head()).status == 200
            waiting = [asyncio.ensure_future(ask(site, max_tokens=1)) for _ in range(8)]
            await site.until(lambda: len(site.trunk.queue.book.waiting) == 8)
            await a.kill()
            answers = await asyncio.gather(*(_after(one, second) for one in waiting))
        assert [text_of(body) for _, body, _ in answers] == ["b"] * 8
        await zero(site)


async def _after(waiting: Any, line: Any) -> Any:
    line.leave()
    return await waiting


async def test_a_busy_backend_is_passed_over_and_its_breaker_stays_closed() -> None:
    for status in (429, 503):
        async with Upstream("demo") as a, Upstream("demo") as b, running(pool(a.url, b.url)) as site:
            a.script = Script(status=status, headers={"retry-after": "7"})
            for _ in range(3):
                assert (await ask(site, max_tokens=1))[0] == 200
            assert len(b.generations) == 3
            b.script = a.script
            answer, body, headers = await ask(site, max_tokens=1)
            assert (answer, body["error"]["code"]) == (503, "no_backend")
            assert 7 <= int(headers["retry-after"]) <= 9
            assert all(one.breaker.circuit(0.0) is Circuit.CLOSED for one in site.trunk.members())
            await zero(site)


async def test_what_the_engine_refuses_is_passed_on_in_its_own_words_and_trips_nothing() -> None:
    words = '{"error": {"message": "no such thing", "type": "BadRequestError", "param": "temperature", "code": 400}}'
    async with Upstream("demo") as a, Upstream("demo") as b, running(pool(a.url, b.url)) as site:
        a.script = b.script = Script(status=400, body=words)
        for stream in (False, True) * 10:
            async with site.chat(stream=stream) as answer:
                assert (answer.status, await answer.text()) == (400, words)
                assert answer.headers["x-signalbox-reason"] == "invalid_request"
                assert answer.headers["x-should-retry"] == "false"
        assert len(a.generations) + len(b.generations) == 20
        assert all(one.breaker.circuit(0.0) is Circuit.CLOSED for one in site.trunk.members())
        await zero(site)


async def test_a_backend_that_keeps_failing_is_left_alone_and_tried_again_later() -> None:
    async with Upstream("demo") as a, running(pool(a.url)) as site:
        member, *_ = site.trunk.members()
        a.script = Script(status=500)
        for _ in range(5):
            status, body, _ = await ask(site)
            assert (status, body["error"]["code"]) == (502, "engine_error")
        asked = len(a.generations)
        status, body, headers = await ask(site)
        assert (status, body["error"]["code"], len(a.generations)) == (503, "no_backend", asked)
        assert int(headers["retry-after-ms"]) >= 1
        a.script = Script()
        loop = asyncio.get_running_loop()
        await site.until(lambda: member.breaker.circuit(loop.time()) is Circuit.HALF_OPEN)
        assert (await ask(site, max_tokens=1))[0] == 200
        assert member.breaker.circuit(loop.time()) is Circuit.CLOSED
        await zero(site)


async def test_what_breaks_before_the_first_chunk_moves_on_and_after_it_ends_the_stream() -> None:
    before = [Script(close_at=0), Script(close_at=0, reset=False), Script(content_type="text/html"), Script(error_at=0)]
    after = {"engine_lost": Script(close_at=3), "engine_error": Script(error_at=3)}
    async with Upstream("demo") as a, Upstream("demo") as b, running(pool(a.url, b.url)) as site:
        for script in before[:3]:
            a.scripts.append(script)
            async with site.chat(stream=True, max_tokens=5) as answer:
                assert answer.status == 200
                assert events(await answer.read())[-1] == "[DONE]"
        for code, script in after.items():
            a.scripts.append(script)
            b.scripts.append(script)
            async with site.chat(stream=True, max_tokens=50) as answer:
                last = events(await answer.read())[-1]
                assert last["error"]["code"] == code
                assert last["usage"]["completion_tokens"] == 3
            a.scripts.clear()
            b.scripts.clear()
        await zero(site)
