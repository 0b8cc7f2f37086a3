"""`/console`: who may watch, what the stream says, and that nobody pays for viewers that are not there."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from gateway.http import console_routes
from gateway.telemetry import audience
from gateway.telemetry.audience import MOST_VIEWERS
from gateway.telemetry.snapshot import Snapshot
from tests.support import store as stores
from tests.support.site import POOL, Site, running
from tests.support.store import StoreServer
from tests.support.watched import ADMIN, HOSTILE, SECRET, TOML, Watched, hostile, metrics, sample, watched

shared_server, own_server = stores.shared_server, stores.own_server

KEYED = TOML.split("[[pool]]")[0] + POOL


async def get(site: Site, path: str, **headers: str) -> tuple[int, Any, Any]:
    async with site.client.get(f"{site.url}{path}", headers=headers) as answer:
        text = await answer.read()
        return answer.status, answer.headers, text


async def test_without_an_admin_key_there_is_none() -> None:
    async with running(POOL) as site:
        for path in ("/console", "/console/console.js", "/console/feed"):
            status, _, text = await get(site, path, authorization="Bearer any")
            assert (status, b"server.admin_keys" in text) == (404, True)


async def test_the_page_is_for_everyone_and_lets_nothing_from_elsewhere_in() -> None:
    async with running(KEYED) as site:
        status, headers, text = await get(site, "/console")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert b"<script>" not in text and b"style=" not in text and b"://" not in text
        for part in ("console.js", "views.js", "uPlot.iife.min.js", "console.css", "icon.svg"):
            assert (await get(site, f"/console/{part}"))[0] == 200
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        for path in ("/console/uPlot-LICENSE.txt", "/console/..%2fadmin.py", "/console/x/y"):
            assert (await get(site, path))[0] == 404, path
        async with site.client.get(f"{site.url}/console/") as answer:
            assert (answer.status, answer.url.path) == (200, "/console")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer sk-alice"}, 403),
        ({"cookie": "key=admin"}, 401),
    ],
)
async def test_the_stream_wants_an_admin_key(headers: dict[str, str], status: int) -> None:
    async with running(KEYED) as site:
        assert (await get(site, "/console/feed", **headers))[0] == status
        assert (site.trunk.audience.viewers, site.trunk.audience.made) == (0, 0)


async def test_it_says_what_the_metrics_say() -> None:
    async with watched() as one, one.feed() as viewer:
        assert viewer.answer.headers["content-type"].startswith("text/event-stream")
        await viewer.next()
        seen = await viewer.next()
        told = metrics((await get(one.site, "/metrics"))[2].decode())
        (pool,), labels = seen.pools, {"model": "demo", "backend": "one"}
        (backend,) = pool.backends
        for budget, name in (
            (backend.leases, "leases"),
            (backend.prefill, "prefill_tokens"),
            (backend.kv, "kv_tokens"),
        ):
            assert budget is not None
            assert budget.used == told[sample(f"signalbox_ledger_{name}", **labels)]
            assert budget.limit == told[sample(f"signalbox_ledger_{name}_limit", **labels)]
        assert (backend.name, backend.up, backend.open, backend.breaker) == ("one", True, True, "closed")
        assert backend.streams == 2
        for service in pool.services:
            where = {"model": "demo", "class": service.name}
            assert service.waiting == told[sample("signalbox_queue_requests", **where)]
            assert service.tokens == told[sample("signalbox_queue_tokens", **where)]
        assert [one.waiting for one in pool.services] == [0, 3, 0]
        for state, count in seen.live.items():
            assert count == told[sample("signalbox_live_requests", state=state)]
        assert {end.reason: end.total for end in seen.ends} == {"ok": 4, "unknown_model": 1, "unauthenticated": 1}
        assert [(one.name, one.requests, one.waiting) for one in seen.tenants] == [
            ("bob", 0, {"standard": 3}), ("alice", 4, {}),
        ]  # fmt: skip
        assert (seen.workers, seen.gateways, seen.store_up) == (1, 1, True)


async def test_live_requests_show_their_phases_and_no_prompts() -> None:
    async with watched() as one, one.feed() as viewer:
        text = await viewer.text()
        assert SECRET.encode() not in text
        seen = msgspec.json.decode(text, type=Snapshot)
        assert [request.state for request in seen.requests] == ["streaming"] * 2 + ["queued"] * 3
        first, last = seen.requests[0], seen.requests[-1]
        assert (first.id, first.tenant, first.model, first.backend) == (f"{HOSTILE}0", "alice", "demo", "one")
        assert (first.output_tokens, last.output_tokens) == (1, 0)
        assert [phase.name for phase in first.phases] == ["validate", "admit", "queue", "prefill", "decode"]
        assert [phase.name for phase in last.phases] == ["validate", "admit", "queue"]
        for request in seen.requests:
            assert sum(phase.ms for phase in request.phases) == pytest.approx(request.total_ms, abs=0.01)
        later = await viewer.next()
        grown = later.requests[0].phases[-1].ms - first.phases[-1].ms
        assert grown == pytest.approx((later.at - seen.at) * 1000, abs=250)


async def test_rates_and_quantiles_are_those_of_the_window() -> None:
    async with watched() as one, one.feed() as viewer:
        first = await viewer.next()
        assert (first.rates.ok, first.paces[""].ttft) == (None, None)
        one.engine.release()
        seen = await viewer.until(lambda seen: seen.ends[0].total == 9)
        assert seen.rates.ok == pytest.approx(5 / seen.window_s)
        assert seen.rates.good == seen.rates.ok
        assert seen.ends[1].per_s == 0
        ttft = seen.paces["standard"].ttft
        assert ttft is not None
        assert 0 < ttft.p50_ms <= ttft.p90_ms
        assert (seen.paces[""], seen.paces["batch"].ttft) == (seen.paces["standard"], None)
        assert seen.pools[0].services[1].ttft == ttft


async def test_without_the_store_it_says_what_is_left(own_server: StoreServer) -> None:
    async with running(f'{KEYED}\n[store]\nurl = "{own_server.url}"\n') as site:
        async with Watched(site, None).feed() as viewer:  # type: ignore[arg-type]
            assert (await viewer.next()).pools[0].backends[0].leases is not None
            own_server.kill()
            seen = await viewer.until(lambda seen: not seen.store_up)
            (backend,) = seen.pools[0].backends
            assert (seen.gateways, backend.open, backend.leases, seen.pools[0].services[0].waiting) == (None,) * 4
            assert backend.up
        own_server.start()


async def test_names_are_passed_on_as_they_are() -> None:
    async with watched(hostile) as one, one.feed() as viewer:
        seen = await viewer.next()
        assert (seen.pools[0].model, seen.pools[0].backends[0].name, seen.requests[-1].tenant) == (HOSTILE,) * 3
        assert HOSTILE in seen.paces


async def test_all_viewers_get_the_same_and_the_last_one_takes_the_work_with_it() -> None:
    async with watched() as one:
        stage = one.site.trunk.audience
        async with AsyncExitStack() as stack:
            began = asyncio.get_running_loop().time()
            viewers = [await stack.enter_async_context(one.feed()) for _ in range(5)]
            texts = [await viewer.text() for viewer in viewers for _ in range(3)]
            took_s = asyncio.get_running_loop().time() - began
            assert len(set(texts)) <= stage.made <= took_s / (audience.EVERY_S - audience.EARLY_S) + 1
            for nth in range(5):
                assert len({*texts[3 * nth : 3 * nth + 3]}) == 3, "nobody gets the same twice"
            assert stage.viewers == 5
        await one.site.until(lambda: stage.viewers == 0)
        made = stage.made
        await asyncio.sleep(audience.EVERY_S * 1.5)  # nothing comes, so there is nothing to wait for
        assert stage.made == made


async def test_there_are_so_many_seats() -> None:
    async with watched() as one:
        async with AsyncExitStack() as stack:
            for _ in range(MOST_VIEWERS):
                await (await stack.enter_async_context(one.feed())).next()
            status, headers, text = await get(one.site, "/console/feed", **ADMIN)
            assert (status, headers["x-signalbox-reason"]) == (429, "queue_full")
            assert int(headers["retry-after"]) >= 1
            assert f"{MOST_VIEWERS} viewers".encode() in text
        await one.site.until(lambda: one.site.trunk.audience.viewers == 0)
        async with one.feed() as viewer:
            assert (await viewer.next()).workers == 1


async def test_a_viewer_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_routes, "STALL_S", 0.2)
    monkeypatch.setattr(audience, "EVERY_S", 0.01)
    async with watched() as one:
        stage = one.site.trunk.audience

        async def much() -> bytes:
            return b"x" * 4_000_000

        monkeypatch.setattr(stage, "snapshot", much)
        async with one.feed():
            await one.site.until(lambda: stage.viewers == 1)
            await one.site.until(lambda: stage.viewers == 0)


async def test_the_stream_ends_when_the_gateway_does(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as stack:
        async with running(KEYED) as site:
            viewer = await stack.enter_async_context(Watched(site, None).feed())  # type: ignore[arg-type]
            await viewer.next()
        while await viewer.text():
            pass
    assert "timeout graceful shutdown exceeded" not in caplog.text


async def test_a_snapshot_that_fails_ends_the_streams_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(KEYED) as site:
        stage = site.trunk.audience
        with monkeypatch.context() as patch:
            patch.setattr(audience, "snapshot", None)
            assert (await get(site, "/console/feed", **ADMIN))[0] == 500
        assert "failed inside the gateway" in caplog.text
        assert stage.viewers == 0
        async with Watched(site, None).feed() as viewer:  # type: ignore[arg-type]
            assert (await viewer.next()).store_up


async def test_what_a_worker_of_another_version_wrote_is_passed_over() -> None:
    async with watched() as one:
        slate = one.site.trunk.metrics.board.slate
        strange = msgspec.msgpack.encode(["a roll", {"of": "tomorrow"}])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slate, "read", lambda at: [strange, *type(slate).read(slate, at)])
            async with one.feed() as viewer:
                assert len((await viewer.next()).requests) == 5
