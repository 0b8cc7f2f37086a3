"""The two kinds of answer of an OpenAI-compatible server: a stream of events, and one JSON body."""

from collections.abc import Callable

from backends.http1 import Asked
from backends.http1_errors import Crowded, HttpError, Nonsense
from backends.http1_wire import Answer
from backends.openai_frames import USAGE_TAIL_BYTES, Part, join, look, usage_in_tail
from backends.openai_refusal import failure_of
from backends.protocol import BackendBusy, BackendError, BackendLost, Chunk, Usage
from backends.sse import Framer, each, payload

REFUSAL_BYTES = 1024 * 1024

Learn = Callable[[Usage], None]
_NOTHING = Chunk(b"")

# From the event on in which one of these stands, each is looked at; strings cannot hold them, their quotes are escaped.
_MARKS_COMPACT = (b'"finish_reason":"', b'"usage":{', b'"error"', b"[DONE]")
_MARKS_SPACED = (b'"finish_reason": "', b'"usage": {', b'"error"', b"[DONE]")


def as_backend_error(error: HttpError) -> Exception:
    """What a failure of the HTTP client means for a backend."""
    if isinstance(error, Nonsense):
        return BackendError(str(error))
    if isinstance(error, Crowded):
        return BackendBusy(str(error))
    return BackendLost(str(error))


async def accepted(asked: Asked, media: bytes) -> Answer:
    """The answer to a request once it has a head, if it is a good one. Raises what it means else, or HttpError."""
    answer = await asked.answered()
    if answer.status != 200:
        try:
            body = await whole_body(answer, REFUSAL_BYTES)
        except (HttpError, BackendError):
            body = b""
        asked.release()
        raise failure_of(answer.status, answer.headers, body)
    got = answer.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if got and got != media:
        asked.release()
        raise BackendError(f"the engine answered with {got[:80].decode('latin-1')!r}")
    return answer


async def whole_body(answer: Answer, most_bytes: int) -> bytes:
    """Read an answer to its end. Raises HttpError, or BackendError above `most_bytes`."""
    parts: list[bytes] = []
    size = 0
    while data := await answer.read():
        parts.append(data)
        size += len(data)
        if size > most_bytes:
            raise BackendError(f"an answer of more than {most_bytes} bytes")
    return b"".join(parts)


class EventStream:
    """A streamed answer. Events pass as they came; only those that open and close a stream are decoded.

    `hides_usage`: the client did not ask for the usage frame that we asked for, so it is cut out. `typed`: the events
    of the Responses and Messages APIs, all of which are looked at.
    """

    __slots__ = (
        "_answer",
        "_closed",
        "_error",
        "_framer",
        "_hides_usage",
        "_learn",
        "_looked",
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
        self._looked = 0  # bytes of the last read that were looked at event by event
        self._started = False  # an event with output has passed
        self._over = False
        self._closed = False
        self._usage: Usage | None = None
        self._error: BackendError | None = None

    def __repr__(self) -> str:
        return f"<EventStream {'over' if self._over else 'open'}, {self._answer!r}>"

    async def next(self) -> Chunk | None:
        while not (self._over or self._closed or self._error):
            try:
                data = await self._answer.read()
            except HttpError as error:
                if self._given_up():
                    return None
                raise as_backend_error(error) from error
            chunk = self._take(data)
            if chunk is not None:
                return chunk
        if self._error is not None and not self._closed:
            raise self._error
        return None

    async def aclose(self) -> None:
        self._closed = True
        self._answer.release(linger=self._over)

    def _given_up(self) -> bool:
        return self._closed

    def _take(self, data: bytes) -> Chunk | None:
        """What has become whole with these bytes, None if nothing has."""
        if not data:
            return self._end()
        try:
            events = self._framer.feed(data)
        except ValueError as error:
            raise BackendError(str(error)) from error
        if not events:
            return None
        if self._typed or b"\r" in events or b"\n:" in events or events.startswith(b":"):
            chunk = self._look(events)
        else:
            chunk = self._skim(events)
        return chunk if chunk.data or chunk.last else None

    def _skim(self, events: bytes) -> Chunk:
        """Only the events that open and close a stream are looked at; those between them are counted."""
        opening, begins = _NOTHING, 0
        if not self._started:
            opening = self._look(events, until_output=True)
            begins = self._looked
            if self._error is not None or self._over or begins == len(events):
                return opening
        found = [at for mark in self._marks if (at := events.find(mark, begins)) >= 0]
        ends = len(events)
        if found:
            before = events.rfind(b"\n\n", begins, min(found))
            ends = before + 2 if before >= 0 else begins
        tokens = opening.tokens + events.count(b"\n\n", begins, ends)
        if ends == len(events):
            return Chunk(events, tokens)
        closing = self._look(events[ends:])
        whole = len(opening.data) == begins and len(closing.data) == len(events) - ends
        data = events if whole else opening.data + events[begins:ends] + closing.data
        return Chunk(data, tokens + closing.tokens, closing.usage, closing.last)

    def _look(self, events: bytes, until_output: bool = False) -> Chunk:
        """Event by event. An error is kept for the next call when good events stand before it."""
        kept: list[bytes] = []
        tokens = 0
        self._looked = 0
        for event in each(events):
            self._looked += len(event)
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
                if until_output:
                    break
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

    def _end(self) -> Chunk:
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
    """An answer that is one JSON body, passed on in the pieces it arrives in. Its status comes at the first `next`."""

    __slots__ = ("_answer", "_asked", "_closed", "_learn", "_over", "_tail")

    def __init__(self, asked: Asked, learn: Learn) -> None:
        self._asked = asked
        self._answer: Answer | None = None
        self._learn = learn
        self._over = False
        self._closed = False
        self._tail = b""

    def __repr__(self) -> str:
        return f"<WholeAnswer {'over' if self._over else 'open'}, {self._asked!r}>"

    async def next(self) -> Chunk | None:
        if self._over or self._closed:
            return None
        try:
            answer = self._answer
            if answer is None:
                answer = self._answer = await accepted(self._asked, b"application/json")
            data = await answer.read()
        except HttpError as error:
            if self._given_up():
                return None
            raise as_backend_error(error) from error
        self._tail = data if len(data) >= USAGE_TAIL_BYTES else (self._tail + data)[-USAGE_TAIL_BYTES:]
        return self._end(data, answer) if answer.done else Chunk(data)

    async def aclose(self) -> None:
        self._closed = True
        self._asked.release()

    def _given_up(self) -> bool:
        return self._closed

    def _end(self, data: bytes, answer: Answer) -> Chunk:
        if not self._tail.rstrip().endswith((b"}", b"]")):
            if answer.until_close:
                raise BackendLost("the connection was closed in the middle of the answer")
            raise BackendError("the answer is not JSON")
        self._over = True
        self._asked.release()
        usage = usage_in_tail(self._tail)
        if usage is None:
            return Chunk(data, last=True)
        self._learn(usage)
        return Chunk(data, usage.completion_tokens, usage, last=True)
