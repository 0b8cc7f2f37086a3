"""Our side of uvicorn's HTTP/1.1 protocol: cheaper on the hot path, and stricter with clients.

The inference APIs get their requests from here without ASGI between: no scope, no messages, no routing. A response's
head waits for its first body bytes and leaves with them: one packet, one system call. A connection has one timer over
all its requests. What uvicorn does with the parser, flow control and pipelining stays uvicorn's.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.http.line import ABORT, Header
from gateway.http.relay import Relay

MOST_HEAD_BYTES = 65_536
JOINED_BYTES = 65_536  # up to this size a body is copied behind its head
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class Signal:
    """What uvicorn needs of an asyncio.Event for one waiter at a time, without its queue."""

    __slots__ = ("_told", "_waiter")

    def __init__(self) -> None:
        self._told = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._told = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._told = False

    async def wait(self) -> None:
        while not self._told:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


class Cycle(RequestResponseCycle):
    """One request and its response: a `Line` for a relay, `receive` and `send` for an ASGI application.

    `relay` is whose request it is, None for the application's.
    """

    _head = b""

    def __init__(self, protocol: "FrontProtocol", relay: Relay | None) -> None:
        self.headers, self.relay = protocol.headers, relay
        self.transport, self.flow, self.logger = protocol.transport, protocol.flow, protocol.logger
        self.on_response = protocol.on_response_complete
        self.message_event = Signal()  # type: ignore[assignment]
        self.keep_alive: bool = protocol.parser.get_http_version() != "1.0" and protocol.parser.should_keep_alive()
        self.waiting_for_100_continue = protocol.expect_100_continue
        self.disconnected = self.response_started = self.response_complete = False
        self.body = bytearray()
        self.more_body = True
        self.chunked_encoding = None
        self.expected_content_length = 0
        self.without_body = False  # an answer to HEAD

    # a relay's side

    @property
    def full(self) -> bool:
        return self.flow.write_paused and not (self.disconnected or self.response_complete)

    async def read(self) -> tuple[bytes, bool] | None:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if self.more_body and not (self.disconnected or self.response_complete):
            if self.flow.read_paused:
                self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return None
        body, self.body = bytes(self.body), bytearray()
        return body, self.more_body

    async def gone(self) -> None:
        while not (self.disconnected or self.response_complete):
            self.body.clear()
            self.flow.resume_reading()
            self.message_event.clear()
            await self.message_event.wait()

    def start(self, status: int, headers: list[Header], length: int = -1, close: bool = False) -> None:
        if self.disconnected:
            return
        self.response_started = True
        self.waiting_for_100_continue = False
        if close:
            self.keep_alive = False
        self.chunked_encoding = length < 0 and not self.without_body and status not in (204, 304)
        self.expected_content_length = max(0, length)
        lines = [STATUS_LINE[status], *[b"%b: %b\r\n" % header for header in headers]]
        if self.chunked_encoding:
            lines.append(b"transfer-encoding: chunked\r\n")
        elif length >= 0:
            lines.append(b"content-length: %d\r\n" % length)
        head = b"".join(lines)
        if not head.count(b"\n") == head.count(b"\r") == len(lines):
            raise RuntimeError("a header holds a line break")
        self._head = head + (b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")

    def write(self, data: bytes, more: bool) -> None:
        if not self.disconnected:
            self._body(data, more)

    async def drain(self) -> None:
        await self.flow.drain()

    def abort(self) -> None:
        self.transport.abort()

    def hang_up(self) -> None:
        if not (self.response_complete or self.disconnected):
            self.transport.close()

    # an application's side

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
        else:
            self._body(message.get("body", b""), message.get("more_body", False))

    def _start(self, status: int, headers: Any) -> None:
        if self.response_started:
            raise RuntimeError("the response has been started before")
        rest, length, close = [], -1, False
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"connection" and value == b"close":
                close = True
            else:
                rest.append((name, value))
        self.start(status, rest, length, close)

    def _body(self, body: bytes, more: bool) -> None:
        if not self.response_started or self.response_complete:
            raise RuntimeError("body bytes before a response's start or after its end")
        if self.without_body:
            body, self.expected_content_length = b"", 0
        elif self.chunked_encoding:
            if body:
                body = b"%x\r\n%b\r\n" % (len(body), body)
            if not more:
                body += b"0\r\n\r\n"
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or (not more and self.expected_content_length):
                raise RuntimeError("a body that is not as long as its content-length")
        self._write(body)
        if not more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    def _write(self, body: bytes) -> None:
        head, self._head = self._head, b""
        if head and len(body) > JOINED_BYTES:
            self.transport.write(head)
        else:
            body = head + body
        if body:
            self.transport.write(body)


class FrontProtocol(HttpToolsProtocol):
    """A connection. Takes the requests of `relays`, by path, to them and all others to the application.

    Offers the `signalbox.abort` scope extension; cuts off heads that are too late or too large.

    `header_s` bounds a request's head from its first byte, and a new connection's silence. An idle connection is closed
    after uvicorn's `timeout_keep_alive`. Both are looked at by one timer, which a request neither starts nor stops.
    """

    header_s = 10.0
    relays: Mapping[bytes, Relay] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._extensions = {ABORT: transport.abort}
        self._in_head = False
        self._head_bytes = 0
        self._waits_s = self.header_s  # how long the present silence or head may last
        self._since = self.loop.time()
        self._timer = self.loop.call_later(self.header_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if b"pgrade" in data and self._between_requests():
            data = _without_upgrade(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._unsupported_upgrade_warning()
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._in_head = True
        self._head_bytes = 0
        self._since, self._waits_s = self.loop.time(), self.header_s

    def on_headers_complete(self) -> None:
        self._in_head = False
        method = self.parser.get_method()
        relay = self.relays.get(self.url) if method == b"POST" else None
        before = self.cycle
        cycle = self.cycle = Cycle(self, relay)
        if relay is None:
            cycle.scope = self._scope(method)
            cycle.without_body = method == b"HEAD"
        if before is None or before.response_complete:
            self._begin(cycle)
        else:  # pipelined: it waits for the one before
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.body += body
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()

    def _begin(self, cycle: Any) -> None:
        if cycle.relay is None:
            self._start_asgi_task(cycle, self.app)
        else:
            cycle.relay.serve(cycle)

    def _scope(self, method: bytes) -> Any:
        url = httptools.parse_url(self.url)
        raw_path = url.path or b"/"
        return {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": self.parser.get_http_version(),
            "method": method.decode("ascii"),
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme or "http",
            "root_path": "",
            "raw_path": raw_path,
            "path": _unquoted(raw_path),
            "query_string": url.query or b"",
            "headers": self.headers,
            "state": self.app_state.copy(),
            "extensions": self._extensions,
        }

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._begin(self.pipeline.pop()[0])
        elif not self._in_head:
            self._since, self._waits_s = self.loop.time(), self.timeout_keep_alive

    def _look(self) -> None:
        """Close what has been silent, or at its head, for too long; look again when the next could be."""
        left_s = self.header_s
        if self._in_head or self._between_requests():
            left_s = self._since + self._waits_s - self.loop.time()
            if left_s <= 0:
                self._give_up()
                return
        self._timer = self.loop.call_later(max(0.05, min(left_s, self.header_s)), self._look)

    def _give_up(self) -> None:
        if self._in_head:
            self.transport.abort()
        else:
            self.transport.close()

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete


def _unquoted(raw_path: bytes) -> str:
    path = raw_path.decode("ascii")
    return unquote(path) if "%" in path else path


def _without_upgrade(data: bytes) -> bytes:
    """The head under another name for its `Upgrade`, which we never take up; the parser would drop the body after it.

    Java's client asks for h2c in every request. A head that comes in pieces may keep it.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest
