"""The two kinds of answer of an OpenAI-compatible server: a stream of events, and one JSON body."""

from collections.abc import Callable

from backends.http1_errors import Crowded, HttpError, Nonsense
from backends.http1_wire import Answer
from backends.openai_frames import USAGE_TAIL_BYTES, Part, join, look, usage_in_tail
from backends.protocol import BackendBusy, BackendError, BackendLost, Chunk, Usage
from backends.sse import Framer, payload, split

Learn = Callable[[Usage], None]

# A read in which one of these stands is looked at event by event; strings cannot hold them, their quotes are escaped.
_MARKS_COMPACT = (b'"finish_reason":"', b'"usage":{', b'"error"', b"[DONE]")
_MARKS_SPACED = (b'"finish_reason": "', b'"usage": {', b'"error"', b"[DONE]")


def as_backend_error(error: HttpError) -> Exception:
    """What a failure of the HTTP client means for a backend."""
    if isinstance(error, Nonsense):
        return BackendError(str(error))
    if isinstance(error, Crowded):
        return BackendBusy(str(error))
    return BackendLost(str(error))


class EventStream:
    """A streamed answer. Events pass as they came; only those that open and close a stream are decoded.

    `hides_usage`: the client did not ask for the usage frame that we asked for, so it is cut out. `typed`: the events
    of the Responses and Messages APIs, all of which are looked at.
    """

    __slots__ = (
        "_answer",
        "_error",
        "_framer",
        "_hides_usage",
        "_learn",
        "_marks",
        "_over",
        "_started",
        "_typed",
        "_usage",
    )

    def __init__(self, answer: Answer, hides_usage: bool, typed: bool, learn: Learn) -> None:
        self._answer = answer
        self._hides_usage = hides_usage
        self._typed = typed
        self._learn = learn
        self._framer = Framer()
        self._marks = _MARKS_COMPACT
        self._started = False  # an event with output has passed
        self._over = False
        self._usage: Usage | None = None
        self._error: BackendError | None = None

    def __repr__(self) -> str:
        return f"<EventStream {'over' if self._over else 'open'}, {self._answer!r}>"

    async def next(self) -> Chunk | None:
        while self._error is None:
            if self._over:
                return None
            try:
                data = await self._answer.read()
                events = self._framer.feed(data)
            except HttpError as error:
                raise as_backend_error(error) from error
            except ValueError as error:
                raise BackendError(str(error)) from error
            if not data:
                return self._end()
            if not events:
                continue
            if self._started and not self._typed and self._plain(events):
                return Chunk(events, events.count(b"\n\n"))
            chunk = self._look(events)
            if chunk.data or chunk.last:
                return chunk
        raise self._error

    async def aclose(self) -> None:
        self._answer.release(linger=self._over)

    def _plain(self, events: bytes) -> bool:
        if events.startswith(b":") or b"\r" in events:
            return False
        first, second, third, fourth = self._marks
        return not (first in events or second in events or third in events or fourth in events)

    def _look(self, events: bytes) -> Chunk:
        """Event by event. An error is kept for the next call when good events stand before it."""
        kept: list[bytes] = []
        tokens = 0
        for event in split(events):
            try:
                seen = look(payload(event))
            except ValueError as error:
                self._error = BackendError(str(error))
                break
            self._usage = join(self._usage, seen.usage)
            if seen.part is Part.ERROR:
                self._error = BackendError(f"the engine says: {seen.text}")
                break
            if seen.part is Part.USAGE and self._hides_usage:
                continue
            kept.append(event)
            if seen.part is Part.OUTPUT:
                tokens += 1
                if not self._started:
                    self._started = True
                    self._marks = _MARKS_SPACED if b'"choices": ' in event else _MARKS_COMPACT
            elif seen.part is Part.END:
                self._over = True
        return self._chunk(b"".join(kept), tokens)

    def _chunk(self, data: bytes, tokens: int) -> Chunk:
        if not self._over:
            return Chunk(data, tokens)
        self._answer.release(linger=True)
        if self._usage is not None:
            self._learn(self._usage)
        return Chunk(data, tokens, self._usage, last=True)

    def _end(self) -> Chunk | None:
        """The body has ended, and no event said so."""
        rest = self._framer.rest().strip()
        chunk = self._look(rest + b"\n\n") if rest else Chunk(b"")
        if self._over:
            return chunk
        if self._answer.until_close:
            raise BackendLost("the connection was closed before the stream's end")
        if self._error is not None:
            raise self._error
        self._over = True
        return self._chunk(chunk.data, chunk.tokens)


class WholeAnswer:
    """An answer that is one JSON body, passed on in the pieces it arrives in."""

    __slots__ = ("_answer", "_learn", "_over", "_tail")

    def __init__(self, answer: Answer, learn: Learn) -> None:
        self._answer = answer
        self._learn = learn
        self._over = False
        self._tail = b""

    def __repr__(self) -> str:
        return f"<WholeAnswer {'over' if self._over else 'open'}, {self._answer!r}>"

    async def next(self) -> Chunk | None:
        if self._over:
            return None
        try:
            data = await self._answer.read()
        except HttpError as error:
            raise as_backend_error(error) from error
        self._tail = data if len(data) >= USAGE_TAIL_BYTES else (self._tail + data)[-USAGE_TAIL_BYTES:]
        if not self._answer.done:
            return Chunk(data)
        if not self._tail.rstrip().endswith((b"}", b"]")):
            if self._answer.until_close:
                raise BackendLost("the connection was closed in the middle of the answer")
            raise BackendError("the answer is not JSON")
        self._over = True
        usage = usage_in_tail(self._tail)
        self._answer.release()
        if usage is None:
            return Chunk(data, last=True)
        self._learn(usage)
        return Chunk(data, usage.completion_tokens, usage, last=True)

    async def aclose(self) -> None:
        self._answer.release()
