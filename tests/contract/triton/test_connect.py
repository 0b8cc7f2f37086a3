"""What is found at a Triton server, how the settings win, and what keeps a backend from being connected."""

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web

from backends.protocol import BackendError, BackendLost, Kind
from backends.triton import Triton
from tests.contract.triton.asking import ask, connected, prompt
from tests.contract.triton.fake import FakeModel, FakeTriton, error, inflight, llmapi
from tests.engines.triton_models import tensors

CERTS = Path(__file__).parents[2] / "support" / "certs"


def bls() -> FakeModel:
    return FakeModel("tensorrt_llm_bls", tensors.ENSEMBLE_IN, tensors.TEXT_OUT, backend="python", batcher=False)


@pytest.mark.parametrize(
    ("models", "settings", "entry", "dialect"),
    [
        (inflight, {}, "tensorrt_llm", "inflight-tokens"),
        (inflight, {"tokenizer": ""}, "ensemble", "inflight-ensemble"),
        (inflight, {"model": "ensemble"}, "ensemble", "inflight-ensemble"),
        (inflight, {"model": "tensorrt_llm"}, "tensorrt_llm", "inflight-tokens"),
        (inflight, {"dialect": "inflight-ensemble"}, "ensemble", "inflight-ensemble"),
        (llmapi, {}, "tensorrt_llm", "llmapi"),
        (llmapi, {"tokenizer": ""}, "tensorrt_llm", "llmapi"),
    ],
)
async def test_the_dialect_is_found(models: Any, settings: Any, entry: str, dialect: str, tokenizer: Path) -> None:
    async with FakeTriton(*models()) as fake, connected(fake, tokenizer, **settings) as backend:
        assert f"{entry} as {dialect}," in repr(backend)
        assert backend.bundle.driver == f"triton 2.51.0, {dialect}"
        has_words = settings.get("tokenizer") is None
        assert (Kind.CHAT.value in backend.bundle.kinds) == has_words
        answer = await ask(backend, prompt(kind=Kind.COMPLETION))
        assert answer.usage.completion_tokens == 8
        if dialect == "llmapi":
            assert backend.bundle.max_running == 32  # nothing says how many it could have


@pytest.mark.parametrize(
    ("models", "settings", "said"),
    [
        ([bls()], {}, "this Triton has none of tensorrt_llm, ensemble but tensorrt_llm_bls: set the backend's model"),
        ([bls()], {"model": "tensorrt_llm_bls"}, "can't be cancelled"),
        (inflight(), {"model": "nope"}, "this Triton has no model 'nope'; it has ensemble, tensorrt_llm"),
        (inflight(), {"model": "tensorrt_llm", "tokenizer": ""}, "takes token ids: set tokenizer"),
        (llmapi(), {"dialect": "inflight-tokens"}, "inflight-tokens is set, but the server has tensorrt_llm (llmapi)"),
        (
            llmapi(),
            {"dialect": "inflight-ensemble", "model": "tensorrt_llm"},
            "inflight-ensemble needs max_tokens, which the Triton model 'tensorrt_llm' does not have",
        ),
        ([], {}, "it has none"),
        ([FakeModel("tensorrt_llm", "x INT32 1", "y INT32 1")], {}, "tensorrt_llm (no known layout)"),
    ],
)
async def test_what_cannot_be_served(models: list[FakeModel], settings: Any, said: str, tokenizer: Path) -> None:
    async with FakeTriton(*models) as fake:
        with pytest.raises(BackendError) as caught:
            async with connected(fake, tokenizer, **settings):
                pass
        assert said.replace("it has none", "none of") in str(caught.value)


async def test_models_that_are_not_ready(tokenizer: Path) -> None:
    models = inflight()
    models[0].state, models[0].reason = "UNAVAILABLE", "unloaded"
    async with FakeTriton(*models) as fake:
        with pytest.raises(BackendLost, match="'tensorrt_llm' is not ready: version 1 is UNAVAILABLE unloaded"):
            async with connected(fake, tokenizer):
                pass
        fake.ready = False
        with pytest.raises(BackendLost, match="Triton is not ready"):
            async with connected(fake, tokenizer):
                pass
    with pytest.raises(BackendLost, match="UNAVAILABLE"):
        async with connected(fake, tokenizer):
            pass


