"""Requests of every kind through a real collector: the tree has exactly the expected spans."""

import asyncio
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from gateway.clock import now
from policies.lifecycle import State
from tests.support.collector import plain, rotel
from tests.support.site import POOL, running
from tests.support.upstream import Upstream
from tests.support.upstream_frames import Script
from tests.support.wire import chat_body, request, wire

TRACE_ID, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE_ID}-{CALLER}-01", f"00-{TRACE_ID}-{CALLER}-00"
ONE_PLACE = POOL.replace("max_running = 4", "max_running = 1")
SLOW = ONE_PLACE.replace("a0_ms = 1.0", "a0_ms = 5.0")
ENDLESS = {"max_tokens": 8_000, "min_tokens": 8_000}


def telemetry(url: str, *lines: str) -> str:
    return "\n".join(["[telemetry]", f'otlp_url = "{url}"', *lines, ""])


def remote(*upstreams: Upstream) -> str:
    backends = [
        f'[[pool.backend]]\nkind = "openai"\nname = "{"ab"[nth]}"\nurl = "{one.url}"\n'
        for nth, one in enumerate(upstreams)
    ]
    return "\n".join(['[[pool]]\nmodel = "demo"', *backends])


@pytest.mark.parametrize("way", ["http", "grpc"])
async def test_a_streamed_answer(tmp_path: Path, way: str) -> None:
    async with rotel(tmp_path) as collector:
        url = getattr(collector, way)
        async with running(telemetry(url) + POOL) as site:
            headers = {"x-request-id": "r-1", "x-priority-class": "batch"}
            async with site.chat(stream=True, max_tokens=5, min_tokens=5, headers=headers) as answer:
                assert answer.status == 200
                await answer.read()
        trace = await collector.one()
    trace.check("validate", "admit", "queue", "prefill", "decode")
    server = trace.server
    assert (server.name, server.parent_span_id, server.status.code) == ("POST /v1/chat/completions", b"", 0)
    assert all(one.kind == Span.SPAN_KIND_INTERNAL and not one.links for one in trace.children)
    said = plain(server.attributes)
    assert said.pop("signalbox.deadline.slack_ms") > 0
    assert 0 < said.pop("gen_ai.response.time_to_first_chunk") < 30
    assert said.pop("signalbox.bundle").startswith("simulated")
    assert said.pop("gen_ai.usage.input_tokens") == said.pop("signalbox.prompt_tokens") > 0
    assert said == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "simulated",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.output_tokens": 5,
        "signalbox.tenant": "default",
        "signalbox.class": "batch",
        "signalbox.backend": "one",
        "signalbox.outcome": "done",
        "signalbox.request_id": "r-1",
    }
    (resource,) = {one.resource.SerializeToString() for one in collector.resources}
    assert resource
    about = plain(collector.resources[0].resource.attributes)
    assert about["service.name"] == "signalbox"
    assert {"service.version", "service.instance.id", "host.name", "process.pid"} <= about.keys()


async def test_a_queued_request(tmp_path: Path) -> None:
    async with rotel(tmp_path) as collector, running(telemetry(collector.http) + SLOW) as site:
        holder = site.chat(stream=True, headers={"x-request-id": "holder"}, **ENDLESS)
        async with holder as answer:
            await answer.content.readany()
            waiting = asyncio.ensure_future(_read(site.chat(max_tokens=2, headers={"traceparent": SAMPLED})))
            await site.until(lambda: [one.state for one in site.live()] == [State.STREAMING, State.QUEUED])
            await asyncio.sleep(0.05)  # so that the time in the queue is known to be at least this
        assert await waiting == 200
        trace = (await collector.until(lambda traces: TRACE_ID in traces))[TRACE_ID]
    trace.check("validate", "admit", "queue", "prefill", "decode")
    (queue,) = trace.named("queue")
    assert queue.end_time_unix_nano - queue.start_time_unix_nano >= 50_000_000
    assert trace.server.parent_span_id.hex() == CALLER


