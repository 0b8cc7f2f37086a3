"""vLLM's own serving layer, with a seam between it and the engine.

vLLM's serving objects do templates, tokens, checks, sampling parameters, parsers and wire objects. They take anything
that looks like an engine client, so they get a `Seam`: it records the rendered prompt and the parameters when a
generation is asked for, and lets nothing reach the engine before the call is started.
"""

import asyncio
import contextvars
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, cast

from vllm.renderers.inputs.preprocess import extract_prompt_len
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from backends.protocol import BackendError, BackendLost, Kind, Usage
from backends.vllm_faults import DEAD, Fault, of_exception

ABORT_S = 1.0
UNWATCHED_INTERVAL = 32  # tokens per output after the first, where nobody reads along

current: contextvars.ContextVar["Call"] = contextvars.ContextVar("vllm_call")
"""The call on whose behalf vLLM's serving layer is running."""


class Pace:
    """Holds a fast engine's chunks a little, so that several tokens share a frame and a write."""

    __slots__ = ("_due_at", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds, self._due_at = seconds, 0.0

    def left(self) -> None:
        """A chunk has gone out."""
        if self._seconds:
            self._due_at = asyncio.get_running_loop().time() + self._seconds

    async def turn(self) -> None:
        """Return when the next one may go. At once for the first, and for an engine that is slower than the pace."""
        if self._due_at and (wait_s := self._due_at - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(wait_s)


class Work:
    """One generation that the serving layer wants: everything the engine would get, and its queue once it has it."""

    __slots__ = ("finished", "merge", "options", "params", "pooling", "prompt", "queue", "request_id")

    def __init__(
        self, prompt: Any, params: Any, request_id: str, options: dict[str, Any], pooling: bool = False
    ) -> None:
        self.prompt, self.params, self.request_id, self.options = prompt, params, request_id, options
        self.pooling = pooling
        self.queue: Any = None
        self.merge = False
        self.finished = False


class Call:
    """One API call. Its works are known when `planned` is done; the engine hears of them in `start`.

    `tokens` counts generated tokens as the engine delivers them, `error` is what a serving generator would hide in an
    event. Ends with `close` (never started, or in a hurry) or `aclose`.
    """

    __slots__ = (
        "_llm", "_merge_s", "_priority", "cached", "closed", "error", "first", "kind", "lazy", "opened", "planned",
        "request", "result", "tokens", "works",
    )  # fmt: skip

    def __init__(self, llm: AsyncLLM, kind: Kind, request: Any) -> None:
        loop = asyncio.get_running_loop()
        self._llm, self.kind, self.request = llm, kind, request
        self._priority: int | None = None
        self._merge_s = 0.0
        self.works: list[Work] = []
        self.planned: asyncio.Future[None] = loop.create_future()
        self.opened = asyncio.Event()
        self.first: asyncio.Future[None] = loop.create_future()
        self.result: Any = None  # vLLM's generator, the task that makes the whole answer, or the answer itself
        self.lazy = False  # a generation may be followed by another: Responses with tools, beam search
        self.tokens = self.cached = 0
        self.error: Exception | None = None
        self.closed = False

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open" if self.opened.is_set() else "planned"
        return f"<Call {self.kind.value} {state}, {len(self.works)} works, {self.tokens} tokens>"

    @property
    def prompt_tokens(self) -> int:
        return sum(extract_prompt_len(self._llm.model_config, work.prompt) for work in self.works)

    @property
    def output_limit(self) -> int:
        return sum((work.params.max_tokens or 0) * work.params.n for work in self.works if not work.pooling)

    @property
    def finished(self) -> bool:
        """Whether the engine has nothing left to do for it, as far as is known."""
        return all(work.finished for work in self.works)

    def gone(self) -> bool:
        """Whether its owner has ended it."""
        return self.closed

    def seen(self) -> None:
        """The seam was reached, or the serving layer came to its end without it."""
        if not self.planned.done():
            self.planned.set_result(None)

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.tokens, self.cached)

    def pace(self) -> Pace:
        """A pace for one reader of its outputs."""
        return Pace(self._merge_s)

    async def start(self, priority: int | None, merge_s: float) -> None:
        """Hand the work to the engine. What its front end refuses is raised here, before any byte is sent.

        Outputs of a stream come at least `merge_s` apart, with all that the engine made in between.

        An addition that is cancelled half-way would leave a request that nobody can name: it always runs to its end.
        """
        self._priority, self._merge_s = priority, merge_s
        adding = asyncio.get_running_loop().create_task(self._add_all())
        try:
            await asyncio.shield(adding)
        except asyncio.CancelledError:
            adding.add_done_callback(self._unwanted)
            raise
        except Exception as exc:
            self.close()
            raise of_exception(self.kind, exc) from exc
        self.opened.set()

    async def outputs(self, work: Work) -> AsyncGenerator[Any, None]:
        """What the serving layer iterates instead of `AsyncLLM.generate` and `encode`."""
        self.seen()
        await self.opened.wait()
        whole: Any = None
        try:
            queue = work.queue or await self._add(work)
            pace = Pace(0.0 if work.merge else self._merge_s)
            while True:
                await pace.turn()
                out = queue.get_nowait() or await queue.get()
                self.count(work, out)
                if work.merge:
                    whole = _merged(whole, out)
                    if not out.finished:
                        continue
                    out = whole
                pace.left()
                yield out
                if work.finished:
                    return
        except Exception as exc:
            self.error = self.error or exc
            raise

    def count(self, work: Work, out: Any) -> None:
        """Take the numbers off an output. Raises BackendError where it says that the engine gave up."""
        work.finished = out.finished
        if work.pooling:
            return
        for one in out.outputs:
            self.tokens += len(one.token_ids)
            if not self.closed and one.finish_reason in {"abort", "error"}:
                raise BackendError(f"vLLM ended the request with {one.finish_reason}")
        self.cached = max(self.cached, out.num_cached_tokens or 0)
        if not self.first.done():
            self.first.set_result(None)

    def fault(self) -> Fault | None:
        """What went wrong in the engine, if anything did."""
        if self.error is None:
            return BackendLost(DEAD) if self._llm.errored and not self.finished else None
        return of_exception(self.kind, self.error)

    def close(self) -> None:
        """Let go of everything at once, from anywhere. Idempotent."""
        if not self.closed:
            self.closed = True
            if ids := self._unfinished():
                _background(self._abort(ids))
            self._drop()

    async def aclose(self) -> None:
        """Like `close`, and the engine has heard of it when this returns. Bounded by twice `ABORT_S`; never raises."""
        if self.closed:
            return
        self.closed = True
        ids, result = self._unfinished(), self.result
        self._drop()
        if ids:
            await self._abort(ids)
        if isinstance(result, AsyncGenerator):
            with suppress(Exception):  # another task may be inside; the abort has told it to come to an end
                async with asyncio.timeout(ABORT_S):
                    await result.aclose()

    def _unwanted(self, adding: "asyncio.Task[None]") -> None:
        _ignore(adding)
        self.close()

    async def _add_all(self) -> None:
        for work in self.works:
            await self._add(work)

    async def _add(self, work: Work) -> Any:
        if not work.pooling and work.params.output_kind == RequestOutputKind.FINAL_ONLY:
            work.params.output_kind = RequestOutputKind.DELTA  # so that the first token is news here too
            work.params.stream_interval = max(UNWATCHED_INTERVAL, work.params.stream_interval or 1)
            work.merge = True
        if isinstance(work.prompt, dict):
            work.prompt.pop("arrival_time", None)  # vLLM's times then start here, not when it was planned
        if self._priority is not None:
            work.options["priority"] = self._priority
        work.queue = await self._llm.add_request(work.request_id, work.prompt, work.params, **work.options)
        return work.queue

    def _unfinished(self) -> list[str]:
        return [work.queue.request_id for work in self.works if work.queue is not None and not work.finished]

    async def _abort(self, ids: list[str]) -> None:
        if self._llm.errored:
            return
        with suppress(Exception):  # the engine may die in between; then nothing is left to abort
            async with asyncio.timeout(ABORT_S):
                await self._llm.abort(ids, internal=True)

    def _drop(self) -> None:
        """End vLLM's side, as far as that takes no time."""
        result, self.result = self.result, None
        if isinstance(result, asyncio.Task):
            result.cancel()
            result.add_done_callback(_ignore)
        elif isinstance(result, Primed):
            result.cancel()
        self.seen()


class Primed:
    """A serving generator that is run until it reaches the seam: streamed Responses ask for nothing before that."""

    def __init__(self, call: Call, source: AsyncGenerator[Any, None]) -> None:
        self._call, self._source = call, source
        self._items: asyncio.Queue[Any] = asyncio.Queue(8)
        context = contextvars.copy_context()
        context.run(current.set, call)
        self._task = asyncio.get_running_loop().create_task(self._pump(), context=context)
        self._task.add_done_callback(_ignore)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        item = await self._items.get()
        if item is _END:
            self._items.put_nowait(_END)
            raise StopAsyncIteration
        if isinstance(item, Exception):
            self._items.put_nowait(_END)
            raise item
        return item

    def cancel(self) -> None:
        self._task.cancel()

    async def _pump(self) -> None:
        last: Any = _END
        try:
            async for item in self._source:
                await self._items.put(item)
        except Exception as exc:  # noqa: BLE001 - whoever reads gets it
            last = exc
        finally:
            self._call.seen()
            await self._source.aclose()
        await self._items.put(last)


class Seam:
    """Looks like the engine client to vLLM's serving objects. Outside a call it is one."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Nothing at this point: a planned request may wait for long; `add_request` checks for itself."""

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        if (call := current.get(None)) is None:
            return cast("AsyncGenerator[Any, None]", self._llm.generate(prompt, sampling_params, request_id, **options))
        work = Work(prompt, sampling_params, request_id, options)
        call.works.append(work)
        return call.outputs(work)

    def encode(self, prompt: Any, pooling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        if (call := current.get(None)) is None:
            return cast("AsyncGenerator[Any, None]", self._llm.encode(prompt, pooling_params, request_id, **options))
        work = Work(prompt, pooling_params, request_id, options, pooling=True)
        call.works.append(work)
        return call.outputs(work)


_END = object()
_BACKGROUND: set[asyncio.Task[None]] = set()


def _background(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    _BACKGROUND.add(task)
    task.add_done_callback(_BACKGROUND.discard)


def _ignore(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()


def _merged(whole: Any, out: Any) -> Any:
    if whole is None:
        return out
    whole.add(out, aggregate=True)
    whole.outputs.sort(key=lambda one: one.index)
    return whole
