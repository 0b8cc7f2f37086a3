"""One HTTP/1.1 connection to an engine, and the answer that is being read from it.

Framing is httptools' work. What is ours: ownership (an answer is read by one task and given back exactly once), back
pressure in both directions, deadlines that somebody else's timer looks at, and telling failures apart.
"""

import asyncio
from typing import Protocol, cast

import httptools

from backends.http1_errors import Broken, HttpError, Nonsense, Stale, TooLate

HIGH_BYTES = 256 * 1024  # unread body above which the engine is held back
SLICE_BYTES = 256 * 1024  # of a large request body, written at once
DRY_BYTES = 64 * 1024  # heads, trailers, chunk extensions: received in a row without a byte of body
LINGER_S = 1.0  # for the framing that follows the last event of a stream
LINGER_BYTES = 4096
STALE_S = 1.0  # a kept connection that closes later than this after the request had received it
NEVER = float("inf")


class Keeper(Protocol):
    """Whom a connection belongs to."""

    def opened(self, connection: "Connection") -> None: ...
    def keep(self, connection: "Connection") -> None: ...
    def forget(self, connection: "Connection") -> None: ...


class Connection(asyncio.Protocol):
    """A transport with at most one answer on it."""

    __slots__ = ("_abandoned", "answer", "full", "idle_since", "keeper", "loop", "transport", "uses")

    def __init__(self, keeper: Keeper, loop: asyncio.AbstractEventLoop) -> None:
        self.keeper = keeper
        self.loop = loop
        self.transport: asyncio.Transport | None = None
        self.answer: Answer | None = None
        self.full = False  # the transport holds as much unsent data as it should
        self.idle_since = 0.0
        self.uses = 0
        self._abandoned = False

    def __repr__(self) -> str:
        state = "closed" if self.closed else "busy" if self.answer else "idle"
        return f"<Connection {state}, {self.uses} requests>"

    @property
    def closed(self) -> bool:
        return self._abandoned or self.transport is None or self.transport.is_closing()

    def ask(self, head: bytes, body: bytes, answer: "Answer") -> None:
        """Write a request, or its head where `Answer.send_rest` is to follow."""
        assert self.transport is not None
        self.answer = answer
        self.uses += 1
        self.transport.write(head if len(body) > SLICE_BYTES else head + body)

    def abort(self) -> None:
        """Close at once, also when the connection is still being made. Idempotent."""
        self._abandoned = True
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        if self._abandoned:
            self.transport.abort()
        else:
            self.keeper.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.answer is None:
            self.abort()  # nobody asked for these bytes
        else:
            self.answer.feed(data)

    def eof_received(self) -> None:
        if self.answer is None or not self.answer.until_close:
            self.abort()  # not `close`: that would wait until what is left of the request has gone out

    def connection_lost(self, exc: Exception | None) -> None:
        self._abandoned = True
        self.keeper.forget(self)
        if self.answer is not None:
            self.answer.lost(exc)

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self.answer is not None:
            self.answer.wake()


