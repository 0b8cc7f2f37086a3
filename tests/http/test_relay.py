"""Requests on a real socket: who may ask, for what, and what is said to those who may not."""

import asyncio
from typing import Any

from backends.protocol import BackendLost
from tests.support.quiet import zero
from tests.support.site import Site, running
from tests.support.twist import Twisted, raising
from tests.support.wire import Answer, chat_body, request, wire

ALICE, BOB = "sk-demo-alice", "sk-demo-bob"

TENANTS = """
[server]
max_body_bytes = 4096

[[pool]]
model = "demo"
aliases = ["gpt-4o-mini"]
[[pool.backend]]
kind = "simulated"
name = "one"
a0_ms = 1.0

[[pool]]
model = "secret"
[[pool.backend]]
kind = "simulated"
name = "two"
a0_ms = 1.0

[[tenant]]
name = "alice"
keys = ["sha256:32a642c5fd761670c7f9989b70138c93c56ea519529eb544d46b91a8e59f3075"]

[[tenant]]
name = "bob"
keys = ["sha256:ca5de30b0acbd9ce4fd5d1721830a77e6b4b8cbd3123e335f0bb46786758ff35"]
class = "standard"
models = ["demo"]
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def code(response: object) -> tuple[int, str]:
    """Status and reason of a request given as aiohttp's context manager."""
    async with response as answer:  # type: ignore[attr-defined]
        body = await answer.json()
        assert answer.headers["x-request-id"]
        assert answer.headers["x-signalbox-reason"] == body["error"]["code"]
        return answer.status, body["error"]["code"]


async def test_keys_lead_to_tenants_by_either_header() -> None:
    async with running(TENANTS) as site:
        assert await code(site.chat()) == (401, "unauthenticated")
        assert await code(site.chat(headers=bearer("sk-nobody"))) == (401, "unauthenticated")
        assert await code(site.chat(headers={"authorization": f"Basic {ALICE}"})) == (401, "unauthenticated")
        assert await code(site.chat(headers={"x-api-key": "sk-nobody"})) == (401, "unauthenticated")
        for headers in (bearer(ALICE), {"authorization": f"bearer  {ALICE}"}, {"x-api-key": ALICE}):
            async with site.chat(headers=headers, max_tokens=2) as answer:
                assert answer.status == 200
        await zero(site)


async def test_models_are_for_those_who_may_use_them() -> None:
    async with running(TENANTS) as site:
        assert await code(site.chat(headers=bearer(BOB), model="secret")) == (403, "forbidden")
        assert await code(site.chat(headers=bearer(BOB), model="nothing")) == (404, "unknown_model")
        assert await code(site.chat(headers=bearer(ALICE), model="nothing")) == (404, "unknown_model")
        async with site.chat(headers=bearer(BOB), model="gpt-4o-mini", max_tokens=1) as answer:
            assert answer.status == 200
            assert (await answer.json())["model"] == "demo", "an alias is answered with the model that it stands for"
        async with site.client.get(f"{site.url}/v1/models", headers=bearer(BOB)) as answer:
            assert [one["id"] for one in (await answer.json())["data"]] == ["demo", "gpt-4o-mini"]
        assert await _plain(site, "GET", "/v1/models") == (401, "unauthenticated")


async def test_the_class_is_capped_by_the_tenants() -> None:
    async with running(TENANTS) as site:
        cases = [
            (ALICE, {"x-priority-class": "interactive"}, {}, "interactive"),
            (BOB, {"x-priority-class": "interactive"}, {}, "standard"),
            (BOB, {"x-priority-class": "batch"}, {}, "batch"),
            (ALICE, {}, {"service_tier": "priority"}, "interactive"),
            (ALICE, {}, {"service_tier": "flex"}, "batch"),
            (BOB, {}, {"service_tier": "fast"}, "standard"),
            (BOB, {}, {}, "standard"),
        ]
        for key, headers, fields, served in cases:
            async with site.chat(headers=bearer(key) | headers, max_tokens=1, **fields) as answer:
                assert (answer.status, answer.headers["x-signalbox-class"]) == (200, served)
        assert await code(site.chat(headers=bearer(ALICE) | {"x-priority-class": "gold"})) == (400, "invalid_request")


async def ask(site: Site, data: bytes) -> Answer:
    """What a request on a connection of its own is answered with."""
    async with wire(site) as line:
        await line.send(data)
        return await line.answer()


async def test_what_is_no_json_is_refused() -> None:
    async with running() as site:
        body = chat_body()
        plain = request(body).replace(b"content-type: application/json", b"content-type: text/plain")
        for data in (plain, request(body, "content-encoding: gzip")):
            answer = await ask(site, data)
            assert (answer.status, answer.code) == (415, "unsupported_media_type")
        odd = request(chat_body(max_tokens=1)).replace(b"application/json", b"Application/JSON; charset=utf-8")
        assert (await ask(site, odd)).status == 200
        bare = request(chat_body(max_tokens=1)).replace(b"content-type: application/json\r\n", b"")
        assert (await ask(site, bare)).status == 200


async def test_a_body_above_the_limit_is_refused_by_its_length_and_by_its_chunks() -> None:
    async with running(TENANTS) as site:
        headers = bearer(ALICE) | {"content-type": "application/json"}
        url = f"{site.url}/v1/chat/completions"
        just = chat_body("x" * (4096 - len(chat_body("")) - 19), max_tokens=1)
        assert len(just) <= 4096

        async def chunked() -> object:
            for _ in range(5):
                yield b" " * 1024

        async with site.client.post(url, data=just, headers=headers) as answer:
            assert answer.status == 200
        assert await code(site.client.post(url, data=just + b" " * 1024, headers=headers)) == (413, "too_large")
        assert await code(site.client.post(url, data=chunked(), headers=headers)) == (413, "too_large")
        await zero(site)