async def test_a_cancelled_answer(tmp_path: Path) -> None:
    async with (
        rotel(tmp_path) as collector,
        Upstream("demo", itl_s=0.005) as upstream,
        running(telemetry(collector.grpc) + remote(upstream)) as site,
    ):
        async with wire(site) as line:
            await line.send(request(chat_body(stream=True, **ENDLESS)))
            await line.head()
            await line.part()
            line.leave()
            await site.until(lambda: not site.live())
        trace = await collector.one()
        await upstream.until(lambda: upstream.aborted == 1)
    trace.check("validate", "admit", "queue", "prefill", "decode", "cancel")
    (decode,) = trace.named("decode")
    assert plain(decode.attributes)["error.type"] == "client_gone"
    said = plain(trace.server.attributes)
    assert (said["signalbox.outcome"], said["signalbox.reason"]) == ("cancelled", "client_gone")
    assert trace.server.status.code == Status.STATUS_CODE_UNSET


async def test_cancelled_in_the_queue_there_is_no_engine_to_stop(tmp_path: Path) -> None:
    async with (
        rotel(tmp_path) as collector,
        running(telemetry(collector.http) + SLOW) as site,
        site.chat(stream=True, **ENDLESS) as answer,
    ):
        await answer.content.readany()
        async with wire(site) as line:
            await line.send(request(chat_body(), f"traceparent: {SAMPLED}"))
            await site.until(lambda: [one.state for one in site.live()] == [State.STREAMING, State.QUEUED])
            line.leave()
            trace = (await collector.until(lambda traces: TRACE_ID in traces))[TRACE_ID]
    trace.check("validate", "admit", "queue")


async def test_refused_requests(tmp_path: Path) -> None:
    full = "[store]\nmax_queued = 0\n"
    async with (
        rotel(tmp_path) as collector,
        running(full + telemetry(collector.http) + SLOW) as site,
        site.chat(stream=True, headers={"traceparent": UNSAMPLED}, **ENDLESS) as answer,
    ):
        await answer.content.readany()
        assert await _read(site.chat(headers={"traceparent": SAMPLED})) == 429
        trace = (await collector.until(lambda traces: TRACE_ID in traces))[TRACE_ID]
        async with site.client.post(f"{site.url}/v1/chat/completions", data=b"[]", headers=JSON) as bad:
            assert bad.status == 400
        traces = await collector.until(lambda traces: len(traces) == 2)
    trace.check("validate", "admit", "queue")
    assert plain(trace.named("queue")[0].attributes)["error.type"] == "queue_full"
    said = plain(trace.server.attributes)
    assert (said["http.response.status_code"], said["signalbox.outcome"]) == (429, "refused")
    assert trace.server.status.code == Status.STATUS_CODE_UNSET
    (other,) = [one for trace_id, one in traces.items() if trace_id != TRACE_ID]
    other.check("validate")
    assert plain(other.server.attributes)["signalbox.reason"] == "invalid_request"


async def test_a_retried_request_and_what_its_engines_were_told(tmp_path: Path) -> None:
    async with rotel(tmp_path) as collector, Upstream("demo") as a, Upstream("demo") as b:
        a.script = b.script = Script(hold_at=0, status=500)
        async with running(telemetry(collector.http) + remote(a, b)) as site:
            headers = {"traceparent": SAMPLED, "tracestate": "vendor=1"}
            asked = asyncio.ensure_future(_read(site.chat(max_tokens=2, stream=True, headers=headers)))
            await site.until(lambda: a.running + b.running == 1)
            broken, well = (a, b) if a.running else (b, a)
            well.script = Script()
            broken.release()
            assert await asked == 200
            trace = await collector.one()
    trace.check("validate", "admit", "queue", "prefill", "queue", "prefill", "decode")
    failed, worked = trace.named("prefill")
    names = {a.url: "a", b.url: "b"}
    assert plain(failed.attributes) == {"signalbox.backend": names[broken.url], "error.type": "BackendError"}
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert plain(worked.attributes) == {"signalbox.backend": names[well.url]}
    (link,) = trace.named("queue")[1].links
    assert (link.trace_id.hex(), link.span_id) == (TRACE_ID, failed.span_id)
    assert not trace.named("queue")[0].links
    (event,) = trace.server.events
    assert (event.name, event.time_unix_nano) == ("signalbox.retry", failed.end_time_unix_nano)
    assert plain(event.attributes) == {"signalbox.backend": names[broken.url], "error.type": "BackendError"}
    assert plain(trace.server.attributes)["signalbox.retries"] == 1
    assert all(one.trace_state == "vendor=1" for one in trace.spans)
    told = [one.headers for one in (*a.generations, *b.generations)]
    assert len(told) == 2
    for headers in told:
        assert headers["traceparent"] == f"00-{TRACE_ID}-{trace.server.span_id.hex()}-01"
        assert headers["tracestate"] == "vendor=1"