class Answer:
    """One response. `head`, `read` and `send_rest` are for one task at a time; `release` may come from any.

    `headers` have names in lower case; of a repeated one the last stands. `deadline` is in the loop's time: by then a
    byte of body must have come, and it moves on by `idle_s` with each. Off while the reader holds the engine back.
    """

    __slots__ = (
        "_bodiless",
        "_connection",
        "_dry",
        "_ended",
        "_error",
        "_head_bytes",
        "_headed",
        "_heard",
        "_idle_s",
        "_keep",
        "_lingers",
        "_loop",
        "_parser",
        "_parts",
        "_paused",
        "_sent_at",
        "_size",
        "_unsent",
        "_waiter",
        "deadline",
        "headers",
        "status",
        "until_close",
    )

    def __init__(self, connection: Connection, first_byte_s: float, idle_s: float, bodiless: bool = False) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.until_close = False
        self._loop = connection.loop
        self._sent_at = self._loop.time()
        self.deadline = self._sent_at + first_byte_s
        self._idle_s = idle_s
        self._bodiless = bodiless
        self._connection: Connection | None = connection
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._size = 0
        self._dry = 0
        self._head_bytes = 0
        self._heard = self._headed = self._ended = self._keep = self._paused = self._lingers = self._unsent = False
        self._error: HttpError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = f"failed: {self._error}" if self._error else "ended" if self._ended else "open"
        return f"<Answer {self.status or 'without head'}, {state}, {self._size} bytes unread>"

    @property
    def done(self) -> bool:
        """Whether it has ended as it should and everything was read."""
        return self._ended and not self._parts

    async def send_rest(self, body: bytes) -> None:
        """Write a large request body in slices, no faster than the engine takes it; stops when it answers early."""
        self._unsent = True
        rest = memoryview(body)
        for start in range(0, len(rest), SLICE_BYTES):
            while self._error is None and not self._headed and self._connection is not None and self._connection.full:
                await self._wait()
            if self._error is not None:
                raise self._error
            if self._headed or self._connection is None:
                return
            assert self._connection.transport is not None
            self._connection.transport.write(rest[start : start + SLICE_BYTES])
        self._unsent = False

    async def head(self) -> None:
        """Wait until status and headers are there. Raises HttpError."""
        while not self._headed:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self) -> bytes:
        """All bytes of the body that are there; empty at its end. Raises HttpError after what came before it."""
        while not self._parts:
            if self._ended:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        self._size = 0
        if self._paused:
            self._resume()
        return data

    def release(self, linger: bool = False) -> None:
        """Give the connection back: kept if the answer has ended cleanly, else aborted, which tells the engine to stop.

        With `linger` the caller has all it needs and only framing may follow: that is waited for, briefly, by nobody.
        Synchronous, idempotent.
        """
        if self._lingers or self._connection is None:
            return
        if linger and self._headed and not self._ended and self._error is None:
            self._lingers = True
            self.deadline = self._loop.time() + LINGER_S
            self._size = 0
            self._parts = []
            if self._paused:
                self._resume()
            return
        self._give_back()

    def fail(self, error: HttpError) -> None:
        """End it with an error, and the connection with it. What was received before can still be read."""
        if not self._ended and self._error is None:
            self._error = error
        self._keep = False
        if self._connection is not None:
            self._connection.abort()
        if self._lingers:
            self._give_back()
        self.wake()

    def expire(self) -> None:
        """The deadline has passed."""
        if self._lingers:
            self.fail(TooLate("the end of the answer did not come"))
        elif not self._heard or not self._headed:
            self.fail(TooLate(f"no answer within {self.deadline - self._sent_at:.1f} s"))
        else:
            self.fail(
                TooLate(
                    f"silent in the middle of its answer, {self._loop.time() - self._sent_at:.1f} s after it was asked"
                )
            )

    def feed(self, data: bytes) -> None:
        """Bytes from the wire."""
        self._heard = True
        if self._ended or self._error is not None:
            self.fail(Nonsense("bytes after the end of the answer"))
            return
        before = self._size
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self.fail(cause if isinstance(cause, HttpError) else Nonsense(f"not HTTP: {error or type(error).__name__}"))
            return
        self._fed(len(data), self._size > before)

    def _fed(self, fed_bytes: int, had_body: bool) -> None:
        if self._ended and self._lingers:
            self._give_back()
            return
        if not had_body:
            self._dry += fed_bytes
            if self._dry > DRY_BYTES and not self._ended:
                self.fail(Nonsense(f"more than {DRY_BYTES} bytes without any body"))
                return
        else:
            self._dry = 0
            self.deadline = self._loop.time() + self._idle_s
            if self._size > HIGH_BYTES and not self._paused and not self._ended:
                self._pause()
        self.wake()

    def lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        if not self._ended and self._error is None:
            if self._headed and self.until_close and exc is None:
                self._ended = True
            else:
                self._error = self._how_lost(exc)
        self._keep = False
        if self._lingers:
            self._give_back()
        self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # What httptools calls; an exception in here comes out of feed_data as its context.

    def on_message_begin(self) -> None:
        if self._ended:
            raise Nonsense("bytes after the end of the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > DRY_BYTES:
            raise Nonsense(f"more than {DRY_BYTES} bytes of headers")
        if not self._headed:
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status: int = self._parser.get_status_code()
        if status == 101:
            raise Nonsense("a change of protocol that was not asked for")
        if status < 200:
            self.headers = {}  # an interim answer: the real one follows
            return
        self.status = status
        self._headed = True
        self._keep = self._parser.should_keep_alive()
        coding = self.headers.get(b"transfer-encoding")
        if coding is not None and coding.strip().lower() != b"chunked":
            raise Nonsense(f"transfer-encoding {coding[:40]!r}")
        encoding = self.headers.get(b"content-encoding")
        if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
            raise Nonsense(f"content-encoding {encoding[:40]!r} that was not asked for")
        if self._bodiless:
            self._ended = True
        elif not self._keep:
            bounded = coding is not None or b"content-length" in self.headers or status in (204, 304)
            self.until_close = not bounded

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if not self._lingers:
            self._parts.append(body)
        elif self._size > LINGER_BYTES:
            raise Nonsense("a body after the end of the stream")

    def on_message_complete(self) -> None:
        if self._headed:
            self._ended = True

    def _give_back(self) -> None:
        connection = self._connection
        if connection is None:
            return
        self._connection = self._parser = None
        self._parts = []
        connection.answer = None
        if self._ended and self._keep and not self._unsent and not connection.closed:
            if self._paused:
                self._resume_on(connection)
            connection.keeper.keep(connection)
        else:
            if not self._ended and self._error is None:
                self._error = Broken("the answer was given up here")
            connection.abort()
        self.wake()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _pause(self) -> None:
        if self._connection is not None and self._connection.transport is not None:
            self._paused = True
            self.deadline = NEVER
            self._connection.transport.pause_reading()

    def _resume(self) -> None:
        if self._connection is not None and not self._connection.closed:
            self.deadline = self._loop.time() + self._idle_s
            self._resume_on(self._connection)
        self._paused = False

    def _resume_on(self, connection: Connection) -> None:
        self._paused = False
        assert connection.transport is not None
        connection.transport.resume_reading()

    def _how_lost(self, exc: Exception | None) -> HttpError:
        connection = self._connection
        how = f": {exc}" if exc else ""
        if not self._heard:
            quick = self._loop.time() - self._sent_at < STALE_S
            if connection is not None and connection.uses > 1 and quick:
                return Stale(f"a kept connection was closed{how}")
            return Broken(f"the connection was closed before any answer{how}")
        return Broken(f"the connection was closed in the middle of the answer{how}")
