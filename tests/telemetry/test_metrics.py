"""What `/metrics` says after requests went every possible way, on a running gateway."""

import asyncio
import json
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain

from gateway.config import ConfigError, decode
from gateway.queue.channel import Address
from gateway.queue.finders import Fixed
from gateway.telemetry.metrics_table import BY_NAME, exposed
from tests.support.engines import pool
from tests.support.site import POOL, Site, running
from tests.support.upstream import Upstream
from tests.support.upstream_frames import Script

OPEN_METRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
SLOW = POOL.replace("a0_ms = 1.0", "a0_ms = 10.0").replace("max_running = 4", "max_running = 1")
ENDLESS = {"max_tokens": 8_000, "min_tokens": 8_000}
JSON = {"content-type": "application/json"}
KEYS = """
[server]
admin_keys = ["sha256:ca5de30b0acbd9ce4fd5d1721830a77e6b4b8cbd3123e335f0bb46786758ff35"]
[metrics]
access = "admin"
"""
TENANT = """
[[tenant]]
name = "alice"
keys = ["sha256:32a642c5fd761670c7f9989b70138c93c56ea519529eb544d46b91a8e59f3075"]
"""


async def scraped(site: Site) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    async with site.client.get(f"{site.url}/metrics") as answer:
        assert answer.status == 200
        text = await answer.text()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in plain(text)
        for sample in family.samples
    }


async def value(site: Site, name: str, **labels: str) -> float:
    """The sum over all series of this name that have these labels."""
    assert name in exposed()
    return sum(
        number
        for (found, its), number in (await scraped(site)).items()
        if found == name and labels.items() <= dict(its).items()
    )


async def test_a_whole_answer_is_counted_everywhere() -> None:
    async with running() as site:
        for stream in (True, False):
            async with site.chat(stream=stream, max_tokens=8) as answer:
                await answer.read()
        await site.until(lambda: not site.live())
        pool = {"model": "demo", "class": "standard"}
        assert await value(site, "signalbox_requests_total", **pool, reason="ok") == 2
        assert await value(site, "signalbox_goodput_total", **pool) == 2
        for state in ("received", "queued", "granted", "streaming"):
            assert await value(site, "signalbox_state_seconds_count", **pool, state=state) == 2
        gen_ai = {"gen_ai_request_model": "demo", "class": "standard", "gen_ai_operation_name": "chat"}
        assert await value(site, "gen_ai_server_time_to_first_token_seconds_count", **gen_ai) == 1
        assert await value(site, "gen_ai_server_time_per_output_token_seconds_count", **gen_ai) == 1
        assert await value(site, "gen_ai_server_request_duration_seconds_count", **gen_ai) == 2
        assert await value(site, "gen_ai_client_token_usage_sum", **gen_ai, gen_ai_token_type="output") == 16
        assert await value(site, "signalbox_tenant_tokens_total", tenant="default", type="output") == 16
        assert await value(site, "signalbox_tenant_requests_total", tenant="default", outcome="done") == 2
        engine = {"model": "demo", "backend": "one"}
        assert await value(site, "signalbox_attempts_total", **engine, outcome="done") == 2
        assert await value(site, "signalbox_prefill_seconds_count", **engine) == 2
        assert await value(site, "signalbox_backend_output_tokens_total", **engine) == 16
        assert await value(site, "signalbox_plans_total", model="demo", tokens="exact") == 2
        assert await value(site, "signalbox_prompt_error_ratio_count") == 0
        assert await value(site, "signalbox_turn_seconds_count") >= 2
        assert await value(site, "signalbox_turn_events_sum") >= 4


async def test_times_in_the_states_add_up_to_the_whole() -> None:
    async with running() as site:
        async with site.chat(stream=True, max_tokens=20) as answer:
            await answer.read()
        await site.until(lambda: not site.live())
        whole = await value(site, "gen_ai_server_request_duration_seconds_sum")
        assert await value(site, "signalbox_state_seconds_sum") == pytest.approx(whole, abs=1e-9)
        first = await value(site, "gen_ai_server_time_to_first_token_seconds_sum")
        streaming = await value(site, "signalbox_state_seconds_sum", state="streaming")
        assert first + streaming == pytest.approx(whole, abs=1e-9)