async def test_a_request_id_comes_back_or_is_made() -> None:
    async with running() as site:
        async with site.chat(headers={"x-request-id": "mine-1"}, max_tokens=1) as answer:
            assert answer.headers["x-request-id"] == "mine-1"
            assert (await answer.json())["id"] == "chatcmpl-mine-1"
        made = set()
        for _ in range(2):
            async with site.chat(max_tokens=1) as answer:
                made.add(answer.headers["x-request-id"])
        assert len(made) == 2
        assert all(len(one) == 32 for one in made)


async def test_a_request_id_that_no_log_should_hold_is_replaced() -> None:
    async with running() as site:
        for given in ("", "a b", "x" * 129, "\xfcber", "tab\there"):
            answer = await ask(site, request(chat_body(max_tokens=1), f"x-request-id: {given}"))
            assert answer.status == 200
            assert answer.headers["x-request-id"].isalnum()
            assert answer.headers["x-request-id"] != given


async def test_headers_say_how_long_each_phase_took() -> None:
    async with running() as site, site.chat(max_tokens=1) as answer:
        names = [part.split(";")[0].strip() for part in answer.headers["server-timing"].split(",")]
        assert names == ["validate", "admit", "queue", "prefill"]


async def test_two_requests_use_one_connection_and_a_refusal_keeps_it() -> None:
    async with running() as site, wire(site) as line:
        for body, status in ((chat_body(max_tokens=1), 200), (b"{}", 400), (chat_body(max_tokens=1), 200)):
            await line.send(request(body))
            assert (await line.answer()).status == status


async def test_other_paths_and_methods_are_refused_in_the_same_shape() -> None:
    async with running() as site:
        assert await _plain(site, "GET", "/v1/nothing") == (404, "not_found")
        assert await _plain(site, "GET", "/v1/chat/completions") == (405, "method_not_allowed")
        assert await _plain(site, "DELETE", "/v1/models") == (405, "method_not_allowed")
        assert await _plain(site, "GET", "/v1/models/nothing") == (404, "unknown_model")


async def _plain(site: Site, method: str, path: str) -> tuple[int, str]:
    async with site.client.request(method, site.url + path) as answer:
        return answer.status, (await answer.json())["error"]["code"]


async def test_what_the_operator_looks_at() -> None:
    async with running(TENANTS) as site:
        async with site.client.get(f"{site.url}/livez") as answer:
            assert (answer.status, await answer.text()) == (200, "ok")
        async with site.client.get(f"{site.url}/readyz") as answer:
            pools = {"demo": {"one": "up"}, "secret": {"two": "up"}}
            assert (answer.status, await answer.json()) == (200, {"ready": True, "store": "up", "pools": pools})
        async with site.client.get(f"{site.url}/docs/openapi.json") as answer:
            described = await answer.json()
            assert "/v1/chat/completions" in described["paths"]
        async with site.client.get(f"{site.url}/v1/models/demo", headers=bearer(ALICE)) as answer:
            card = await answer.json()
            assert (card["id"], card["max_model_len"]) == ("demo", 8192)
            assert set(card["apis"]) == {"chat", "completion", "embeddings", "tokenize"}


async def test_a_gateway_whose_backend_is_down_is_alive_and_not_ready() -> None:
    async with running() as site:
        member, *_ = site.trunk.members()
        config: Any = member.config
        member.config = Twisted(config, {"connect": raising(BackendLost("pulled out"))})
        engine: Any = member.backend
        engine.crash()
        await site.until(lambda: member.trouble == "pulled out")
        async with site.client.get(f"{site.url}/readyz") as answer:
            assert answer.status == 503
            assert (await answer.json())["pools"] == {"demo": {"one": "pulled out"}}
        async with site.client.get(f"{site.url}/livez") as answer:
            assert answer.status == 200
        member.config = config
        await site.until(lambda: site.trunk.ready)


async def test_a_queue_that_is_full_says_when_to_come_back() -> None:
    config = '[store]\nmax_queued = 2\n[[pool]]\nmodel = "demo"\n[[pool.backend]]\nkind = "simulated"\nname = "one"\n'
    async with running(config + "limits = { max_running = 1 }\n") as site, asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(_read(site))
        await site.until(lambda: len(site.trunk.queue.book.waiting) == 2 and len(site.trunk.queue.book.held) == 1)
        await site.until(lambda: all(place.sent for place in site.trunk.queue.book.waiting.values()))
        async with site.chat() as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
            assert int(answer.headers["retry-after-ms"]) >= 1000
            assert answer.headers["x-should-retry"] == "true"


async def _read(site: Site) -> None:
    async with site.chat(max_tokens=4, min_tokens=4) as answer:
        assert answer.status == 200
        await answer.read()


async def test_interactive_goes_before_batch_when_both_wait() -> None:
    config = '[[pool]]\nmodel = "demo"\n[[pool.backend]]\nkind = "simulated"\nname = "one"\n'
    async with running(config + "limits = { max_running = 1 }\n") as site:
        order: list[str] = []

        async def one(service: str) -> None:
            async with site.chat(headers={"x-priority-class": service}, max_tokens=3) as answer:
                assert answer.status == 200
                await answer.read()
                order.append(service)

        book = site.trunk.queue.book
        async with asyncio.TaskGroup() as group:
            group.create_task(one("standard"))
            await site.until(lambda: len(book.held) == 1)
            for waiting, service in enumerate(("batch", "standard", "interactive"), 1):
                group.create_task(one(service))
                await site.until(lambda n=waiting: sum(p.sent for p in book.waiting.values()) == n)
        assert order == ["standard", "interactive", "standard", "batch"]
