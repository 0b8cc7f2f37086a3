"""One vLLM engine: its start in a thread, the backend made of it, and its end."""

import asyncio
import gc
import hashlib
import logging
import multiprocessing
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from backends.bundle import Bundle
from backends.features import Feature
from backends.protocol import (
    BackendBusy,
    BackendError,
    BackendLost,
    Gauge,
    Kind,
    Plan,
    Prompt,
    Refused,
    Stream,
)
from backends.vllm import Vllm, command_line
from backends.vllm_desk import Desk
from backends.vllm_faults import DEAD
from backends.vllm_frames import Stationery, learn
from backends.vllm_seam import Call, Seam
from backends.vllm_streams import stream
from backends.vllm_watch import Reports, Watchdog, stat_logger

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:  # 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args

log = logging.getLogger(__name__)

WARM_S = 300.0  # for each of its first requests
GRACE_S = 2.0  # for a healthy engine to end by itself
PINNED = ("config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json")

_building = threading.Lock()  # vLLM changes the environment around the start of a process


async def connect(config: Vllm, model: str) -> "InProcess":
    """A started engine. Cancelling it kills what has been started. Raises ValueError, BackendLost, OSError."""
    start = Start(config, model)
    building = asyncio.get_running_loop().run_in_executor(None, start.run)
    try:
        llm = await asyncio.shield(building)
    except asyncio.CancelledError:
        start.abandon()
        building.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise
    try:
        return await _serve(config, model, llm, start)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(llm.shutdown, timeout=0.0))
        raise


async def _serve(config: Vllm, model: str, llm: AsyncLLM, start: "Start") -> "InProcess":
    state = SimpleNamespace()
    await init_app_state(Seam(llm), state, start.args, await llm.get_supported_tasks())
    traced = llm.vllm_config.observability_config.otlp_traces_endpoint is not None
    desk = Desk(llm, state, [model], traced)
    bundle = await asyncio.to_thread(_bundle, llm.vllm_config, desk)
    engine = InProcess(config, bundle, llm, desk, start.reports)
    engine.stationery = await learn(desk, model)
    await _warm(engine, model)
    engine.watchdog.start()
    gc.freeze()  # half a million objects that will not go before the engine does
    vllm.envs.enable_envs_cache()  # vLLM looks at its environment for every token
    return engine


