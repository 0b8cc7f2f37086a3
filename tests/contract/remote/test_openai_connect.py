"""Connecting the remote backend: what it reads of a server, keys, TLS, and configuration that is wrong."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.features import Feature
from backends.openai import OpenAI, RemoteEngine, list_models
from backends.openai_probe import ModelCard
from backends.protocol import (
    BackendError,
    BackendLost,
    Gauge,
    Kind,
    Limits,
    Refused,
    Usage,
)
from tests.contract.remote.asking import ask, prompt
from tests.contract.remote.wire import CERTS, server_tls
from tests.support.fault_server import Do, FaultServer, chunked, sized
from tests.support.upstream import Upstream


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


async def test_the_upstreams_own_name(upstream: Upstream) -> None:
    backend = await OpenAI(name="far", url=upstream.url + "/v1", model="other").connect("m")
    await ask(backend)
    assert upstream.generations[0].json()["model"] == "other"
    assert backend.bundle.model == "other"
    await backend.aclose()


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
