"""The remote backend against a scripted upstream: requests, refusals, failures, leaving, gauges."""

import asyncio
import json
import random

import pytest

from backends.openai import OpenAI, RemoteEngine
from backends.protocol import (
    BackendBusy,
    BackendError,
    BackendLost,
    Gauge,
    Kind,
    Refused,
    Usage,
)
from tests.contract.bench import events, to_end
from tests.contract.remote.asking import ask, prompt, start
from tests.contract.remote.conftest import settled
from tests.support.fault_server import Do, FaultServer, closing, sized
from tests.support.upstream import Upstream
from tests.support.upstream_frames import Script


async def test_bytes_pass_and_usage_is_hidden(engine: RemoteEngine, upstream: Upstream) -> None:
    shown = b"".join(chunk.data for chunk in await ask(engine, usage=True))
    hidden = b"".join(chunk.data for chunk in await ask(engine))
    usage = next(one for one in shown.split(b"\n\n") if b'"choices":[]' in one) + b"\n\n"
    assert hidden == shown.replace(usage, b"")
    assert upstream.generations[0].body == prompt(usage=True).body
    assert upstream.generations[1].json()["stream_options"] == {"include_usage": True}


async def test_an_unstreamed_answer_passes_as_it_is(engine: RemoteEngine) -> None:
    (chunk,) = await ask(engine, stream=False)
    assert chunk.usage == Usage(2, 5)
    assert (chunk.tokens, chunk.last) == (5, True)
    assert json.loads(chunk.data)["choices"][0]["message"]["content"] == " the box hands a token"


async def test_other_apis_pass_by_their_path(engine: RemoteEngine, upstream: Upstream) -> None:
    (chunk,) = await ask(engine, kind=Kind.EMBEDDINGS, stream=False, body=b'{"model":"m","input":"x"}')
    assert json.loads(chunk.data)["data"][0]["embedding"] == [0.25, -0.5]
    assert chunk.usage == Usage(3)
    (chunk,) = await ask(engine, kind=Kind.TOKENIZE, stream=False, body=b'{"model":"m","prompt":"x"}')
    assert json.loads(chunk.data)["count"] == 3
    assert [one.path for one in upstream.seen[-2:]] == ["/v1/embeddings", "/tokenize"]
    completion = await ask(
        engine, kind=Kind.COMPLETION, body=b'{"model":"m","prompt":"x","stream":true,"max_tokens":2}'
    )
    assert [frame for frame in events(b"".join(c.data for c in completion))][-1] == "[DONE]"


async def test_headers(engine: RemoteEngine, upstream: Upstream) -> None:
    headers = (
        ("x-request-id", "r1"),
        ("authorization", "Bearer the-clients"),
        ("host", "evil"),
        ("content-length", "0"),
        ("x-split", "a\r\nx-injected: 1"),
        ("x-nul", "a\0"),
        ("x-latin", "é"),
        ("x-empty", ""),
    )
    await ask(engine, headers=headers, trace=(("traceparent", "00-1-2-01"), ("tracestate", "a=1")))
    sent = upstream.generations[0].headers
    assert (sent["x-request-id"], sent["traceparent"], sent["tracestate"]) == ("r1", "00-1-2-01", "a=1")
    assert not sent.keys() & {
        "authorization",
        "x-split",
        "x-injected",
        "x-nul",
        "x-latin",
        "x-empty",
        "accept-encoding",
    }
    assert sent["host"] == upstream.url.removeprefix("http://")


async def test_streams_keep_their_connection(engine: RemoteEngine, upstream: Upstream) -> None:
    for n in range(12):
        await ask(engine, stream=bool(n % 2))
        await settled(engine.pool)
    assert upstream.connections == 1