async def test_an_engine_that_does_not_answer_is_not_connected(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake:

        async def dead(request: Any, context: Any) -> AsyncIterator[Any]:
            yield error("Stub process 'tensorrt_llm_0_0' is not healthy.")

        fake.behave = dead
        with pytest.raises(BackendLost, match="not healthy"):
            async with connected(fake, tokenizer):
                pass


async def test_a_silent_engine_is_found_dead_by_the_canary(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer, canary_s=0.05) as backend:

        async def dead(request: Any, context: Any) -> AsyncIterator[Any]:
            yield error("Stub process 'tensorrt_llm_0_0' is not healthy.")

        assert (await backend.gauge()).running is None
        fake.behave = dead
        with pytest.raises(BackendLost, match="the canary found: Triton says: Stub process"):
            async with asyncio.timeout(10):
                while True:
                    await backend.gauge()
                    await asyncio.sleep(0.01)


async def test_a_busy_engine_is_not_asked(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer, canary_s=30) as backend:
        await ask(backend, prompt())
        await backend.gauge()
        assert sum(request.id.startswith("canary") for request in fake.seen) == 1  # the one at connect


async def test_an_unloaded_model_and_a_gone_server_are_lost(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer) as backend:
        await backend.gauge()
        fake.models["tensorrt_llm"].state = "UNAVAILABLE"
        with pytest.raises(BackendLost, match="not loaded any more"):
            await backend.gauge()
        await fake.kill()
        with pytest.raises(BackendLost, match="UNAVAILABLE"):
            await backend.gauge()


@contextlib.asynccontextmanager
async def page(text: str, status: int = 200) -> AsyncIterator[str]:
    """A metrics page with this text."""

    async def get(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    app = web.Application()
    app.router.add_get("/metrics", get)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}/metrics"
    finally:
        await runner.cleanup()


PAGE = """\
# HELP nv_trt_llm_request_metrics TRT LLM request metrics
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 7
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 12
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 5
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="other",request_type="scheduled",version="1"} 99
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 100
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.25
nv_inference_pending_request_count{model="tensorrt_llm",version="1"} 3
nv_inference_pending_request_count{model="other",version="1"} 50
nv_inference_pending_request_count{model="broken",version="1"} lots
nv_gpu_utilization 0.5
"""


async def test_the_engines_numbers(tokenizer: Path) -> None:
    async with (
        page(PAGE) as url,
        FakeTriton(*inflight()) as fake,
        connected(fake, tokenizer, metrics_url=url) as backend,
    ):
        assert (backend.bundle.max_running, backend.bundle.kv_tokens) == (12, 6_400)
        gauge = await backend.gauge()
        assert (gauge.running, gauge.waiting, gauge.kv_used) == (5, 5, 0.25)
        await ask(backend, prompt())
        assert any(one.name == "return_perf_metrics" for one in fake.seen[-1].inputs)


async def test_a_metrics_page_without_them_or_none_at_all(tokenizer: Path) -> None:
    models = inflight()
    models[0].parameters["max_tokens_in_paged_kv_cache"] = "10000"
    async with (
        page("nv_gpu_utilization 0.5\n") as url,
        FakeTriton(*models) as fake,
        connected(fake, tokenizer, metrics_url=url) as backend,
    ):
        assert (await backend.gauge()).running is None
        assert backend.bundle.kv_tokens == 9_000  # less, as nothing would show that it runs full
        assert backend.bundle.max_running == 64  # what Triton's batcher lets through at once
    async with page("", status=404) as url, FakeTriton(*inflight()) as fake:
        with pytest.raises(BackendError, match=r"metrics_url: .* answers 404"):
            async with connected(fake, tokenizer, metrics_url=url):
                pass
    async with FakeTriton(*inflight()) as fake:
        with pytest.raises(BackendLost):
            async with connected(fake, tokenizer, metrics_url="http://127.0.0.1:9/metrics"):
                pass


async def test_a_metrics_page_that_goes_away_is_told_once(tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeTriton(*inflight()) as fake, contextlib.AsyncExitStack() as stack:
        async with page(PAGE) as url:
            backend = await stack.enter_async_context(connected(fake, tokenizer, metrics_url=url))
        for _ in range(3):
            assert (await backend.gauge()).running is None
        assert sum("metrics page" in record.message for record in caplog.records) == 1


async def test_tls(tokenizer: Path) -> None:
    pem = (CERTS / "server.pem").read_bytes()
    fake = FakeTriton(*inflight())
    await fake.start(credentials=grpc.ssl_server_credentials([(pem, pem)]))
    url = f"grpcs://localhost:{fake.port}"
    try:
        config = Triton(
            name="t", url=url, ca_file=str(CERTS / "ca.pem"), tokenizer=str(tokenizer), metrics_url="off", canary_s=0
        )
        backend: Any = await config.connect("demo")
        assert (await ask(backend, prompt())).usage.completion_tokens == 8
        await backend.aclose()
        with pytest.raises(BackendLost):
            await Triton(name="t", url=url, tokenizer=str(tokenizer), metrics_url="off", connect_s=1).connect("demo")
        missing = Triton(name="t", url=url, ca_file="/no/such.pem", tokenizer=str(tokenizer), metrics_url="off")
        with pytest.raises(BackendError, match="ca_file"):
            await missing.connect("demo")
    finally:
        await fake.kill()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "http://localhost:8001"}, "is not grpc://"),
        ({"url": "grpc://"}, "is not grpc://"),
        ({"url": "grpc://h:1/path"}, "more than host and port"),
        ({"url": "grpc://h:99999"}, "url"),
        ({"url": "unix:socket"}, "unix:/path/to/socket"),
        ({"url": "grpc://h", "ca_file": "x"}, "use grpcs://"),
        ({"url": "grpcs://h", "cert_file": "x"}, "belong together"),
        ({"url": "grpc://h", "api_key_env": "A", "api_key_file": "b"}, "both set"),
        ({"url": "grpc://h", "dialect": "inflight-tokens"}, "needs a tokenizer"),
        ({"url": "grpc://h", "metadata": {"grpc-timeout": "1"}}, "gRPC's own"),
        ({"url": "grpc://h", "api_key_header": "key-bin"}, "gRPC's own"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Triton(name="t", **settings)


async def test_keys_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    (tmp_path / "empty").write_text("\n")
    for given, said in (
        ({"api_key_env": "NO_SUCH_KEY"}, "api_key_env: there is no key in NO_SUCH_KEY"),
        ({"api_key_file": str(tmp_path / "none")}, "api_key_file"),
        ({"api_key_file": str(tmp_path / "empty")}, "api_key_file: there is no key"),
    ):
        with pytest.raises(BackendError, match=said):
            await Triton(name="t", url="grpc://127.0.0.1:9", **given).connect("demo")


async def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tritonclient" else there(name))
    with pytest.raises(ValueError, match=r"needs tritonclient.*pip install 'signalbox-gateway\[triton\]'"):
        await Triton(name="t", url="grpc://127.0.0.1:9").connect("demo")
