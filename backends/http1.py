"""The small HTTP/1.1 client for engine connections: where they are, and a pool that keeps them.

No task, no time-out object and no timer per request: one timer per pool looks at all deadlines. What it leaves out on
purpose: redirects, cookies, proxies, compression, HTTP/2.
"""

import asyncio
import ssl
from urllib.parse import urlsplit

from msgspec import Struct

from backends.http1_errors import Broken, Crowded, NotConnected, Stale
from backends.http1_wire import SLICE_BYTES, Answer, Connection

_DEFAULT_PORTS = {"http": 80, "https": 443}


class Origin(Struct, frozen=True):
    """Where an engine listens. `path` is that of a unix socket, else empty; `prefix` goes before all request paths."""

    scheme: str
    host: str
    port: int
    path: str = ""
    prefix: str = ""

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"{self.scheme}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        """What goes into the `host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS.get(self.scheme, 0) else f"{host}:{self.port}"


def parse_url(url: str) -> Origin:
    """`http[s]://host[:port][/prefix]` or `unix:/path`; a final `/v1` is understood and dropped. Raises ValueError."""
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"{url!r} is not a URL")
    scheme, _, rest = url.partition(":")
    if scheme == "unix":
        path = rest.removeprefix("//")
        if not path.startswith("/"):
            raise ValueError(f"{url!r}: a unix URL is unix:/path/to/socket")
        return Origin("http", "localhost", 80, path)
    parts = urlsplit(url)
    if parts.scheme not in _DEFAULT_PORTS:
        raise ValueError(f"{url!r} does not start with http://, https:// or unix:")
    if not parts.hostname:
        raise ValueError(f"{url!r} names no host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a URL must not carry a user or password: put the key into api_key_env or api_key_file")
    if parts.query or parts.fragment:
        raise ValueError(f"{url!r}: a query or fragment has no meaning here")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}") from None
    if port == 0:
        raise ValueError(f"{url!r}: port 0 cannot be connected to")
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Origin(parts.scheme, parts.hostname, port or _DEFAULT_PORTS[parts.scheme], "", prefix)


