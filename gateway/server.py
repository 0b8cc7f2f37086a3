"""The HTTP server of one process: uvicorn, with a limit on slow heads, a way to cut a stalled reader, and a drain."""

import asyncio
import re
import socket
from typing import Any

import uvicorn
from litestar import Litestar
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.config import ServerConfig
from gateway.http.front import Front
from gateway.http.relay import ABORT
from gateway.trunk import Trunk

MOST_HEAD_BYTES = 65_536
TICK_S = 0.1  # how often the server looks, while it drains, whether it is told to go at once


class Corked:
    """A transport that keeps a response's head back until its body's first bytes: one packet, one system call."""

    __slots__ = ("_held", "_transport", "close", "write")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""
        self.write = self._write
        self.close = self._close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _write(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 100"):
            self._held = data
            return
        self._transport.write(data)

    def flush(self) -> None:
        """Let a head go that has no body: an answer to HEAD."""
        if self._held:
            self._write(b"")

    def _close(self) -> None:
        self.flush()
        self._transport.close()


class FrontProtocol(HttpToolsProtocol):
    """Offers the `signalbox.abort` scope extension; cuts a connection whose request head is too late or too large.

    The timer runs for a new connection and for a head that came in pieces; a head in one read costs nothing.
    """

    header_s = 10.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._corked = Corked(transport)
        super().connection_made(self._corked)  # type: ignore[arg-type]
        self._head_bytes = 0
        self._extensions = {ABORT: transport.abort}
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(self.header_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        between = self._between_requests()
        if between and b"pgrade" in data:
            data = _without_upgrade(data)
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self.transport.abort()
                return
        elif not (between and self._between_requests()):
            return
        if self._head_timer is None:  # also for what begins no request: uvicorn has just stopped its own timer
            self._head_timer = self.loop.call_later(self.header_s, self.transport.abort)

    def on_response_complete(self) -> None:
        self._corked.flush()
        super().on_response_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self.scope["extensions"] = self._extensions  # type: ignore[typeddict-item]

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._stop_timer()
        super().on_headers_complete()

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _stop_timer(self) -> None:
        timer, self._head_timer = self._head_timer, None
        if timer is not None:
            timer.cancel()


def _without_upgrade(data: bytes) -> bytes:
    """The head under another name for its `Upgrade`, which we never take up; the parser would drop the body after it.

    Java's client asks for h2c in every request. A head that comes in pieces may keep it.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest


_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


class Server(uvicorn.Server):
    """On the first SIGTERM or SIGINT it refuses new work with 503 and lets streams finish; on the second it goes."""

    def __init__(self, config: uvicorn.Config, trunk: Trunk) -> None:
        super().__init__(config)
        self._trunk = trunk
        self._drain: asyncio.Task[None] | None = None

    async def on_tick(self, counter: int) -> bool:
        if not await super().on_tick(counter):
            return False
        if self._drain is None:
            limit_s = self._trunk.config.server.drain_s
            self._drain = asyncio.get_running_loop().create_task(self._trunk.drain(limit_s))
        await asyncio.wait([self._drain], timeout=TICK_S)
        return self._drain.done() or self.force_exit


def uvicorn_config(app: Litestar, server: ServerConfig) -> uvicorn.Config:
    """How uvicorn is set up for us. `FrontProtocol` takes its limit from the same section."""
    protocol = type("Front", (FrontProtocol,), {"header_s": server.header_s})
    files: dict[str, Any] = {}
    if server.tls_cert_file:
        files = {"ssl_certfile": server.tls_cert_file, "ssl_keyfile": server.tls_key_file}
    return uvicorn.Config(
        Front(app, app.state.relays),
        interface="asgi3",
        host=server.host,
        port=server.port,
        http=protocol,
        loop="uvloop",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        date_header=False,
        timeout_keep_alive=max(1, int(server.idle_s)),
        timeout_graceful_shutdown=5,
        backlog=4096,
        **files,
    )


def serve(app: Litestar, sockets: list[socket.socket] | None = None) -> None:
    """Serve until a signal. `app` is what `gateway.app.build` made; `sockets` are already listening ones, if any."""
    trunk: Trunk = app.state.trunk
    Server(uvicorn_config(app, trunk.config.server), trunk).run(sockets)
