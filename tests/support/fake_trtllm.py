"""A stand-in for the package `tensorrt_llm`: its Python LLM API as recorded from its source, and no model behind it.

Like the real one its engine steps in a thread of its own, results reach the loop that was running when a request was
made, a result yields itself, its differences are of the sequence that was told of last, and statistics are told once.
It draws the tokens of `TEXT`, over and over, beginning where the prompt's sum points to; `n` sequences one after the
other. `install` puts it where `import tensorrt_llm` finds it.
"""

import asyncio
import contextlib
import json
import queue
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import Any

TEXT = "The signal box stands by the river. café 日本語 🙂🚂 and each train waits for its token, then goes on. "
STEP_S = 0.002


class RequestError(RuntimeError):
    """As `tensorrt_llm.executor.utils.RequestError`."""


@dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: list[str] | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int = 1
    best_of: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    temperature: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    logprobs: int | None = None
    guided_decoding: Any = None
    ignore_eos: bool = False
    detokenize: bool = True

    def __post_init__(self) -> None:
        self.best_of = self.best_of or self.n
        if self.best_of > 1 and self.top_k in (None, 1) and self.top_p in (None, 0.0):
            raise ValueError("Greedy decoding in the LLM API does not allow multiple returns.")


@dataclass(kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclass(kw_only=True)
class KvCacheConfig:
    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    enable_block_reuse: bool = True
    tokens_per_block: int = 32


@dataclass(kw_only=True)
class SchedulerConfig:
    capacity_scheduler_policy: str = "GUARANTEED_NO_EVICT"
    waiting_queue_policy: str = "fcfs"


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None
    _last_token_ids_len: int = 0

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]


class RequestOutput:
    """One request. Its queue is bound to the running loop, and missing where there was none."""

    def __init__(self, llm: "LLM", number: int, prompt: list[int], params: SamplingParams, priority: float) -> None:
        self.request_id, self.prompt_token_ids, self.params, self.priority = number, prompt, params, priority
        self.outputs = [CompletionOutput(index) for index in range(params.n)]
        self.trace_headers: dict[str, str] | None = None
        self.cached_tokens = llm.reused
        self.cancelled = False
        self._llm, self._done, self._aborted = llm, False, False
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self.aqueue: asyncio.Queue[Any] | None = asyncio.Queue() if self._loop else None

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        self._llm.asked.put(("abort", self))
        self._aborted = True

    def aborted(self) -> bool:
        return self._aborted

    def __aiter__(self) -> "RequestOutput":
        return self

    async def __anext__(self) -> "RequestOutput":
        if self._done:
            raise StopAsyncIteration
        await self._step()
        return self

    async def aresult(self) -> "RequestOutput":
        while not self._done:
            await self._step()
        return self

    async def _step(self) -> None:
        assert self.aqueue is not None, "The asyncio event loop was not present during initialization"
        message = await self.aqueue.get()
        if isinstance(message, Exception):
            raise message
        index, token, reason, final = message
        said = self.outputs[index]
        said._last_token_ids_len = len(said.token_ids)
        if token is not None:
            said.token_ids.append(token)
            if self.params.logprobs:
                said.logprobs.append({token: Logprob(-0.25, 1), token + 1: Logprob(-2.0, 2)})
        if reason is not None:
            said.finish_reason = reason
        self._done = final

    def tell(self, message: Any) -> None:
        """From the engine's thread."""
        if self._loop is not None and self.aqueue is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.aqueue.put_nowait, message)


class LLM:
    """The engine. `crash`, `hang` and `fail_next` are for tests; the rest is the recorded API."""

    built: "list[LLM]" = []  # noqa: RUF012 - for tests to find what a backend has built
    tokens: list[int] = []  # noqa: RUF012 - what it says, set by `install`

    def __init__(self, model: str, **kwargs: Any) -> None:
        if "nonsense" in kwargs:
            raise ValueError("LlmArgs: nonsense: Extra inputs are not permitted")
        if kwargs.get("dtype") == "broken":
            raise RuntimeError("CUDA out of memory")
        self.model, self.kwargs = model, kwargs
        self.args = types.SimpleNamespace(
            max_batch_size=kwargs.get("max_batch_size", 8), max_seq_len=kwargs.get("max_seq_len"), dtype="bfloat16"
        )
        self.asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.active: list[tuple[RequestOutput, list[int], list[int]]] = []
        self.waiting: deque[RequestOutput] = deque()
        self.made: list[RequestOutput] = []
        self.failures: list[Exception] = []
        self.stats: deque[str] = deque(maxlen=1000)
        self.health, self.hung = True, False
        self.reused = 0  # tokens of each further prompt that it says its cache had
        self._numbers = iter(range(1, 1 << 31))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        LLM.built.append(self)

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        cache_salt: str | None = None,
        priority: float = 0.5,
        trace_headers: dict[str, str] | None = None,
    ) -> RequestOutput:
        params = sampling_params or SamplingParams()
        limit = self.args.max_seq_len
        if limit and len(inputs) + params.max_tokens > limit:
            raise ValueError(f"The sum of prompt length ({len(inputs)}) ... should not exceed max_seq_len ({limit})")
        if not self.health:
            raise RuntimeError("the executor is shut down")
        output = RequestOutput(self, next(self._numbers), inputs, params, priority)
        output.trace_headers = trace_headers
        self.made.append(output)
        self.asked.put(("new", output))
        return output

    async def get_stats_async(self, timeout: float | None = 2) -> Any:
        until = asyncio.get_running_loop().time() + (timeout or 0)
        while asyncio.get_running_loop().time() < until:
            if self.stats:
                yield json.loads(self.stats.popleft())
                until = asyncio.get_running_loop().time() + (timeout or 0)
            else:
                await asyncio.sleep(0.005)

    def _check_health(self) -> bool:
        return self.health

    def shutdown(self) -> None:
        self._ended.set()
        self._thread.join(5)

    @property
    def held(self) -> int:
        return len(self.active) + len(self.waiting) + self.asked.qsize()

    def crash(self) -> None:
        self.health = False

    def _run(self) -> None:
        while not self._ended.wait(STEP_S):
            if self.hung:
                continue
            if not self.health:
                for output in [*(one[0] for one in self.active), *self.waiting]:
                    output.tell(RuntimeError("the executor has died"))
                self.active, self.waiting = [], deque()
                continue
            self._hear()
            if self.active or self.waiting:
                self._step()

    def _hear(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                verb, output = self.asked.get_nowait()
                if verb == "new":
                    self.waiting.append(output)
                else:
                    output.cancelled = True

    def _step(self) -> None:
        began = time.perf_counter()
        context = 0
        while self.waiting and len(self.active) < self.args.max_batch_size:
            output = self.waiting.popleft()
            if self.failures:
                output.tell(self.failures.pop(0))
                continue
            context += len(output.prompt_token_ids)
            sizes = [0] * output.params.n
            self.active.append((output, sizes, list(sizes)))
        for entry in list(self.active):
            if not self._advance(*entry):
                self.active.remove(entry)
        self._report(context, began)

    def _advance(self, output: RequestOutput, sizes: list[int], over: list[int]) -> bool:
        """One token for each sequence; whether it goes on."""
        params = output.params
        for index in range(params.n):
            if over[index]:
                continue
            if output.cancelled:
                output.tell((index, None, "cancelled", True))
                return False
            start = sum(output.prompt_token_ids) % len(LLM.tokens)
            token = LLM.tokens[(start + sizes[index]) % len(LLM.tokens)]
            sizes[index] += 1
            stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (params.end_id,))}
            reason = "stop" if token in stops else "length" if sizes[index] >= params.max_tokens else None
            over[index] = reason is not None
            output.tell((index, token, reason, all(over)))
        return not all(over)

    def _report(self, context: int, began: float) -> None:
        block = 32
        held = sum(len(output.prompt_token_ids) + sum(sizes) for output, sizes, _ in self.active)
        used = min(1000, -(-held // block))
        one = {
            "iter": len(self.made),
            "iterLatencyMS": (time.perf_counter() - began) * 1e3 + STEP_S * 1e3,
            "numActiveRequests": len(self.active),
            "numQueuedRequests": len(self.waiting),
            "maxBatchSizeStatic": self.args.max_batch_size,
            "kvCacheStats": {
                "maxNumBlocks": 1000,
                "freeNumBlocks": 1000 - used,
                "usedNumBlocks": used,
                "tokensPerBlock": block,
            },
            "inflightBatchingStats": {"numGenRequests": len(self.active), "numCtxTokens": context},
        }
        self.stats.append(json.dumps(one))


@contextlib.contextmanager
def install(tokens: list[int]) -> Iterator[type[LLM]]:
    """While this lasts `import tensorrt_llm` finds the stand-in, which says these tokens over and over."""
    LLM.built, LLM.tokens = [], tokens
    top, api = types.ModuleType("tensorrt_llm"), types.ModuleType("tensorrt_llm.llmapi")
    top.__spec__ = ModuleSpec("tensorrt_llm", None)
    top.__version__ = "1.2.1"  # type: ignore[attr-defined]
    for one in (LLM, SamplingParams, GuidedDecodingParams, KvCacheConfig, SchedulerConfig):
        setattr(api, one.__name__, one)
    sys.modules |= {"tensorrt_llm": top, "tensorrt_llm.llmapi": api}
    try:
        yield LLM
    finally:
        for llm in LLM.built:
            llm.shutdown()
        del sys.modules["tensorrt_llm"], sys.modules["tensorrt_llm.llmapi"]