async def test_what_is_not_sampled_is_kept_if_it_went_wrong(tmp_path: Path) -> None:
    async with rotel(tmp_path) as collector, Upstream("demo") as upstream:
        lines = telemetry(collector.http, "trace_ratio = 0.0", "keep_per_s = 2")
        async with running(lines + remote(upstream)) as site:
            assert await _read(site.chat(max_tokens=1)) == 200
            assert await _read(site.chat(headers={"authorization": "no"}, nonsense=1, model="other")) == 404
            upstream.script = Script(status=400)
            assert await _read(site.chat(max_tokens=1)) == 400
            upstream.script = Script(tokens=4, error_at=2)
            assert await _read(site.chat(max_tokens=4, stream=True, headers={"traceparent": UNSAMPLED})) == 200
            trace = await collector.one()
            upstream.script = Script(hold_at=0)
            late = asyncio.ensure_future(_read(site.chat(max_tokens=1, stream=True, headers={"x-slo-ttft-ms": "1500"})))
            await site.until(lambda: [one.state for one in site.live()] == [State.GRANTED])
            (exchange,) = site.live()
            await site.until(lambda: exchange.job is not None and now() > exchange.job.first_by)
            upstream.release()
            assert await late == 200
            traces = await collector.until(lambda traces: len(traces) == 2)
        flags = [one.headers["traceparent"].rpartition("-")[2] for one in upstream.generations]
        assert [int(flag, 16) & 1 for flag in flags] == [0] * len(flags)
    trace.check("validate", "admit", "queue", "prefill", "decode")
    assert (trace.server.trace_id.hex(), trace.server.parent_span_id.hex()) == (TRACE_ID, CALLER)
    said = plain(trace.server.attributes)
    assert (said["signalbox.kept"], said["signalbox.reason"]) == ("failed", "engine_error")
    assert trace.server.status.code == trace.named("decode")[0].status.code == Status.STATUS_CODE_ERROR
    (slow,) = [one for trace_id, one in traces.items() if trace_id != TRACE_ID]
    assert plain(slow.server.attributes)["signalbox.kept"] == "slow"
    assert plain(slow.server.attributes)["signalbox.deadline.slack_ms"] < 0


async def test_without_a_collector_requests_go_on_and_the_end_is_not_held_up() -> None:
    async with running(telemetry("http://127.0.0.1:9") + POOL) as site:
        for _ in range(20):
            assert await _read(site.chat(max_tokens=1)) == 200
        began = asyncio.get_running_loop().time()
        await site.trunk.telemetry.aclose()
        assert asyncio.get_running_loop().time() - began < 5


async def test_nothing_is_traced_unless_asked_for() -> None:
    async with Upstream("demo") as upstream, running(remote(upstream)) as site:
        assert await _read(site.chat(max_tokens=1)) == 200
        assert await _read(site.chat(max_tokens=1, headers={"traceparent": SAMPLED, "tracestate": "a=b"})) == 200
        first, second = upstream.generations
    assert not {"traceparent", "tracestate"} & first.headers.keys()
    assert (second.headers["traceparent"], second.headers["tracestate"]) == (SAMPLED, "a=b")


async def _read(asking: object) -> int:
    async with asking as answer:  # type: ignore[attr-defined]
        await answer.read()
        status: int = answer.status
        return status


JSON = {"content-type": "application/json"}
