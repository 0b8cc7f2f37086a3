"""TensorRT-LLM in this process, by a stand-in for its package: what the contract does not say."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends import words
from backends.protocol import BackendError, BackendLost, Gauge, Kind, Prompt, Refused
from backends.trtllm import TrtLlm
from gateway.config import ConfigError, decode
from tests.contract.bench import Answer, to_end, until
from tests.support import fake_trtllm
from tests.support.fake_trtllm import LLM
from tests.support.tokenizers import byte_level, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(), tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def engine(folder: Path, **config: Any) -> AsyncIterator[tuple[Any, LLM]]:
    known = await asyncio.to_thread(words.load, str(folder))
    with fake_trtllm.install(known.encode(fake_trtllm.TEXT, special=False)):
        backend = await TrtLlm(name="trt", model=str(folder), **config).connect("m")
        try:
            yield backend, LLM.built[-1]
        finally:
            await backend.aclose()


def prompt(kind: Kind = Kind.CHAT, rank: int = 0, stream: bool = True, **fields: Any) -> Prompt:
    body: dict[str, Any] = {"model": "m", "stream": stream, **fields}
    if kind is Kind.CHAT:
        body.setdefault("messages", [{"role": "user", "content": "Hello"}])
    else:
        body.setdefault("prompt", "Hello")
    return Prompt(kind=kind, model="m", body=msgspec.json.encode(body), stream=stream, rank=rank, request_id="r-1")


async def answer(backend: Any, asked: Prompt) -> Answer:
    plan = await backend.plan(asked)
    return Answer(plan, await to_end(await backend.open(plan)), asked.stream)


async def params(backend: Any, llm: LLM, **fields: Any) -> Any:
    """What the engine was told of a request."""
    await answer(backend, prompt(max_tokens=2, **fields))
    return llm.made[-1].params


async def test_what_it_says_it_runs(folder: Path) -> None:
    args = {"max_batch_size": 4, "max_seq_len": 300, "kv_cache_config": {"free_gpu_memory_fraction": 0.5}}
    async with engine(folder, args=args) as (backend, llm):
        bundle = backend.bundle
        assert (bundle.engine, bundle.engine_version, bundle.precision) == ("tensorrt-llm", "1.2.1", "bfloat16")
        assert (bundle.context_tokens, bundle.max_running, bundle.kv_tokens) == (300, 4, 32_000)
        assert bundle.kinds == {"chat", "completion", "tokenize"}
        assert bundle.features == {"logprobs", "choices", "token_ids"}
        assert bundle.revision.startswith("sha256:")
        assert llm.kwargs["kv_cache_config"] == fake_trtllm.KvCacheConfig(free_gpu_memory_fraction=0.5)
        assert llm.kwargs["enable_iter_perf_stats"] is True
        assert repr(backend) == "<TrtLlmEngine trt TensorRT-LLM 1.2.1, 0 requests>"


async def test_its_text_is_whole(folder: Path) -> None:
    async with engine(folder) as (backend, _):
        plan = await backend.plan(prompt(max_tokens=150))
        read = Answer(plan, await to_end(await backend.open(plan)), True)
        said = fake_trtllm.TEXT * 9
        assert read.text()
        assert read.text() in said
        assert "🙂🚂" in read.text()
        assert read.frames[0]["system_fingerprint"] == "tensorrt-llm-1.2.1"


async def test_requests_in_its_words(folder: Path) -> None:
    async with engine(folder, args={"guided_decoding_backend": "xgrammar"}) as (backend, llm):
        said = await params(backend, llm)
        assert (said.temperature, said.top_p, said.top_k, said.end_id, said.pad_id) == (1.0, 1.0, None, 1, 1)
        assert said.detokenize is False
        said = await params(backend, llm, temperature=0, seed=-1, min_tokens=1, stop_token_ids=[400], bad_words=["x"])
        assert (said.temperature, said.top_k, said.seed) == (None, 1, (1 << 64) - 1)
        assert (said.stop_token_ids, said.bad, said.min_tokens) == ([400], ["x"], 1)
        said = await params(backend, llm, ignore_eos=True, presence_penalty=0.5, top_p=0.3)
        assert (said.ignore_eos, said.end_id, said.presence_penalty, said.top_p) == (True, 1, 0.5, 0.3)
        said = await params(backend, llm, response_format={"type": "json_object"})
        assert said.guided_decoding == fake_trtllm.GuidedDecodingParams(json_object=True)
        said = await params(backend, llm, structured_outputs={"json": {"type": "object"}})
        assert said.guided_decoding == fake_trtllm.GuidedDecodingParams(json='{"type":"object"}')
        said = await params(backend, llm, structured_outputs={"grammar": "root ::= x"})
        assert said.guided_decoding == fake_trtllm.GuidedDecodingParams(grammar="root ::= x")


async def test_without_a_guided_decoding_backend_forms_are_refused(folder: Path) -> None:
    async with engine(folder) as (backend, _):
        with pytest.raises(Refused) as caught:
            await backend.plan(prompt(response_format={"type": "json_object"}))
        assert (caught.value.code, caught.value.param) == ("unsupported_feature", "response_format")


async def test_log_probabilities_of_the_chosen_tokens(folder: Path) -> None:
    async with engine(folder) as (backend, _):
        read = await answer(backend, prompt(max_tokens=5, logprobs=True))
        scores = [
            one["logprob"]
            for frame in read.frames
            for choice in frame["choices"]
            for one in (choice["logprobs"] or {"content": []})["content"]
        ]
        assert scores == [-0.25] * 5


async def test_a_stop_string_found_here_ends_it_there(folder: Path) -> None:
    async with engine(folder) as (backend, llm):
        read = await answer(backend, prompt(max_tokens=400, stop="river"))
        assert read.finish_reasons() == ["stop"]
        assert "river" not in read.text()
        assert read.usage.completion_tokens < 100

        async def idle() -> bool:
            return llm.held == 0

        await until(idle, 2.0)
        assert llm.made[-1].cancelled


async def test_several_choices_each_once(folder: Path) -> None:
    """Its differences are stale for all sequences but the one it heard of last."""
    async with engine(folder) as (backend, _):
        read = await answer(backend, prompt(max_tokens=30, n=3))
        assert len({read.text(index) for index in range(3)}) == 1
        assert read.usage.completion_tokens == 90
        with pytest.raises(Refused, match="Greedy decoding"):
            await answer(backend, prompt(n=2, temperature=0, max_tokens=2))


async def test_priorities_where_its_scheduler_looks_at_them(folder: Path) -> None:
    async with engine(folder, args={"scheduler_config": {"waiting_queue_policy": "priority"}}) as (backend, llm):
        for rank in (0, 9):
            await answer(backend, prompt(max_tokens=2, rank=rank))
        assert [output.priority for output in llm.made[1:]] == [1.0, 0.5]
    async with engine(folder) as (backend, llm):
        await answer(backend, prompt(max_tokens=2, rank=9))
        assert llm.made[-1].priority == 0.5


async def test_what_its_cache_had_is_told(folder: Path) -> None:
    async with engine(folder) as (backend, llm):
        llm.reused = 7
        assert (await answer(backend, prompt(max_tokens=2))).usage.cached_tokens == 7


async def test_the_trace_goes_on_to_the_engine(folder: Path) -> None:
    trace = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
    async with engine(folder) as (backend, llm):
        await answer(backend, prompt(max_tokens=2))
        assert llm.made[-1].trace_headers is None
        asked = prompt(max_tokens=2)
        asked.trace = trace
        await answer(backend, asked)
        assert llm.made[-1].trace_headers == dict(trace)


async def test_the_gauge_has_its_steps(folder: Path) -> None:
    async with engine(folder, args={"max_batch_size": 2}) as (backend, _):
        streams = [await backend.open(await backend.plan(prompt(max_tokens=400))) for _ in range(3)]
        gauges: list[Gauge] = []

        async def told() -> bool:
            gauges.append(await backend.gauge())
            return gauges[-1].waiting == 1 and any(gauge.steps for gauge in gauges)

        await until(told, 5.0)
        assert gauges[-1].running == 2
        assert gauges[-1].kv_used is not None
        prefill = max(step[0] for gauge in gauges for step in gauge.steps)
        running = max(step[1] for gauge in gauges for step in gauge.steps)
        assert prefill > 0
        assert running <= 2
        assert all(seconds > 0 for gauge in gauges for *_, seconds in gauge.steps)
        for stream in streams:
            await stream.aclose()


async def test_an_engine_without_statistics_counts_for_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: LLM, timeout: float | None = 2) -> Any:
        raise RuntimeError("statistics are off")

    monkeypatch.setattr(LLM, "get_stats_async", refuse)
    async with engine(folder) as (backend, _):
        assert "gives no statistics (statistics are off)" in caplog.text
        stream = await backend.open(await backend.plan(prompt(max_tokens=400)))
        assert await backend.gauge() == Gauge(running=1, waiting=0)
        await stream.aclose()


async def test_an_engine_that_hangs_is_lost(folder: Path) -> None:
    async with engine(folder, watchdog_s=1.0) as (backend, llm):
        stream = await backend.open(await backend.plan(prompt(max_tokens=400)))
        assert await stream.next() is not None
        llm.hung = True
        reader = asyncio.ensure_future(to_end(stream))

        async def lost() -> bool:
            try:
                await backend.gauge()
            except BackendLost:
                return True
            return False

        await until(lost, 10.0)
        with pytest.raises(BackendLost, match="given no sign for"):
            await reader
        with pytest.raises(BackendLost):
            await backend.plan(prompt())
        llm.hung = False


async def test_an_idle_engine_owes_no_sign(folder: Path) -> None:
    async with engine(folder, watchdog_s=1.0) as (backend, _):
        backend._heard_at -= 100
        assert (await backend.gauge()).running == 0
        await answer(backend, prompt(max_tokens=2))


async def test_a_request_that_fails_alone(folder: Path) -> None:
    async with engine(folder) as (backend, llm):
        llm.failures.append(fake_trtllm.RequestError("this request is too much"))
        with pytest.raises(BackendError, match="too much"):
            await answer(backend, prompt(max_tokens=2))
        assert (await answer(backend, prompt(max_tokens=2))).usage.completion_tokens == 2


async def test_a_prompt_that_only_the_engine_finds_too_long(folder: Path) -> None:
    async with engine(folder, args={"max_seq_len": 40}, context_tokens=400) as (backend, _):
        plan = await backend.plan(prompt(max_tokens=300))
        with pytest.raises(Refused, match="should not exceed max_seq_len"):
            await backend.open(plan)


async def test_tokenizing_needs_no_engine(folder: Path) -> None:
    async with engine(folder) as (backend, llm):
        made = len(llm.made)
        asked = Prompt(kind=Kind.TOKENIZE, model="m", body=b'{"prompt": "Hello"}')
        (chunk,) = await to_end(await backend.open(await backend.plan(asked)))
        assert msgspec.json.decode(chunk.data)["count"] > 0
        assert len(llm.made) == made


async def test_a_plan_of_another_is_refused(folder: Path) -> None:
    async with engine(folder) as (backend, _):
        plan = await backend.plan(prompt())
        plan.close()
        with pytest.raises(TypeError, match="did not make this plan"):
            await backend.open(plan)


async def test_a_start_that_nobody_waits_for_ends_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    build = LLM.__init__

    def slow(self: LLM, *args: Any, **kwargs: Any) -> None:
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(10)
        build(self, *args, **kwargs)

    monkeypatch.setattr(LLM, "__init__", slow)
    known = await asyncio.to_thread(words.load, str(folder))
    with fake_trtllm.install(known.encode("x")):
        starting = asyncio.ensure_future(TrtLlm(name="trt", model=str(folder)).connect("m"))
        await entered.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        go.set()

        async def ended() -> bool:
            return bool(LLM.built) and not LLM.built[0]._thread.is_alive()

        await until(ended, 10.0)


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"args": {"nonsense": 1}}, ValueError, "refuses this configuration: .*nonsense"),
        ({"args": {"kv_cache_config": {"size": 1}}}, ValueError, "args.kv_cache_config: .*size"),
        ({"args": {"cuda_graph_config": {}}}, ValueError, "has no CudaGraphConfig"),
        ({"args": {"dtype": "broken"}}, BackendLost, "did not come up: CUDA out of memory"),
        ({"tokenizer": "/nowhere/at/all"}, ValueError, "tokenizer: '/nowhere/at/all' is no folder"),
    ],
)
async def test_what_can_never_work_is_said_at_the_start(
    folder: Path, config: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        async with engine(folder, **config):
            raise AssertionError


async def test_a_model_id_needs_a_folder_for_its_words() -> None:
    with fake_trtllm.install([1]), pytest.raises(ValueError, match="model: 'org/name' is no folder"):
        await TrtLlm(name="trt", model="org/name").connect("m")


@pytest.mark.skipif("tensorrt_llm" in sys.modules, reason="TensorRT-LLM is installed here")
async def test_without_the_package_it_says_what_to_install(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"needs tensorrt-llm, which is not installed .*signalbox-gateway\[trtllm\]"):
        await TrtLlm(name="trt", model=str(folder)).connect("m")


def test_configuration() -> None:
    text = '[[pool]]\nmodel = "m"\n[[pool.backend]]\nkind = "trtllm"\nname = "t"\nmodel = "/m"\n'
    (one,) = decode(text.encode()).pools[0].backends
    assert isinstance(one, TrtLlm)
    with pytest.raises(ConfigError, match="can't be shared by 2 workers"):
        decode(b"[server]\nworkers = 2\n" + text.encode())
    with pytest.raises(ConfigError, match=r"args\.model: set by the backend's field"):
        decode(text.encode() + b'args = { model = "x" }\n')
