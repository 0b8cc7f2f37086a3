"""Deadlines: while it waits, before the first token, in mid-stream."""

import asyncio

from gateway.exchange import Exchange
from policies.lifecycle import State
from tests.support.quiet import zero
from tests.support.site import Site, running
from tests.support.wire import events

ONE = """
[[pool]]
model = "demo"
[[pool.backend]]
kind = "simulated"
name = "one"
a0_ms = 5.0
limits = { max_running = 1 }
"""


async def hold(site: Site) -> None:
    """Occupies the only place for good."""
    async with site.chat(max_tokens=5_000, min_tokens=5_000, stream=True) as answer:
        await answer.read()


async def test_who_waits_past_its_first_token_deadline_gets_504() -> None:
    async with running(ONE) as site, asyncio.TaskGroup() as group:
        holder = group.create_task(hold(site))
        await site.until(lambda: len(site.trunk.queue.book.held) == 1)
        for stream in (False, True):
            async with site.chat(headers={"x-slo-ttft-ms": "120"}, stream=stream) as answer:
                body = await answer.json()
                assert (answer.status, body["error"]["code"]) == (504, "expired")
                assert answer.headers["x-should-retry"] == "false"
                assert answer.headers["x-signalbox-class"] == "standard"
        async with site.chat(headers={"x-deadline-ms": "120"}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (504, "expired")
        holder.cancel()
        await zero(site)


async def test_a_total_deadline_in_mid_stream_is_the_last_event_with_the_usage_so_far() -> None:
    async with running(ONE) as site:
        headers = {"x-deadline-ms": "400"}
        async with site.chat(headers=headers, stream=True, max_tokens=5_000, min_tokens=5_000) as answer:
            assert answer.status == 200
            said = events(await answer.read())
        last = said[-1]
        assert "[DONE]" not in said
        assert last["error"]["code"] == "expired"
        told = sum(bool(event["choices"][0]["delta"].get("content")) for event in said[:-1])
        assert last["usage"]["completion_tokens"] == told > 5
        assert last["usage"]["prompt_tokens"] > 0
        await zero(site)


async def test_a_total_deadline_in_an_unstreamed_answer_is_504() -> None:
    async with running(ONE) as site:
        async with site.chat(headers={"x-deadline-ms": "200"}, max_tokens=5_000, min_tokens=5_000) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (504, "expired")
        await zero(site)


async def test_a_deadline_before_the_first_token_is_504() -> None:
    slow = ONE.replace("a0_ms = 5.0", "a0_ms = 2000.0")
    async with running(slow) as site:
        seen: list[Exchange] = []
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(_status(site, {"x-deadline-ms": "300"}))
            await site.until(lambda: bool(site.live()) and site.live()[0].state is State.GRANTED)
            seen = site.live()
        assert asking.result() == (504, "expired")
        assert seen[0].state is State.EXPIRED
        await zero(site)


async def test_a_deadline_that_is_no_number_names_its_header() -> None:
    async with running(ONE) as site:
        for name in ("x-slo-ttft-ms", "x-slo-tpot-ms", "x-deadline-ms"):
            async with site.chat(headers={name: "soon"}) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["param"]) == (400, name)


async def _status(site: Site, headers: dict[str, str]) -> tuple[int, str]:
    async with site.chat(headers=headers, stream=True) as answer:
        return answer.status, (await answer.json())["error"]["code"]
