"""What the tests of the HTTP client send, and a connection without a network."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

from backends.http1 import Pool
from backends.http1_wire import Answer, Connection

CERTS = Path(__file__).parents[2] / "support" / "certs"
GET = b"GET /x HTTP/1.1\r\nhost: engine\r\n\r\n"


def post(body: bytes) -> bytes:
    return b"POST /x HTTP/1.1\r\nhost: engine\r\ncontent-length: %d\r\n\r\n" % len(body)


async def fetch(pool: Pool, head: bytes = GET, body: bytes = b"", **more: Any) -> tuple[int, bytes]:
    """One exchange from its start to its end."""
    asked = await pool.ask(head, body, **more)
    try:
        answer = await asked.answered()
        parts = []
        while data := await answer.read():
            parts.append(data)
        return answer.status, b"".join(parts)
    finally:
        asked.release()


class Keep:
    """A keeper that notes what it is told."""

    def __init__(self) -> None:
        self.kept: list[Connection] = []
        self.forgotten: list[Connection] = []

    def opened(self, connection: Connection) -> None: ...

    def keep(self, connection: Connection) -> None:
        self.kept.append(connection)

    def forget(self, connection: Connection) -> None:
        self.forgotten.append(connection)


class Pipe(asyncio.Transport):
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.aborted = self.paused = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Bare:
    """One answer on a connection that is fed by hand."""

    def __init__(self, reused: bool = False, bodiless: bool = False) -> None:
        self.keeper = Keep()
        self.pipe = Pipe()
        self.connection = Connection(self.keeper, asyncio.get_running_loop())
        self.connection.connection_made(self.pipe)
        self.connection.uses = int(reused)
        self.answer = Answer(self.connection, 60.0, 60.0, bodiless)
        self.connection.ask(GET, b"", self.answer)

    @property
    def kept(self) -> bool:
        return bool(self.keeper.kept) and not self.pipe.aborted

    def feed(self, *pieces: bytes) -> None:
        for piece in pieces:
            if not self.pipe.aborted:
                self.connection.data_received(piece)

    def close(self, error: Exception | None = None) -> None:
        if error is None:
            self.connection.eof_received()
        self.connection.connection_lost(error)

    async def result(self) -> tuple[int, bytes]:
        """What the reader gets; everything must have been fed."""
        try:
            async with asyncio.timeout(1.0):
                await self.answer.head()
                parts = []
                while data := await self.answer.read():
                    parts.append(data)
                return self.answer.status, b"".join(parts)
        finally:
            self.answer.release()


def server_tls() -> ssl.SSLContext:
    """A certificate for `localhost` by the authority in `ca.pem`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTS / "server.pem")
    return context
