"""A client's end of one request, as the relay uses it: what came in, what goes out, and whether it is still there."""

import contextlib
from collections.abc import Iterable
from typing import Any, Protocol

from litestar.types import Receive, Scope, Send

Header = tuple[bytes, bytes]

ABORT = "signalbox.abort"
"""Scope extension of our own server: closes the connection at once, unsent bytes and all."""


class Line(Protocol):
    """`write` never waits: while `full`, the client has not taken in what was written, and `drain` waits until it has.

    What is written to a client that is gone is dropped.
    """

    @property
    def headers(self) -> Iterable[Header]:
        """The request's, names in lower case."""
        ...

    @property
    def full(self) -> bool: ...

    async def read(self) -> tuple[bytes, bool] | None:
        """The next part of the request's body, and whether more follows; None once the client is gone."""
        ...

    async def gone(self) -> None:
        """Return when the client is gone, or has its whole answer. Swallows what it still sends."""
        ...

    def start(self, status: int, headers: list[Header], length: int = -1, close: bool = False) -> None:
        """The response's head. `length` is its body's, in bytes, -1 where that is not known yet; `close`: the
        connection is not used again."""
        ...

    def write(self, data: bytes, more: bool) -> None:
        """A part of the response's body; without `more` the last."""
        ...

    async def drain(self) -> None: ...

    def abort(self) -> None:
        """Close the connection at once, unsent bytes and all."""
        ...

    def hang_up(self) -> None:
        """Nobody will say anything more. Closes the connection if its answer is not whole."""
        ...


class AsgiLine:
    """The same over any ASGI server, for whoever mounts the application elsewhere. It is full until it was drained."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers: Iterable[Header] = scope["headers"]
        self._receive, self._send = receive, send
        self._unsent: list[Any] = []
        extensions: Any = scope.get("extensions") or {}
        self._abort = extensions.get(ABORT, _nothing)

    def __repr__(self) -> str:
        return f"<AsgiLine {len(self._unsent)} messages to send>"

    @property
    def full(self) -> bool:
        return bool(self._unsent)

    async def read(self) -> tuple[bytes, bool] | None:
        message = await self._receive()
        if message["type"] != "http.request":
            return None
        return message.get("body", b""), message.get("more_body", False)

    async def gone(self) -> None:
        while await self.read() is not None:
            pass

    def start(self, status: int, headers: list[Header], length: int = -1, close: bool = False) -> None:
        if length >= 0:
            headers.append((b"content-length", b"%d" % length))
        if close:
            headers.append((b"connection", b"close"))
        self._unsent.append({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, data: bytes, more: bool) -> None:
        self._unsent.append({"type": "http.response.body", "body": data, "more_body": more})

    async def drain(self) -> None:
        while self._unsent:
            with contextlib.suppress(OSError):  # a server may say so when the client is gone
                await self._send(self._unsent.pop(0))

    def abort(self) -> None:
        self._abort()

    def hang_up(self) -> None:
        """The server sees that its application has returned."""


def _nothing() -> None:
    """In place of an abort, under a server that offers none."""
