"""The running streams: our frames, vLLM's events, and whole answers."""

import asyncio
import time
from typing import Any

from backends.protocol import BackendError, Chunk, Kind, Stream, Usage
from backends.vllm_desk import body, event
from backends.vllm_faults import of_exception
from backends.vllm_frames import DONE, Frames, Shape
from backends.vllm_seam import Call

ERRORS = ('data: {"error"', "event: error\n", "event: response.failed\n")
"""How the events begin with which vLLM ends a stream that failed."""


def stream(call: Call, shape: Shape | None) -> Stream:
    """The stream of a started call."""
    if shape is not None:
        return Plain(call, shape)
    if isinstance(call.result, asyncio.Task):
        return Whole(call)
    if hasattr(call.result, "__aiter__"):
        return Events(call)
    return Ready(call)


class Plain:
    """Text in our own frames: outputs that piled up behind the pace or a slow reader come as one."""

    __slots__ = ("_call", "_ended", "_frames", "_pace", "_queue", "_started")

    def __init__(self, call: Call, shape: Shape) -> None:
        (work,) = call.works
        request_id = work.request_id.removesuffix("-0") if call.kind is Kind.COMPLETION else work.request_id
        self._frames = Frames(shape, request_id, time.time_ns() // 1_000_000_000)  # unix time, for people
        self._call, self._queue, self._pace = call, work.queue, call.pace()
        self._started = self._ended = False

    def __repr__(self) -> str:
        return f"<Plain {self._call!r}>"

    async def next(self) -> Chunk | None:
        """See `backends.protocol.Stream`."""
        call = self._call
        if self._ended or call.gone():
            return None
        await self._pace.turn()
        (work,) = call.works
        before = call.tokens
        try:
            out = self._queue.get_nowait() or await self._queue.get()
            call.count(work, out)
        except Exception as exc:
            self._ended = True
            raise of_exception(call.kind, exc) from exc
        if call.gone():
            return None
        one = out.outputs[0]
        head = b"" if self._started else self._frames.role
        self._started = True
        if not out.finished:
            self._pace.left()
            return Chunk(head + self._frames.text(one.text), call.tokens - before)
        self._ended = True
        usage = call.usage()
        tail = self._frames.usage(usage.prompt_tokens, usage.completion_tokens) + DONE
        data = head + self._frames.finish(one.text, one.finish_reason, one.stop_reason) + tail
        return Chunk(data, call.tokens - before, usage, last=True)

    async def aclose(self) -> None:
        """See `backends.protocol.Stream`."""
        await self._call.aclose()


class Events:
    """vLLM's own events: tools, reasoning, logprobs, several choices, Responses, Messages."""

    __slots__ = ("_call", "_ended", "_source", "_told")

    def __init__(self, call: Call) -> None:
        self._call, self._source = call, call.result
        self._told = 0  # tokens
        self._ended = False

    def __repr__(self) -> str:
        return f"<Events {self._call!r}>"

    async def next(self) -> Chunk | None:
        """See `backends.protocol.Stream`."""
        call = self._call
        if self._ended or call.gone():
            return None
        events: list[str] = []
        while (text := await self._event()) is not None:
            events.append(text)
            if call.finished and not call.lazy:
                continue  # the engine is through: the rest comes without a wait
            if call.tokens:  # what opens a stream waits for the first token: until then a failure has its own status
                return Chunk("".join(events).encode(), self._new_tokens())
        if call.gone():
            return None
        self._ended = True
        return Chunk("".join(events).encode(), self._new_tokens(), call.usage(), last=True)

    async def aclose(self) -> None:
        """See `backends.protocol.Stream`."""
        await self._call.aclose()

    async def _event(self) -> str | None:
        """The next event, or None at the end. Raises what vLLM would have told the client in the middle of a stream."""
        item: Any = None
        try:
            item = await anext(self._source, None)
        except Exception as exc:
            self._ended = True
            raise of_exception(self._call.kind, exc) from exc
        text = None if item is None else event(item)
        if self._call.gone():
            return None
        if (fault := self._call.fault()) is not None:
            self._ended = True
            raise fault
        if text is not None and text.startswith(ERRORS):
            self._ended = True
            raise BackendError(f"vLLM failed in the middle: {text[:500].strip()}")
        return text

    def _new_tokens(self) -> int:
        new, self._told = self._call.tokens - self._told, self._call.tokens
        return new


class Whole:
    """An answer in one piece: an empty chunk when its first token is there, the JSON at its end."""

    __slots__ = ("_call", "_ended", "_task", "_told")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._task: asyncio.Task[Any] = call.result
        self._told = 0  # tokens
        self._ended = False

    def __repr__(self) -> str:
        return f"<Whole {self._call!r}>"

    async def next(self) -> Chunk | None:
        """See `backends.protocol.Stream`."""
        call = self._call
        if self._ended or call.gone():
            return None
        if not self._told and call.kind is not Kind.EMBEDDINGS:
            await asyncio.wait((self._task, call.first), return_when=asyncio.FIRST_COMPLETED)
            if not self._task.done() and not call.gone():
                self._told = call.tokens
                return Chunk(b"", self._told)
        await asyncio.wait((self._task,))
        if call.gone():
            return None
        self._ended = True
        if (fault := call.fault()) is not None:
            raise fault
        answer = self._answer()
        return Chunk(body(call.kind, answer), call.tokens - self._told, self._usage(answer), last=True)

    async def aclose(self) -> None:
        """See `backends.protocol.Stream`."""
        await self._call.aclose()

    def _answer(self) -> Any:
        try:
            return self._task.result()
        except Exception as exc:
            raise of_exception(self._call.kind, exc) from exc

    def _usage(self, answer: Any) -> Usage:
        """Our count; vLLM's own where beams were searched, which cost more tokens than the answer has."""
        if getattr(self._call.request, "use_beam_search", False):
            return Usage(answer.usage.prompt_tokens, answer.usage.completion_tokens)
        return self._call.usage()


class Ready:
    """An answer that needed no engine: tokenisation."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    def __repr__(self) -> str:
        return f"<Ready {self._call!r}>"

    async def next(self) -> Chunk | None:
        """See `backends.protocol.Stream`."""
        if self._call.gone():
            return None
        data = body(self._call.kind, self._call.result)
        self._call.close()
        return Chunk(data, 0, Usage(), last=True)

    async def aclose(self) -> None:
        """See `backends.protocol.Stream`."""
        self._call.close()