async def test_prompt_tokens_are_learned(engine: RemoteEngine) -> None:
    assert engine.bytes_per_token == 4.0
    size = len(prompt().body)
    assert (await engine.plan(prompt())).prompt_tokens == size // 4
    for _ in range(300):
        await ask(engine, stream=False)
    assert engine.bytes_per_token == 16.0  # the true ratio is beyond what is believed
    plan = await engine.plan(prompt())
    assert (plan.prompt_tokens, plan.exact, plan.output_limit) == (size // 16, False, 5)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_bad_request(engine: RemoteEngine, upstream: Upstream, stream: bool) -> None:
    body = '{"error":{"message":"no such thing","type":"BadRequestError","param":"top_p","code":400}}'
    upstream.script = Script(status=400, body=body)
    with pytest.raises(Refused) as refused:
        await ask(engine, stream=stream)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_request", "top_p")
    assert refused.value.body == body.encode()
    await settled(engine.pool)
    assert engine.pool.made == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_engine(engine: RemoteEngine, upstream: Upstream, stream: bool, status: int) -> None:
    upstream.script = Script(status=status, headers={"retry-after-ms": "1500"})
    with pytest.raises(BackendBusy, match="scripted") as busy:
        await ask(engine, stream=stream)
    assert busy.value.retry_after_s == 1.5


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "script",
    [
        Script(status=500),
        Script(status=401),
        Script(content_type="text/html"),
        Script(status=500, body="x" * 3_000_000),
    ],
)
async def test_a_failing_engine(engine: RemoteEngine, upstream: Upstream, stream: bool, script: Script) -> None:
    upstream.script = script
    with pytest.raises(BackendError):
        await ask(engine, stream=stream)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("reset", [True, False])
async def test_an_engine_that_goes_away(
    engine: RemoteEngine, upstream: Upstream, stream: bool, at: int, reset: bool
) -> None:
    upstream.scripts.append(Script(close_at=at, reset=reset))
    upstream.scripts.append(Script(close_at=at, reset=reset))  # for the retry of a kept connection
    with pytest.raises(BackendLost):
        await ask(engine, stream=stream)


async def test_a_stream_until_close(engine: RemoteEngine, upstream: Upstream) -> None:
    upstream.scripts.append(Script(until_close=True))
    assert (await ask(engine))[-1].usage == Usage(2, 5)
    upstream.scripts.append(Script(until_close=True, done=False))
    with pytest.raises(BackendLost):
        await ask(engine)


async def test_a_stream_without_done(engine: RemoteEngine, upstream: Upstream) -> None:
    upstream.scripts.append(Script(done=False))
    chunks = await ask(engine)
    assert chunks[-1].usage == Usage(2, 5)


async def test_an_error_in_the_stream(engine: RemoteEngine, upstream: Upstream) -> None:
    upstream.scripts.append(Script(error_at=2))
    stream = await start(engine)
    with pytest.raises(BackendError, match="scripted failure"):
        await to_end(stream)
    await stream.aclose()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (closing(b'{"choices":['), BackendLost),
        (sized(b'{"choices":['), BackendError),
        (sized(b"", media=b"application/json"), BackendError),
    ],
)
async def test_a_whole_answer_that_is_none(answer: bytes, error: type[Exception]) -> None:
    models = (sized(json.dumps({"data": [{"id": "m"}]}).encode()),)
    nothing = (sized(b"{}", b"404 Not Found"),)
    async with FaultServer(models, *[nothing] * 6, (answer, Do.FIN)) as server:
        backend = await OpenAI(name="far", url=server.url).connect("m")
        assert server.heard == 7
        with pytest.raises(error):
            await ask(backend, stream=False)
        await backend.aclose()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hold_at", [0, 2])
async def test_the_engine_hears_of_a_leaver_within_100_ms(
    engine: RemoteEngine, upstream: Upstream, stream: bool, hold_at: int
) -> None:
    upstream.script = Script(hold_at=hold_at)
    task = asyncio.ensure_future(ask(engine, stream=stream))
    await upstream.until(lambda: upstream.running == 1)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await upstream.until(lambda: (upstream.running, upstream.aborted) == (0, 1), 0.1)


