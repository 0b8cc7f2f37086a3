"""A server below HTTP: it sends exactly the bytes it is told, in the pieces it is told, and closes as it is told."""

import asyncio
import enum
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Any


class Do(enum.Enum):
    """What a server may do between sending bytes."""

    FIN = "close in order"
    RST = "close rudely"
    HANG = "stay silent until released"
    TICK = "a moment, so that the next bytes are a read of their own"


Step = bytes | Do
Answer = Sequence[Step]


class FaultServer:
    """Answers the n-th request it hears with the n-th of `answers`, the last one for all that follow.

    After the steps of an answer the connection stays open for another request. `early` steps are taken as soon as a
    connection is made, before any request. `requests` are what it heard, one list per connection.
    """

    def __init__(self, *answers: Answer, early: Answer = (), reads: bool = True) -> None:
        self.answers = list(answers)
        self.early = early
        self.reads = reads  # False: never takes a byte of a request's body
        self.requests: list[list[bytes]] = []
        self.heard = 0
        self.gone = 0  # connections that the client has ended
        self.url = ""
        self.live: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Event()
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "FaultServer":
        return self if self._server else await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self, tls: ssl.SSLContext | None = None, unix: str = "", host: str = "127.0.0.1") -> "FaultServer":
        if unix:
            self._server = await asyncio.start_unix_server(self._serve, unix)
            self.url = f"unix:{unix}"
        else:
            self._server = await asyncio.start_server(self._serve, host, 0, ssl=tls)
            port = self._server.sockets[0].getsockname()[1]
            self.url = f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
        return self

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self.live):
            task.cancel()
        await asyncio.gather(*self.live, return_exceptions=True)

    def release(self) -> None:
        self._gate.set()

    async def until(self, condition: Any, limit_s: float = 5.0) -> None:
        """Wait until a condition on this server holds."""
        async with asyncio.timeout(limit_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.live.add(task)
        try:
            await self._talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone += 1
        except asyncio.CancelledError:
            pass
        finally:
            writer.transport.abort()
            self.live.discard(task)
            self._changed.set()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard: list[bytes] = []
        self.requests.append(heard)
        self._changed.set()
        if not await self._act(self.early, reader, writer):
            return
        while True:
            heard.append(await self._request(reader))
            answer = self.answers[min(self.heard, len(self.answers) - 1)]
            self.heard += 1
            self._changed.set()
            if not await self._act(answer, reader, writer):
                return

    async def _request(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        return head + (await reader.readexactly(length) if length and self.reads else b"")

    async def _act(self, steps: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Take the steps; False when one of them ended the connection."""
        for step in steps:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif step is Do.TICK:
                await asyncio.sleep(0.001)
            elif step is Do.HANG:
                if await self._hang(reader):
                    self.gone += 1
                    return False
            else:
                await self._end(step, writer)
                return False
        return True

    async def _hang(self, reader: asyncio.StreamReader) -> bool:
        """Wait for `release`; True when the client went away first."""
        gate = asyncio.ensure_future(self._gate.wait())
        left = asyncio.ensure_future(_to_end(reader) if self.reads else asyncio.Event().wait())
        try:
            await asyncio.wait((gate, left), return_when=asyncio.FIRST_COMPLETED)
            return left.done()
        finally:
            gate.cancel()
            left.cancel()
            await asyncio.gather(gate, left, return_exceptions=True)

    async def _end(self, step: Do, writer: asyncio.StreamWriter) -> None:
        if step is Do.RST:
            sock = writer.get_extra_info("socket")
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()
            await writer.wait_closed()


async def _to_end(reader: asyncio.StreamReader) -> bool:
    while await reader.read(65536):
        pass
    return True


def sized(body: bytes, status: bytes = b"200 OK", more: bytes = b"", media: bytes = b"application/json") -> bytes:
    """An answer with a content-length."""
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b" % (status, media, len(body), more, body)


def chunked(*parts: bytes, more: bytes = b"", media: bytes = b"text/event-stream", end: bytes = b"0\r\n\r\n") -> bytes:
    """An answer in chunks."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n%b\r\n%b%b" % (media, more, body, end)


def closing(body: bytes, media: bytes = b"application/json") -> bytes:
    """An answer that ends where the connection does."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\nconnection: close\r\n\r\n%b" % (media, body)
