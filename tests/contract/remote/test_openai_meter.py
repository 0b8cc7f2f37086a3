"""The load of trtllm-serve: its Prometheus page, its drained statistics, or neither."""

from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest

from backends import openai_meter
from backends.openai import OpenAI
from backends.openai_meter import Source
from backends.protocol import BackendError, BackendLost, Gauge
from backends.trtllm_stats import KEPT_STEPS, Iterations
from tests.contract.remote.test_openai_frames import TRTLLM
from tests.support.fault_server import Do, FaultServer, sized
from tests.support.upstream import Upstream

# as TensorRT-LLM's own tests and documentation have them
BUSY: dict[str, Any] = {
    "iter": 154,
    "numActiveRequests": 5,
    "numQueuedRequests": 3,
    "numCompletedRequests": 2,
    "maxNumActiveRequests": 10,
    "iterLatencyMS": 15.5,
    "gpuMemUsage": 76665782272,
    "maxBatchSizeStatic": 64,
    "kvCacheStats": {
        "allocNewBlocks": 3126,
        "cacheHitRate": 0.85,
        "maxNumBlocks": 1000,
        "freeNumBlocks": 400,
        "usedNumBlocks": 600,
        "tokensPerBlock": 64,
    },
    "inflightBatchingStats": {
        "numContextRequests": 2,
        "numGenRequests": 3,
        "numPausedRequests": 1,
        "numScheduledRequests": 5,
        "numCtxTokens": 256,
        "avgNumDecodedTokensPerIter": 4.5,
    },
}
LATER = BUSY | {"iter": 155, "iterLatencyMS": 10, "numActiveRequests": 4, "numQueuedRequests": 0}


@pytest.fixture
async def serve() -> AsyncIterator[Upstream]:
    """A trtllm-serve whose statistics are in `told`, and gone once they are read."""
    async with Upstream("m", owner="tensorrt_llm") as site:
        yield site


def drained(told: deque[Any]) -> Any:
    def page() -> list[Any]:
        all_of_it = list(told)
        told.clear()
        return all_of_it

    return page


async def connect(site: Upstream, metrics: Source = "auto") -> Any:
    return await OpenAI(name="far", url=site.url, metrics=metrics).connect("m")


async def test_its_prometheus_page_is_found_and_the_drained_one_left_alone(serve: Upstream) -> None:
    told = deque([BUSY])
    serve.pages = {"/metrics": drained(told), "/prometheus/metrics": TRTLLM.decode()}
    backend = await connect(serve)
    bundle = backend.bundle
    assert (bundle.engine, bundle.max_running, bundle.kv_tokens) == ("trtllm", 64, 64_000)
    assert await backend.gauge() == Gauge(running=5, waiting=3, kv_used=0.6)
    assert len(told) == 1
    assert "/metrics" not in {seen.path for seen in serve.seen}
    await backend.aclose()


async def test_without_perf_metrics_its_health_is_watched(serve: Upstream) -> None:
    serve.pages = {"/metrics": drained(deque([BUSY]))}
    for source in ("auto", "none"):
        backend = await connect(serve, source)  # type: ignore[arg-type]
        assert backend.bundle.engine == "trtllm"
        assert await backend.gauge() == Gauge()
        assert serve.seen[-1].path == "/health"
        assert "/metrics" not in {seen.path for seen in serve.seen}
        await backend.aclose()


async def test_iterations_are_gauges_and_steps(serve: Upstream) -> None:
    told: deque[Any] = deque()
    serve.pages = {"/metrics": drained(told)}
    backend = await connect(serve, "iterations")
    assert await backend.gauge() == Gauge()
    told += [BUSY, LATER]
    steps = ((256, 3, 38_400, 0.0155), (256, 3, 38_400, 0.01))
    assert await backend.gauge() == Gauge(running=4, waiting=0, kv_used=0.6, steps=steps)
    assert await backend.gauge() == Gauge(running=0, waiting=0, kv_used=0.6)
    await backend.aclose()


async def test_what_is_no_statistics_is_an_error(serve: Upstream) -> None:
    backend = await connect(serve, "iterations")
    for page in ({"detail": "none"}, [{"iterLatencyMS": "fast"}], ["x"]):
        serve.pages = {"/metrics": page}
        with pytest.raises(BackendError, match="/metrics"):
            await backend.gauge()
    await backend.aclose()


async def of(server: FaultServer) -> openai_meter.ByIterations:
    site, _ = await OpenAI(name="odd", url=server.url)._site()
    return openai_meter.ByIterations(site, "/health")


async def test_a_server_that_holds_its_statistics_back_is_still_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older ones answer only once the engine has been silent for two seconds."""
    monkeypatch.setattr(openai_meter, "ITERATIONS_S", 0.05)
    async with FaultServer((Do.HANG,), (sized(b""),)) as server:
        meter = await of(server)
        assert await meter.gauge() == Gauge()
        assert [heard[0].split()[1] for heard in server.requests] == [b"/metrics", b"/health"]
        meter._site.pool.close()


async def test_a_sick_server_is_lost() -> None:
    async with FaultServer((sized(b"", b"503 Service Unavailable"),)) as server:
        meter = await of(server)
        with pytest.raises(BackendLost, match="/metrics answers 503"):
            await meter.gauge()
        meter._site.pool.close()


def test_steps_are_kept_up_to_a_bound() -> None:
    iterations = Iterations()
    for _ in range(3):
        iterations.add([BUSY] * KEPT_STEPS)
    assert iterations.kv_tokens == 64_000
    assert len(iterations.gauge().steps) == KEPT_STEPS
    assert iterations.gauge().steps == ()


def test_steps_that_say_too_little_are_no_steps() -> None:
    iterations = Iterations()
    iterations.add({})
    iterations.add({"numActiveRequests": 1, "iterLatencyMS": 5.0})
    iterations.add({"numActiveRequests": 2, "inflightBatchingStats": {"numCtxTokens": 7}, "kvCacheStats": None})
    assert iterations.gauge() == Gauge(running=2)
