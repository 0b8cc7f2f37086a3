"""One TensorRT-LLM engine in this process: its start in a thread, the backend made of it, and its end."""

import asyncio
import importlib
import inspect
import json
import logging
import sys
from typing import Any

import msgspec

from backends import words
from backends.ask import Ask
from backends.bundle import Bundle
from backends.protocol import BackendError, BackendLost, Gauge, Kind, Plan, Prompt, Refused, Stream
from backends.scribe import Scribe, ready_stream
from backends.trtllm import TrtLlm
from backends.trtllm_sampling import able, params
from backends.trtllm_stats import Iterations
from backends.trtllm_stream import Engine, TrtLlmStream
from backends.words import Words

log = logging.getLogger(__name__)

NESTED = {
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "cuda_graph_config": "CudaGraphConfig",
}
"""Arguments of `LLM` that are objects of these classes of `tensorrt_llm.llmapi`."""

WARM_S = 600.0  # for its first request, which may compile kernels
STATS_S = 1.0  # how long the engine's statistics may be silent before they are asked for again
REST_S = 0.25  # between two questions for them
SHUTDOWN_S = 30.0
CHOICES = 16  # most answers to one request, where nothing else says
MEAN_PRIORITY, RANKS = 0.5, 10


async def connect(config: TrtLlm, model: str) -> "TrtLlmEngine":
    """A started engine. One whose start was cancelled ends by itself once it is up. Raises ValueError, BackendLost."""
    building = asyncio.get_running_loop().run_in_executor(None, _build, config)
    try:
        package, known, llm = await asyncio.shield(building)
    except asyncio.CancelledError:
        building.add_done_callback(_abandon)
        raise
    engine = TrtLlmEngine(config, package, known, llm)
    try:
        await engine.warm()
    except BaseException:
        await engine.aclose()
        raise
    return engine


def _build(config: TrtLlm) -> tuple[Any, Words, Any]:
    """The package, the words and the engine. Blocks for as long as the weights take to load."""
    known = words.load(config.words_folder)
    try:
        package: Any = importlib.import_module("tensorrt_llm.llmapi")
    except (ImportError, OSError) as error:  # OSError: CUDA's libraries
        raise ValueError(f"TensorRT-LLM is installed and cannot be imported: {error}") from error
    args: dict[str, Any] = dict(config.args)
    for name, kind in NESTED.items():
        if isinstance(table := args.get(name), dict):
            args[name] = _nested(package, name, kind, table)
    if args.get("backend", "pytorch") == "pytorch":
        args.setdefault("enable_iter_perf_stats", True)
    try:
        return package, known, package.LLM(model=config.model, **args)
    except (TypeError, ValueError) as error:
        raise ValueError(f"TensorRT-LLM refuses this configuration: {error}") from error
    except Exception as error:
        raise BackendLost(f"TensorRT-LLM did not come up: {error}") from error


def _abandon(building: "asyncio.Future[tuple[Any, Words, Any]]") -> None:
    """Nobody waits for it any more."""
    if not building.cancelled() and building.exception() is None:
        building.get_loop().run_in_executor(None, building.result()[2].shutdown)


