"""Trying again: what a client's retry keeps, what it costs its tenant, and when the gateway asks for none."""

import asyncio
import time
from typing import Any

import pytest

from tests.http.test_deadlines import ONE, hold
from tests.support.quiet import zero
from tests.support.site import POOL, Site, running
from tests.support.upstream import Upstream
from tests.support.upstream_frames import Script
from tests.support.wire import chat_body, request, wire

LIMITED = """
[[tenant]]
name = "small"
keys = ["sha256:32a642c5fd761670c7f9989b70138c93c56ea519529eb544d46b91a8e59f3075"]
requests_per_min = 3
"""
REMOTE = """
[[pool]]
model = "demo"
[[pool.backend]]
kind = "openai"
name = "one"
url = "%s"
"""
KEY = {"authorization": "Bearer sk-demo-alice"}
PATIENCE_MS = 3_000


def lines(headers: dict[str, str]) -> list[str]:
    return [f"{name}: {value}" for name, value in headers.items()]


async def refused(site: Site, **headers: str) -> tuple[int, str, str]:
    """A request that gets no answer: its status, the reason, and whether to try again."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with site.chat(headers=named) as answer:
        return answer.status, answer.headers["x-signalbox-reason"], answer.headers["x-should-retry"]


async def test_a_retry_has_its_first_deadline_and_no_time_of_its_own() -> None:
    unknown = ONE.replace("a0_ms = 5.0", "a0_ms = 50.0")  # how long a place is held is not known in this test's time
    async with running(unknown) as site, asyncio.TaskGroup() as group:
        holder = group.create_task(hold(site))
        await site.until(lambda: len(site.trunk.queue.book.held) == 1)
        keyed = {"idempotency-key": "k-1", "x-slo-ttft-ms": str(PATIENCE_MS)}
        came_s = time.monotonic()
        async with wire(site) as line:
            await line.send(request(chat_body(), *lines(keyed)))
            await site.until(lambda: len(site.trunk.queue.book.waiting) == 1)
            line.leave()
            await site.until(lambda: not site.trunk.queue.book.waiting)
        await asyncio.sleep(max(0.0, came_s + 0.5 - time.monotonic()))
        async with wire(site) as line:
            await line.send(request(chat_body(), *lines(keyed)))
            waiting = site.trunk.queue.book.waiting
            await site.until(lambda: any(place.nearer_s >= 0.45 for place in waiting.values()))
            answer = await line.answer()
            assert (answer.status, answer.headers["x-signalbox-reason"]) == (504, "expired")
        assert await refused(site, idempotency_key="k-1", x_slo_ttft_ms=str(PATIENCE_MS)) == (504, "expired", "false")
        holder.cancel()
        await zero(site)
        async with site.chat(headers=keyed) as answer:  # free or not: its time is over
            assert answer.status == 504
        async with site.chat("Another body", headers=keyed, max_tokens=2) as answer:
            assert answer.status == 200


async def test_the_same_key_after_an_answer_is_a_new_request() -> None:
    async with running() as site:
        for _ in range(2):
            async with site.chat(headers={"idempotency-key": "k", "x-slo-ttft-ms": "500"}, max_tokens=2) as answer:
                assert answer.status == 200
                await answer.read()
            await zero(site)
            await asyncio.sleep(0.6)


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_a_key_has_a_length(key: str) -> None:
    async with running() as site, site.chat(headers={"idempotency-key": key}) as answer:
        body: Any = await answer.json()
        assert (answer.status, body["error"]["param"]) == (400, "idempotency-key")


async def test_nobody_is_asked_to_come_again_after_its_deadline() -> None:
    """No backend is up for a second or more, which is more than there is."""
    async with Upstream("demo") as upstream, running(REMOTE % upstream.url) as site:
        (member,) = site.trunk.members()
        member.backend = None
        hurried = {"x_slo_ttft_ms": "300"}
        assert await refused(site, **hurried) == (503, "no_backend", "true")
        assert await refused(site, **hurried, idempotency_key="k") == (503, "no_backend", "false")
        assert await refused(site, idempotency_key="k") == (503, "no_backend", "true")
        member.nudge.set()
        await site.until(lambda: site.trunk.ready)


async def test_a_tenant_whose_clients_retry_too_much_is_asked_to_stop() -> None:
    async with Upstream("demo") as upstream, running(REMOTE % upstream.url + "[retry]\nburst = 2\n") as site:
        (member,) = site.trunk.members()
        member.backend = None
        assert (await refused(site))[2] == "true"
        said = [(await refused(site, x_stainless_retry_count=str(n)))[2] for n in (0, 1, 2, 1)]
        assert said == ["true", "true", "false", "false"]
        member.nudge.set()
        await site.until(lambda: site.trunk.ready)
        async with site.chat(headers={"x-stainless-retry-count": "2"}, max_tokens=2) as answer:
            assert answer.status == 200


async def test_a_quota_still_gives_everyone_a_time() -> None:
    async with running(POOL + LIMITED + "[retry]\nburst = 0\n") as site:
        for _ in range(3):
            async with site.chat(headers=KEY, max_tokens=2) as answer:
                assert answer.status == 200
        assert await refused(site, **KEY, x_stainless_retry_count="1") == (429, "rate_limited", "true")


async def test_who_leaves_before_the_first_token_has_used_the_engine() -> None:
    async with Upstream("demo") as upstream, running(REMOTE % upstream.url + LIMITED) as site:
        upstream.script = Script(hold_at=0)
        async with wire(site) as line:
            await line.send(request(chat_body(stream=True), *lines(KEY)))
            await upstream.until(lambda: upstream.running == 1)
            line.leave()
            await zero(site)
        upstream.script = Script()
        async with site.chat(headers=KEY, max_tokens=2) as answer:
            assert answer.headers["x-ratelimit-remaining-requests"] == "1"


async def test_who_leaves_the_queue_has_used_nothing() -> None:
    async with running(ONE + LIMITED) as site, asyncio.TaskGroup() as group:

        async def keep() -> None:
            async with site.chat(headers=KEY, max_tokens=5_000, min_tokens=5_000, stream=True) as answer:
                await answer.read()

        holder = group.create_task(keep())
        await site.until(lambda: len(site.trunk.queue.book.held) == 1)
        async with wire(site) as line:
            await line.send(request(chat_body(), *lines(KEY)))
            await site.until(lambda: len(site.trunk.queue.book.waiting) == 1)
            line.leave()
            await site.until(lambda: not site.trunk.queue.book.waiting)
        holder.cancel()
        await zero(site)
        async with site.chat(headers=KEY, max_tokens=2) as answer:
            assert answer.headers["x-ratelimit-remaining-requests"] == "1"