async def test_every_no_has_its_reason() -> None:
    async with running() as site:
        async with site.client.post(f"{site.url}/v1/chat/completions", data=b"{", headers=JSON) as answer:
            assert answer.status == 400
        async with site.chat(headers={"x-slo-ttft-ms": "300"}, text="word " * 5_000) as answer:
            reason = answer.headers["x-signalbox-reason"]
        await site.until(lambda: not site.live())
        none = {"model": "none", "class": "none"}
        assert await value(site, "signalbox_requests_total", **none, reason="invalid_request") == 1
        assert reason == "deadline_impossible"
        assert await value(site, "signalbox_requests_total", model="demo", reason=reason) == 1
        assert await value(site, "signalbox_refusal_seconds_count", model="demo") == 1
        assert await value(site, "signalbox_goodput_total") == 0


async def test_who_leaves_is_counted_with_the_engine_that_had_to_stop() -> None:
    async with running() as site:
        answer = await site.chat(stream=True, **ENDLESS)
        await answer.content.readany()
        assert await value(site, "signalbox_live_requests", state="streaming") == 1
        assert await value(site, "signalbox_ledger_leases", model="demo", backend="one") == 1
        answer.close()
        await site.until(lambda: not site.live() and not len(site.trunk.reaper))
        assert await value(site, "signalbox_requests_total", reason="client_gone") == 1
        assert await value(site, "signalbox_attempts_total", outcome="cancelled") == 1
        assert await value(site, "signalbox_engine_stop_seconds_count", model="demo", backend="one") == 1
        assert await value(site, "signalbox_wasted_tokens_total", state="cancelled") >= 1
        assert await value(site, "signalbox_leaked_leases") == 0
        assert await value(site, "signalbox_leaked_streams_total") == 0


async def test_the_queue_is_told_by_class_with_its_oldest() -> None:
    async with running(SLOW) as site:
        running_one = await site.chat(stream=True, **ENDLESS)
        await running_one.content.readany()
        waiting = asyncio.ensure_future(site.chat(headers={"x-priority-class": "batch"}, max_tokens=1).__aenter__())
        await site.until(lambda: len(site.trunk.queue.book.waiting) == 1)
        await site.until(lambda: all(place.sent for place in site.trunk.queue.book.waiting.values()))
        batch = {"model": "demo", "class": "batch"}
        async with asyncio.timeout(10):
            while await value(site, "signalbox_queue_requests", **batch) != 1:
                await asyncio.sleep(0.05)
        assert await value(site, "signalbox_queue_tenants", **batch) == 1
        assert await value(site, "signalbox_shed_ratio", **batch) == 0
        assert await value(site, "signalbox_queue_tokens", **batch) > 0
        assert await value(site, "signalbox_queue_oldest_seconds", **batch) > 0
        assert await value(site, "signalbox_queue_oldest_seconds", model="demo", **{"class": "standard"}) == 0
        assert await value(site, "signalbox_live_requests", state="queued") == 1
        running_one.close()
        (await waiting).close()


@pytest.mark.parametrize("limit", [0, 1])
async def test_tenants_beyond_the_limit_are_counted_together(limit: int) -> None:
    bob = '"sha256:ca5de30b0acbd9ce4fd5d1721830a77e6b4b8cbd3123e335f0bb46786758ff35"'
    keys = TENANT + f'[[tenant]]\nname = "bob"\nkeys = [{bob}]\n'
    async with running(f"[metrics]\nmax_tenants = {limit}\n" + POOL + keys) as site:
        for key in ("sk-demo-alice", "sk-demo-bob", "sk-demo-bob"):
            async with site.chat(headers={"authorization": f"Bearer {key}"}, max_tokens=1) as answer:
                assert answer.status == 200
                await answer.read()
        await site.until(lambda: not site.live())
        assert await value(site, "signalbox_tenant_requests_total", tenant="alice") == limit
        assert await value(site, "signalbox_tenant_requests_total", tenant="bob") == 0
        assert await value(site, "signalbox_tenant_requests_total", tenant="other") == 3 - limit