async def test_many_leavers_leave_nothing(engine: RemoteEngine, upstream: Upstream) -> None:
    upstream.itl_s = 0.001
    dice = random.Random(7)

    async def leave() -> None:
        task = asyncio.ensure_future(ask(engine, stream=dice.random() < 0.7))
        await asyncio.wait([task], timeout=dice.random() * 0.02)
        task.cancel()
        await asyncio.wait([task])

    for _ in range(20):
        await asyncio.gather(*(leave() for _ in range(20)))
    await upstream.until(lambda: upstream.running == 0, 1.0)
    await settled(engine.pool)
    assert upstream.aborted > 20
    assert upstream.completed > 20
    assert len(asyncio.all_tasks()) < 30


async def test_a_slow_reader_holds_the_engine_back(engine: RemoteEngine, upstream: Upstream) -> None:
    upstream.script = Script(tokens=2000, chunk="x" * 32768)
    stream = await start(engine)
    before = -1
    while before != upstream.sent_bytes:
        before = upstream.sent_bytes
        await asyncio.sleep(0.05)
    assert before < 16 << 20  # of 64 MiB; what the kernel's buffers take, and a little
    largest = 0
    total = 0
    while (chunk := await stream.next()) is not None:
        largest = max(largest, len(chunk.data))
        total += chunk.tokens
    await stream.aclose()
    assert total == 2000
    assert largest < 1 << 20


async def test_silence_in_the_middle(upstream: Upstream) -> None:
    upstream.script = Script(hold_at=2)
    backend = await OpenAI(name="far", url=upstream.url, idle_s=0.1, first_byte_s=5.0).connect("m")
    with pytest.raises(BackendLost, match="silent"):
        await ask(backend)
    await upstream.until(lambda: upstream.aborted == 1, 0.1)
    await backend.aclose()


async def test_no_answer_in_time(upstream: Upstream) -> None:
    upstream.script = Script(hold_at=0)
    backend = await OpenAI(name="far", url=upstream.url, first_byte_s=0.1).connect("m")
    for stream in (True, False):
        with pytest.raises(BackendLost, match="no answer"):
            await ask(backend, stream=stream)
    await backend.aclose()


async def test_the_gauge(engine: RemoteEngine, upstream: Upstream) -> None:
    upstream.script = Script(hold_at=1)
    stream = await start(engine)
    assert await engine.gauge() == Gauge(running=1, waiting=0, kv_used=0.25, preemptions=2)
    upstream.release()
    await to_end(stream)
    await stream.aclose()
    await upstream.until(lambda: upstream.running == 0)
    assert await engine.gauge() == Gauge(running=0, waiting=0, kv_used=0.25, preemptions=2)
    upstream.metrics = False
    with pytest.raises(BackendLost, match="/metrics answers 404"):
        await engine.gauge()
    await upstream.aclose()
    with pytest.raises(BackendLost):
        await engine.gauge()


async def test_after_its_end_it_is_lost(engine: RemoteEngine) -> None:
    await engine.aclose()
    await engine.aclose()
    with pytest.raises(BackendLost):
        await ask(engine)
    with pytest.raises(BackendLost):
        await engine.gauge()


async def test_too_many_connections_is_busy(upstream: Upstream) -> None:
    upstream.script = Script(hold_at=1)
    backend = await OpenAI(name="far", url=upstream.url, max_connections=1).connect("m")
    stream = await start(backend)
    with pytest.raises(BackendBusy):
        await ask(backend)
    await stream.aclose()
    await backend.aclose()


async def test_a_plan_is_for_its_maker_and_open_once_closed(engine: RemoteEngine) -> None:
    plan = await engine.plan(prompt())
    plan.close()
    with pytest.raises(TypeError, match="closed"):
        await engine.open(plan)


async def test_a_body_that_is_no_object(engine: RemoteEngine) -> None:
    with pytest.raises(Refused) as refused:
        await engine.plan(prompt(body=b"[]"))
    assert (refused.value.status, refused.value.code) == (400, "invalid_request")