def tls_context(ca_file: str = "", verify: bool = True) -> ssl.SSLContext:
    """For https: the system's authorities, or those in `ca_file` only. Reads files; raises OSError, ssl.SSLError."""
    context = ssl.create_default_context(cafile=ca_file or None)
    context.set_alpn_protocols(["http/1.1"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class Timing(Struct, frozen=True):
    """How long an engine may take, in seconds: to accept, to the first byte of a body, between two of them.

    `keep_s` is how long an unused connection is kept: below the engine's own limit (uvicorn closes after 5 s).
    """

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    idle_s: float = 60.0
    keep_s: float = 4.0


class Pool:
    """Connections to one engine, the last used first.

    `made`, `reused` and `retried` count connections made, requests on a kept one, and requests sent a second time.
    """

    def __init__(self, origin: Origin, timing: Timing, tls: ssl.SSLContext | None = None, most: int = 1024) -> None:
        self.origin = origin
        self.timing = timing
        self.tls = tls
        self.most = most
        self.made = 0
        self.reused = 0
        self.retried = 0
        self._loop = asyncio.get_running_loop()
        self._open: set[Connection] = set()
        self._idle: list[Connection] = []
        self._connecting = 0
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        shortest = min(timing.first_byte_s, timing.idle_s, timing.keep_s)
        self._tick_s = min(max(shortest / 4, 0.02), 1.0)

    def __repr__(self) -> str:
        return f"<Pool {self.origin}: {len(self._open)} open, {len(self._idle)} idle, {self.retried} retried>"

    def __len__(self) -> int:
        return len(self._open)

    @property
    def idle(self) -> int:
        return len(self._idle)

    async def ask(self, head: bytes, body: bytes = b"", first_byte_s: float = 0.0, bodiless: bool = False) -> "Asked":
        """Write a request. The caller owns what comes back and must release it. Raises HttpError.

        `head` ends with an empty line and states the length of `body`; `bodiless` is for HEAD.
        """
        asked = Asked(self, head, body, first_byte_s or self.timing.first_byte_s, bodiless)
        try:
            await asked.write()
        except BaseException:
            asked.release()
            raise
        return asked

    def close(self) -> None:
        """Abort every connection; running answers fail. Synchronous, idempotent."""
        self._closed = True
        for connection in tuple(self._open):
            if connection.answer is not None:
                connection.answer.fail(Broken("this client was closed"))
            connection.abort()
        self._idle.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # What connections tell.

    def opened(self, connection: Connection) -> None:
        self.made += 1
        self._open.add(connection)
        if self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._sweep)

    def keep(self, connection: Connection) -> None:
        if self._closed:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def kept(self) -> Connection | None:
        """A connection that was kept and still is good."""
        oldest = self._loop.time() - self.timing.keep_s
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest and not connection.closed:
                self.reused += 1
                return connection
            connection.abort()
        return None

    async def connect(self) -> Connection:
        """A new one. Raises NotConnected or Crowded."""
        if self._closed:
            raise NotConnected("this client was closed")
        if len(self._open) - len(self._idle) + self._connecting >= self.most:
            raise Crowded(f"{self.most} connections to {self.origin} are open")
        connection = Connection(self, self._loop)
        self._connecting += 1
        try:
            async with asyncio.timeout(self.timing.connect_s):
                await self._dial(connection)
        except TimeoutError:
            self._drop(connection)
            raise NotConnected(
                f"{self.origin} did not accept a connection within {self.timing.connect_s:g} s"
            ) from None
        except OSError as error:
            self._drop(connection)
            raise NotConnected(f"cannot connect to {self.origin}: {error}") from error
        except BaseException:
            self._drop(connection)
            raise
        finally:
            self._connecting -= 1
        if connection.closed:
            raise NotConnected(f"{self.origin} closed the connection at once")
        return connection

    def _drop(self, connection: Connection) -> None:
        """End a connection that may be half made: its loop need not tell that it was lost."""
        connection.abort()
        self.forget(connection)

    async def _dial(self, connection: Connection) -> None:
        origin = self.origin
        if origin.path:
            await self._loop.create_unix_connection(lambda: connection, origin.path)
        else:
            name = origin.host if self.tls is not None else None
            await self._loop.create_connection(
                lambda: connection, origin.host, origin.port, ssl=self.tls, server_hostname=name
            )

    def _sweep(self) -> None:
        now = self._loop.time()
        oldest = now - self.timing.keep_s
        for connection in tuple(self._open):
            if connection.answer is not None:
                if connection.answer.deadline < now:
                    connection.answer.expire()
            elif connection.idle_since < oldest and connection in self._idle:
                connection.abort()
        self._timer = self._loop.call_later(self._tick_s, self._sweep) if self._open else None


class Asked:
    """A request that was written, and its answer once that has a head. For one task; `release` may come from any.

    What a kept connection turns out to have been closed for is written again, once, on a fresh one.
    """

    __slots__ = ("_again", "_answer", "_bodiless", "_body", "_first_byte_s", "_head", "_pool", "_released")

    def __init__(self, pool: Pool, head: bytes, body: bytes, first_byte_s: float, bodiless: bool) -> None:
        self._pool = pool
        self._head = head
        self._body = body
        self._first_byte_s = first_byte_s
        self._bodiless = bodiless
        self._answer: Answer | None = None
        self._again = False
        self._released = False

    def __repr__(self) -> str:
        return f"<Asked {self._answer!r}>"

    async def write(self) -> None:
        """Find a connection and write. Raises HttpError."""
        while True:
            connection = (None if self._again else self._pool.kept()) or await self._pool.connect()
            if self._released:
                connection.abort()
                raise Broken("the request was given up here")
            answer = Answer(connection, self._first_byte_s, self._pool.timing.idle_s, self._bodiless)
            self._answer = answer
            try:
                connection.ask(self._head, self._body, answer)
                if len(self._body) > SLICE_BYTES:
                    await answer.send_rest(self._body)
            except Stale:
                if not self._may_retry():
                    raise
            else:
                return

    async def answered(self) -> Answer:
        """Wait for the head. Raises HttpError."""
        while True:
            answer = self._answer
            assert answer is not None
            try:
                if not answer.status:
                    await answer.head()
            except Stale:
                if not self._may_retry():
                    raise
                await self.write()
            else:
                return answer

    def release(self) -> None:
        """Give up, or give back what has ended. Synchronous, idempotent."""
        self._released = True
        if self._answer is not None:
            self._answer.release()

    def _may_retry(self) -> bool:
        """Make ready for another connection, if this was the first."""
        if self._again or self._released or self._answer is None:
            return False
        self._answer.release()
        self._again = True
        self._pool.retried += 1
        return True