async def _warm(engine: "InProcess", model: str) -> None:
    """Its first requests: they compile kernels, look for plugins and load grammars, which no client should wait for.

    No watchdog yet: some of these steps take seconds, once.
    """
    text: dict[str, Any] = {"prompt": "x", "max_tokens": 2}
    bodies: list[tuple[Kind, dict[str, Any]]] = [
        (Kind.COMPLETION, text),
        (Kind.COMPLETION, text | {"logprobs": 2}),
        (Kind.COMPLETION, text | {"temperature": 1, "top_p": 0.9, "top_k": 9, "min_p": 0.01, "seed": 1}),
        (Kind.COMPLETION, text | {"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1}),
        (Kind.COMPLETION, text | {"response_format": {"type": "json_object"}}),
        (Kind.EMBEDDINGS, {"input": "x"}),
    ]
    for kind, body in bodies:
        if kind.value not in engine.bundle.kinds:
            continue
        prompt = Prompt(kind=kind, model=model, body=msgspec.json.encode(body | {"model": model}))
        try:
            async with asyncio.timeout(WARM_S):
                running = await engine.open(await engine.plan(prompt))
                while await running.next() is not None:
                    pass
        except (Refused, BackendBusy, BackendError, TimeoutError) as exc:
            raise BackendLost(f"vLLM came up and does not answer: {exc or 'too slow'}") from exc


class Start:
    """Builds an engine, in a thread: that takes as long as the weights take to load."""

    def __init__(self, config: Vllm, model: str) -> None:
        self._config, self._model = config, model
        self._abandoned = False
        self._before: set[int | None] = set()
        self.reports = Reports(0)
        self.args: Any = None

    def run(self) -> AsyncLLM:
        """The engine. Raises ValueError, BackendLost, OSError."""
        with _building:
            vllm.envs.disable_envs_cache()
            self._before = {child.pid for child in multiprocessing.active_children()}
            self.args = self._parse()
            try:
                engine_args = AsyncEngineArgs.from_cli_args(self.args)
                config = engine_args.create_engine_config(usage_context=UsageContext.ENGINE_CONTEXT)
            except SystemExit as exc:
                raise ValueError(f"vLLM refuses this configuration: {exc}") from None
            llm = self._build(config)
        if self._abandoned:
            llm.shutdown(timeout=0.0)
            raise BackendLost("its start was given up")
        return llm

    def abandon(self) -> None:
        """Nobody waits for it any more: kill what it has started; the rest of the start then fails."""
        self._abandoned = True
        for child in multiprocessing.active_children():
            if child.pid not in self._before:
                child.kill()

    def _parse(self) -> Any:
        parser = make_arg_parser(FlexibleArgumentParser(prog="vllm"))

        def refuse(message: str) -> None:
            raise ValueError(f"args: {message}")

        parser.error = refuse
        try:
            args = parser.parse_args(command_line(self._config, self._model, parser))
            validate_parsed_serve_args(args)
        except TypeError as exc:
            raise ValueError(f"args: {exc}") from None
        return args

    def _build(self, config: Any) -> AsyncLLM:
        if self._abandoned:
            raise BackendLost("its start was given up")
        try:
            llm = AsyncLLM.from_vllm_config(config, stat_loggers=[stat_logger(self.reports)], disable_log_stats=True)
        except Exception as exc:
            raise BackendLost(f"vLLM did not come up: {exc}") from exc
        self.reports.kv_tokens = _kv_tokens(config)
        return llm


class InProcess:
    """See `backends.protocol.Backend`. Lost once, it stays lost: connect again for a new engine."""

    def __init__(self, config: Vllm, bundle: Bundle, llm: AsyncLLM, desk: Desk, reports: Reports) -> None:
        self.name = config.name
        self.bundle = bundle
        self._llm, self._desk, self._reports = llm, desk, reports
        self.stationery = Stationery({})
        self._merge_s = config.merge_ms / 1e3
        self._ranked = llm.vllm_config.scheduler_config.policy == "priority"
        self._lost: str | None = None
        self._ending: asyncio.Task[None] | None = None
        self.watchdog = Watchdog(reports, config.watchdog_s, llm.get_num_unfinished_requests, llm.is_sleeping)
        self.watchdog.on_hang = self._lose

    def __repr__(self) -> str:
        state = f"lost: {self._lost}" if self._lost else f"{self._llm.get_num_unfinished_requests()} requests"
        return f"<InProcess {self.name} vLLM {self.bundle.engine_version}, {state}>"

    @property
    def process_ids(self) -> list[int]:
        """Of the engine's own processes, workers not counted."""
        return [process.pid for process in self._processes() if process.pid is not None]

    async def plan(self, prompt: Prompt) -> Plan:
        """See `backends.protocol.Backend`. Exact, except where beams or tools make vLLM generate several times."""
        self._alive()
        try:
            call = await self._desk.plan(prompt)
        except Refused:
            self._alive()  # what is being shut down refuses everything: that is no fault of the request
            raise
        return Plan(
            prompt=prompt,
            maker=self.name,
            prompt_tokens=call.prompt_tokens,
            exact=True,
            output_limit=call.output_limit,
            work=call,
        )

    async def open(self, plan: Plan) -> Stream:
        """See `backends.protocol.Backend`. Raises ValueError for a plan of another backend, or one that is used up."""
        call, plan.work = plan.work, None
        if not isinstance(call, Call) or plan.maker != self.name or call.gone():
            raise ValueError(
                f"{self.name} cannot open a plan of {plan.maker} that is {'another' if call else 'used up'}"
            )
        try:
            self._alive()
            was_idle = not self._llm.get_num_unfinished_requests()
            await call.start(plan.prompt.rank if self._ranked else None, self._merge_for(plan.prompt))
        except BaseException:
            call.close()
            raise
        if call.works:
            self.watchdog.opened(was_idle)
        return stream(call, self.stationery.shape(call))

    def _merge_for(self, prompt: Prompt) -> float:
        """How long tokens wait for company, in seconds: at most half of the pace that is wanted, or it is missed."""
        return min(self._merge_s, prompt.tpot_ms / 2e3) if prompt.tpot_ms else self._merge_s

    async def gauge(self) -> Gauge:
        """See `backends.protocol.Backend`. From the last step's report: asks nobody."""
        self._alive()
        return self._reports.gauge()

    async def aclose(self) -> None:
        """See `backends.protocol.Backend`. At most `GRACE_S` and a kill, in a thread."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end())
        await asyncio.shield(self._ending)

    def _alive(self) -> None:
        if self._lost is None and self._llm.errored:
            self._lose(DEAD)
        if self._lost is not None:
            raise BackendLost(self._lost)

    def _lose(self, why: str) -> None:
        """From now on it is lost; everything that waits for its output hears of it at once."""
        if self._lost is None:
            self._lost = why
            self.watchdog.stop()
            self._llm.output_processor.propagate_error(BackendLost(why))

    async def _end(self) -> None:
        healthy = self._lost is None and not self._llm.errored
        self._lose("this backend was closed")
        try:
            if not healthy:
                for process in self._processes():
                    process.kill()  # a hung one would sit out any grace
            await asyncio.to_thread(self._llm.shutdown, timeout=GRACE_S if healthy else 0.5)
        except Exception:
            log.exception("the engine of %s did not end in good order", self.name)
        gc.unfreeze()

    def _processes(self) -> list[Any]:
        manager = getattr(self._llm.engine_core.resources, "engine_manager", None)
        return list(getattr(manager, "processes", ()))


def _kv_tokens(config: Any) -> int:
    cache = config.cache_config
    told = getattr(cache, "kv_cache_size_tokens", None)
    return int(told or (cache.num_gpu_blocks or 0) * cache.block_size)


def _bundle(config: Any, desk: Desk) -> Bundle:
    model = config.model_config
    features = set(Feature) - {Feature.SUFFIX}
    if not getattr(model, "is_multimodal_model", False):
        features -= {Feature.IMAGES, Feature.AUDIO}
    return Bundle(
        engine="vllm",
        engine_version=vllm.__version__,
        model=str(model.model),
        revision=str(model.revision or _fingerprint(model.model)),
        tokenizer=str(model.tokenizer),
        precision=str(model.dtype).removeprefix("torch."),
        quantization=str(model.quantization or ""),
        driver=_driver(),
        context_tokens=int(model.max_model_len),
        max_running=int(config.scheduler_config.max_num_seqs),
        kv_tokens=_kv_tokens(config),
        features=frozenset(feature.value for feature in features),
        kinds=desk.kinds,
    )


def _fingerprint(model: str) -> str:
    """Of a local folder: the hash of what fixes the model's form and words, and of the weights' names and sizes."""
    folder = Path(model)
    if not folder.is_dir():
        return ""
    found = hashlib.sha256()
    for name in PINNED:
        if (file := folder / name).is_file():
            found.update(name.encode() + file.read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        found.update(f"{file.name} {file.stat().st_size}".encode())
    return f"sha256:{found.hexdigest()[:32]}"


def _driver() -> str:
    """The device the engine computes on, and the versions under it."""
    if not torch.cuda.is_available():
        return f"cpu, torch {torch.__version__}"
    return f"{torch.cuda.get_device_name()}, cuda {torch.version.cuda}, torch {torch.__version__}"