def _nested(package: Any, name: str, kind: str, table: dict[str, Any]) -> Any:
    try:
        return getattr(package, kind)(**table)
    except AttributeError:
        raise ValueError(f"args.{name}: this TensorRT-LLM has no {kind}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"args.{name}: {error}") from None


class TrtLlmEngine:
    """See `backends.protocol.Backend`. Lost once, it stays lost: connect again for a new engine."""

    def __init__(self, config: TrtLlm, package: Any, known: Words, llm: Any) -> None:
        self.name = config.name
        self._config, self._package, self._words, self._llm = config, package, known, llm
        self._streams: set[TrtLlmStream] = set()
        self._iterations = Iterations()
        self._lost = ""
        self._heard_at = 0.0
        self._stats: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._shared = Engine(self._heard, self._fault, self._streams.discard)
        args = getattr(llm, "args", None)
        self._slots = int(_said(config, args, "max_batch_size") or 0)
        context = config.context_tokens or int(_said(config, args, "max_seq_len") or 0) or known.context_tokens
        can = able(config.args, min(self._slots or CHOICES, CHOICES), config.tools)
        self._scribe = Scribe(config.name, can, known, context, config.default_output_tokens)
        takes = inspect.signature(llm.generate_async).parameters
        self._ranked = "priority" in takes and _orders(config)
        self._traced = "trace_headers" in takes
        self.bundle = Bundle(
            engine="tensorrt-llm",
            engine_version=_version(),
            model=config.model,
            revision=known.fingerprint,
            tokenizer=known.folder,
            precision=str(_said(config, args, "dtype") or ""),
            quantization=str(getattr(getattr(args, "quant_config", None), "quant_algo", None) or ""),
            driver=_driver(),
            context_tokens=context,
            max_running=self._slots,
            features=can.features(),
            kinds=self._scribe.kinds,
        )
        self._fingerprint = f"tensorrt-llm-{self.bundle.engine_version}"

    def __repr__(self) -> str:
        state = f"lost: {self._lost}" if self._lost else f"{len(self._streams)} requests"
        return f"<TrtLlmEngine {self.name} TensorRT-LLM {self.bundle.engine_version}, {state}>"

    async def warm(self) -> None:
        """Its first request, and what the engine says of its cache after it. Raises BackendLost."""
        first = Ask(kind=Kind.COMPLETION, ids=[0], max_tokens=2, end_ids=self._words.end_ids)
        try:
            async with asyncio.timeout(WARM_S):
                output = self._llm.generate_async([0], sampling_params=params(self._package, first, self._words))
                await output.aresult()
        except Exception as error:
            raise BackendLost(f"TensorRT-LLM came up and does not answer: {error or 'too slow'}") from error
        await self._ask_stats(first=True)
        self.bundle = msgspec.structs.replace(self.bundle, kv_tokens=self._iterations.kv_tokens)
        self._heard()
        self._stats = asyncio.get_running_loop().create_task(self._keep_stats())

    async def plan(self, prompt: Prompt) -> Plan:
        """See `backends.protocol.Backend`."""
        self._alive()
        return await self._scribe.plan(prompt)

    async def open(self, plan: Plan) -> Stream:
        """See `backends.protocol.Backend`."""
        ask = plan.work
        if plan.maker != self.name or not isinstance(ask, Ask):
            raise TypeError(f"{self.name} did not make this plan, or it was closed")
        if ask.ready is not None:
            return ready_stream(ask)
        self._alive()
        more: dict[str, Any] = {"priority": _priority(plan.prompt.rank)} if self._ranked else {}
        if self._traced and plan.prompt.trace:
            more["trace_headers"] = dict(plan.prompt.trace)
        sampling = params(self._package, ask, self._words)
        if not self._streams:
            self._heard()  # an idle engine owed no sign
        try:
            output = self._llm.generate_async(ask.ids, sampling_params=sampling, streaming=True, **more)
        except ValueError as error:
            raise Refused(400, "invalid_request", f"TensorRT-LLM refuses this request: {error}") from error
        except Exception as error:
            raise self._fault(error) from error
        answer = self._scribe.answer(plan, plan.prompt.request_id or str(output.request_id), self._fingerprint)
        stream = TrtLlmStream(output, answer, self._shared)
        self._streams.add(stream)
        return stream

    async def gauge(self) -> Gauge:
        """See `backends.protocol.Backend`. What runs is known here; the rest is as of the engine's last step."""
        self._alive()
        told = self._iterations.gauge(idle=not self._streams)
        waiting = min(told.waiting or 0, len(self._streams))
        return Gauge(running=len(self._streams) - waiting, waiting=waiting, kv_used=told.kv_used, steps=told.steps)

    async def aclose(self) -> None:
        """See `backends.protocol.Backend`. The engine's own end runs in a thread, which is waited for a while."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end())
        await asyncio.shield(self._ending)

    def _alive(self) -> None:
        if not self._lost:
            self._look()
        if self._lost:
            raise BackendLost(self._lost)

    def _look(self) -> None:
        check = getattr(self._llm, "_check_health", None)
        silent_s = asyncio.get_running_loop().time() - self._heard_at
        if check is not None and not check():
            self._lose("the TensorRT-LLM engine is dead")
        elif self._streams and silent_s > self._config.watchdog_s:
            self._lose(f"the TensorRT-LLM engine has given no sign for {silent_s:.0f} s")

    def _heard(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()

    def _fault(self, error: Exception) -> BackendError | BackendLost:
        """What an exception out of the engine is to the gateway."""
        if isinstance(error, (BackendError, BackendLost)):
            return error
        self._look()
        if self._lost:
            return BackendLost(self._lost)
        return BackendError(f"TensorRT-LLM failed: {error}")

    def _lose(self, why: str) -> None:
        if self._lost:
            return
        self._lost = why
        for stream in list(self._streams):
            stream.lose(why)

    async def _keep_stats(self) -> None:
        """For as long as the engine lives; it is the only reader of them."""
        while True:
            if not await self._ask_stats():
                return
            await asyncio.sleep(REST_S)

    async def _ask_stats(self, first: bool = False) -> bool:
        """All that the engine has to tell now, or the `first` step that sizes its cache; False where it cannot tell."""
        try:
            async for told in self._llm.get_stats_async(timeout=STATS_S):
                self._iterations.add(json.loads(told) if isinstance(told, str) else told)
                self._heard()
                if first and self._iterations.kv_tokens:
                    break
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine may still be well
            log.warning("%s gives no statistics (%s): its load is our own count", self.name, error or type(error))
            return False
        return True

    async def _end(self) -> None:
        self._lose("this backend was closed")
        if self._stats is not None:
            self._stats.cancel()
            await asyncio.wait((self._stats,))
        if running := {stream.task for stream in self._streams}:
            await asyncio.wait(running)
        ending = asyncio.get_running_loop().run_in_executor(None, self._llm.shutdown)
        done, _ = await asyncio.wait((ending,), timeout=SHUTDOWN_S)
        if not done:
            log.error("the engine of %s did not end within %.0f s", self.name, SHUTDOWN_S)
        elif (error := ending.exception()) is not None:
            log.error("the engine of %s did not end in good order: %s", self.name, error)


def _said(config: TrtLlm, args: Any, name: str) -> Any:
    """An argument as the engine has it, else as it was set."""
    return getattr(args, name, None) or config.args.get(name)


def _orders(config: TrtLlm) -> bool:
    """Whether the scheduler is set to look at priorities."""
    scheduler = config.args.get("scheduler_config")
    return isinstance(scheduler, dict) and str(scheduler.get("waiting_queue_policy", "")).lower() == "priority"


def _priority(rank: int) -> float:
    """A class's rank, 0 the best of `RANKS`, as the engine's number: 1 is the best, 0.5 is its default."""
    return 1.0 - MEAN_PRIORITY * min(rank, RANKS - 1) / (RANKS - 1)


def _version() -> str:
    return str(getattr(sys.modules.get("tensorrt_llm"), "__version__", ""))


def _driver() -> str:
    """The device, as torch knows it where the package has brought torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    return f"{torch.cuda.get_device_name()}, cuda {torch.version.cuda}, torch {torch.__version__}"