async def test_the_format_is_the_one_that_is_asked_for() -> None:
    async with running() as site:
        async with site.chat(max_tokens=1) as answer:
            await answer.read()
        async with site.client.get(f"{site.url}/metrics") as answer:
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            names = {family.name for family in plain(await answer.text())}
        async with site.client.get(f"{site.url}/metrics", headers={"accept": OPEN_METRICS}) as answer:
            assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
            text = await answer.text()
        assert text.endswith("# EOF\n")
        assert {family.name for family in open_metrics(text)} == names
        assert names <= BY_NAME.keys()


async def test_with_access_for_admins_a_key_is_needed() -> None:
    async with running(KEYS + POOL + TENANT) as site:
        for key, status in (("", 401), ("sk-demo-alice", 403), ("sk-demo-bob", 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            async with site.client.get(f"{site.url}/metrics", headers=headers) as answer:
                assert answer.status == status
                if status != 200:
                    assert json.loads(await answer.read())["error"]["code"]


def test_access_for_admins_needs_one() -> None:
    with pytest.raises(ConfigError, match=r"\$\.metrics\.access: `admin` needs an admin key"):
        decode(('[metrics]\naccess = "admin"\n' + POOL).encode())


async def test_a_store_that_is_away_takes_only_its_own_numbers_with_it() -> None:
    async with running() as site:
        await site.until(lambda: site.trunk.queue.turns.count > 0)
        assert await value(site, "signalbox_queue_processes") == 1
        target: Any = site.trunk.queue.turns.target
        there, target._finder = target._finder, Fixed(Address(path="/nonexistent/socket"))
        async with asyncio.timeout(10):
            while ("signalbox_queue_processes", frozenset()) in await scraped(site):
                await asyncio.sleep(0.1)
        assert await value(site, "signalbox_store_look_failures_total") >= 1
        assert await value(site, "signalbox_workers") == 1
        target._finder = there


async def test_scrapes_together_look_at_the_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.telemetry import metrics_text

    looks, look = [], metrics_text.look

    async def counted(*given: Any) -> Any:
        looks.append(given)
        return await look(*given)

    monkeypatch.setattr(metrics_text, "look", counted)
    monkeypatch.setattr(metrics_text, "LOOK_AGAIN_S", 1000.0)
    async with running() as site:
        await site.until(lambda: site.trunk.queue.turns.count > 0)
        answers = await asyncio.gather(*(value(site, "signalbox_queue_processes") for _ in range(5)))
    assert answers == [1.0] * 5
    assert len(looks) == 1


async def test_every_backend_that_was_tried_is_counted() -> None:
    async with Upstream("demo") as a, Upstream("demo") as b, running(pool(a.url, b.url)) as site:
        a.script = Script(status=500)
        moved = 0
        while not moved:  # until one of them came to `a` first
            async with site.chat(max_tokens=2) as answer:
                assert answer.status == 200
            moved = int(await value(site, "signalbox_attempts_total", backend="a", outcome="error"))
        done = await value(site, "signalbox_requests_total", model="demo", reason="ok")
        assert await value(site, "signalbox_attempts_total", backend="b", outcome="done") == done
        assert await value(site, "signalbox_state_seconds_count", state="granted") == done
        states = await value(site, "signalbox_state_seconds_sum")
        assert states == pytest.approx(await value(site, "gen_ai_server_request_duration_seconds_sum"), abs=1e-6)


async def test_what_no_backend_could_take_is_counted_where_it_failed() -> None:
    async with Upstream("demo") as a, running(pool(a.url)) as site:
        a.script = Script(close_at=0)
        async with site.chat(max_tokens=2) as answer:
            assert answer.status == 503
        assert await value(site, "signalbox_attempts_total", backend="a", outcome="no_backend") == 1
        assert await value(site, "signalbox_attempts_total") == 1
