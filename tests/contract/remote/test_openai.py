"""The remote backend against a scripted upstream: connecting, requests, refusals, failures, leaving, gauges."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.features import Feature
from backends.openai import OpenAI, RemoteEngine, list_models
from backends.openai_probe import ModelCard
from backends.protocol import (
    BackendBusy,
    BackendError,
    BackendLost,
    Chunk,
    Gauge,
    Kind,
    Limits,
    Prompt,
    Refused,
    Stream,
    Usage,
)
from tests.contract.bench import events, to_end
from tests.contract.remote.conftest import settled
from tests.contract.remote.test_http1 import CERTS, server_tls
from tests.support.fault_server import Do, FaultServer, chunked, closing, sized
from tests.support.upstream import Upstream
from tests.support.upstream_frames import Script


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream("m", "other") as site:
        yield site


@pytest.fixture
async def engine(upstream: Upstream) -> AsyncIterator[RemoteEngine]:
    backend = await OpenAI(name="far", url=upstream.url).connect("m")
    yield backend
    await settled(backend.pool)
    await backend.aclose()


def prompt(stream: bool = True, usage: bool = False, **more: Any) -> Prompt:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 5}
    body |= {"stream": True} if stream else {}
    body |= {"stream_options": {"include_usage": True}} if usage else {}
    return Prompt(
        **{
            "kind": Kind.CHAT,
            "model": "m",
            "body": json.dumps(body).encode(),
            "stream": stream,
            "want_usage": usage,
            "has_stream_options": usage,
            "max_tokens": 5,
            **more,
        }
    )


async def start(engine: RemoteEngine, **fields: Any) -> Stream:
    return await engine.open(await engine.plan(prompt(**fields)))


async def ask(engine: RemoteEngine, **fields: Any) -> list[Chunk]:
    stream = await start(engine, **fields)
    try:
        return await to_end(stream)
    finally:
        await stream.aclose()


async def test_what_it_says_it_runs(engine: RemoteEngine, upstream: Upstream) -> None:
    bundle = engine.bundle
    assert (bundle.engine, bundle.engine_version, bundle.model) == ("vllm", "0.1.test", "m")
    assert (bundle.context_tokens, bundle.kv_tokens, bundle.max_running) == (4096, 2048, 0)
    assert bundle.kinds == {"chat", "completion", "embeddings", "tokenize"}
    assert bundle.lacks(frozenset(Feature)) == frozenset()
    assert repr(engine) == f"<RemoteEngine far: vllm m, <Pool {upstream.url}: 1 open, 1 idle, 0 retried>>"


async def test_a_server_that_says_little(upstream: Upstream) -> None:
    upstream.apis = ("/v1/models", "/v1/chat/completions")
    upstream.metrics = False
    upstream.owner = "somebody"
    config = OpenAI(
        name="far",
        url=upstream.url,
        kinds=frozenset({Kind.CHAT}),
        features=frozenset({Feature.TOOLS}),
        limits=Limits(max_running=3, kv_tokens=99),
    )
    backend = await config.connect("m")
    assert (backend.bundle.engine, backend.bundle.engine_version) == ("unknown", "")
    assert backend.bundle.kinds == {"chat"}
    assert (backend.bundle.max_running, backend.bundle.kv_tokens) == (3, 99)
    assert backend.bundle.lacks(frozenset({"tools", "logprobs"})) == {"logprobs"}
    assert await backend.gauge() == Gauge()
    assert upstream.seen[-1].path == "/v1/models"
    with pytest.raises(Refused) as refused:
        await backend.plan(prompt(kind=Kind.EMBEDDINGS, stream=False))
    assert refused.value.code == "unsupported_feature"
    await backend.aclose()


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


async def test_the_upstreams_own_name(upstream: Upstream) -> None:
    backend = await OpenAI(name="far", url=upstream.url + "/v1", model="other").connect("m")
    await ask(backend)
    assert upstream.generations[0].json()["model"] == "other"
    assert backend.bundle.model == "other"
    await backend.aclose()


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
        ("traceparent", "00-1-2-01"),
        ("authorization", "Bearer the-clients"),
        ("host", "evil"),
        ("content-length", "0"),
        ("x-split", "a\r\nx-injected: 1"),
        ("x-nul", "a\0"),
        ("x-latin", "é"),
        ("x-empty", ""),
    )
    await ask(engine, headers=headers)
    sent = upstream.generations[0].headers
    assert (sent["x-request-id"], sent["traceparent"]) == ("r1", "00-1-2-01")
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


async def test_the_model_must_be_listed(upstream: Upstream) -> None:
    with pytest.raises(BackendError, match=r"far: .* does not list 'x', but m, other"):
        await OpenAI(name="far", url=upstream.url).connect("x")
    await upstream.until(lambda: not upstream._live)


async def test_it_must_be_a_server_of_models(upstream: Upstream) -> None:
    with pytest.raises(BackendError, match="is the url right"):
        await OpenAI(name="far", url=upstream.url + "/elsewhere").connect("m")
    async with FaultServer((sized(b"{}", b"503 Service Unavailable"),)) as server:
        with pytest.raises(BackendLost, match="not ready"):
            await OpenAI(name="far", url=server.url).connect("m")
    with pytest.raises(BackendLost, match="cannot connect"):
        await OpenAI(name="far", url=server.url).connect("m")
    async with FaultServer((chunked(b"x", end=b"zz"), Do.HANG)) as server:
        with pytest.raises(BackendError, match="not HTTP"):
            await OpenAI(name="far", url=server.url).connect("m")


async def test_models_are_listed(upstream: Upstream) -> None:
    assert await list_models(upstream.url) == [ModelCard("m", "vllm", 4096), ModelCard("other", "vllm", 4096)]
    with pytest.raises(ValueError, match="url: 'nowhere'"):
        await list_models("nowhere")


async def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, upstream: Upstream) -> None:
    upstream.key = "s3cret"
    monkeypatch.setenv("ENGINE_KEY", " s3cret\n")
    config = OpenAI(name="far", url=upstream.url, api_key_env="ENGINE_KEY")
    backend = await config.connect("m")
    await ask(backend)
    assert upstream.generations[0].headers["authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(backend) + repr(config)
    await backend.aclose()
    monkeypatch.setenv("ENGINE_KEY", "wrong")
    with pytest.raises(BackendError, match="401: check api_key_env"):
        await config.connect("m")
    monkeypatch.delenv("ENGINE_KEY")
    with pytest.raises(BackendError, match="far: api_key_env: ENGINE_KEY is not set"):
        await config.connect("m")


async def test_the_key_comes_from_a_file(tmp_path: Path, upstream: Upstream) -> None:
    upstream.key = "s3cret"
    path = tmp_path / "key"
    config = OpenAI(name="far", url=upstream.url, api_key_file=str(path))
    with pytest.raises(BackendError, match=r"far: api_key_file: .*No such file"):
        await config.connect("m")
    path.write_text("\n")
    with pytest.raises(BackendError, match=r"far: api_key_file: .* is empty"):
        await config.connect("m")
    path.write_text("a\nb")
    with pytest.raises(BackendError, match="no header can carry"):
        await config.connect("m")
    path.write_text("s3cret\n")
    backend = await config.connect("m")
    await ask(backend)
    await backend.aclose()


async def test_https(tmp_path: Path) -> None:
    async with await Upstream("m").start(tls=server_tls()) as upstream:
        backend = await OpenAI(name="far", url=upstream.url, ca_file=str(CERTS / "ca.pem")).connect("m")
        assert (await ask(backend))[-1].usage == Usage(2, 5)
        assert (await ask(backend, stream=False))[-1].usage == Usage(2, 5)
        await backend.aclose()
        with pytest.raises(BackendLost, match="certificate"):
            await OpenAI(name="far", url=upstream.url).connect("m")
        insecure = await OpenAI(name="far", url=upstream.url, verify=False).connect("m")
        await insecure.aclose()
        with pytest.raises(BackendError, match=r"far: ca_file: .*none"):
            await OpenAI(name="far", url=upstream.url, ca_file=str(tmp_path / "none")).connect("m")


async def test_a_unix_socket(tmp_path: Path) -> None:
    async with await Upstream("m").start(unix=str(tmp_path / "s")) as upstream:
        backend = await OpenAI(name="far", url=upstream.url).connect("m")
        assert (await ask(backend))[-1].usage == Usage(2, 5)
        await backend.aclose()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"url": "engine:8000"}, "url: 'engine:8000' does not start"),
        ({"url": "http://u:p@engine"}, "url: a URL must not carry"),
        ({"url": "http://e", "api_key": "secret"}, "unknown field `api_key`"),
        ({"url": "http://e", "api_key_env": "A", "api_key_file": "b"}, "both set"),
        ({"url": "http://e", "ca_file": "x.pem"}, "ca_file means nothing"),
        ({"url": "unix:/e", "verify": False}, "verify means nothing"),
        ({"url": "http://e", "idle_s": 0}, r"idle_s"),
        ({"url": "http://e", "features": ["flying"]}, r"features"),
        ({}, "missing required field `url`"),
    ],
)
def test_configuration_errors_name_the_field(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.convert({"kind": "openai", "name": "far", **fields}, OpenAI)
