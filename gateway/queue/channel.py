"""One connection to one store server: open, one command at a time, close. Nothing else touches a socket.

Not redis-py's connection: its streams and parsers around hiredis cost several times what a turn's own bytes do, and it
would reconnect inside a call, while what may have run must be sent again only by a protocol that knows how, and only
after it has seen which server answers.
"""

import asyncio
import ssl
from typing import Any, cast

import hiredis
import redis.exceptions
from msgspec import Struct

from gateway.queue import wire

CONNECT_S = 2.0

LOGIN_FIELD = "store.password_env, store.password_file or store.url"


class StoreUnfit(Exception):
    """The store may not be used: too old, evicting, or a URL that is not supported. Names the field."""


class StoreAway(Exception):
    """The store cannot be reached now, or the connection is gone. Trying again makes sense."""


GONE = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.InvalidResponse,
    OSError,
    StoreAway,
)
"""What a dead connection raises, or a server that is not the one to ask now; any other error is an answer."""

NOT_NOW = frozenset(
    {"MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "LOADING", "BUSY", "NOREPLICAS", "MISCONF"}
)
"""Error answers that say: nothing ran, ask elsewhere or later."""


class Address(Struct, frozen=True):
    """A server's TCP address, or the path of its unix socket."""

    host: str = ""
    port: int = 6379
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class Login(Struct, frozen=True):
    """How to get in. Without a password nothing is said; without a name it is the default user's."""

    username: str = ""
    password: str = ""
    database: int = 0


class Channel:
    """An open, authenticated connection to `address`. A call that was cancelled leaves it of no use: close it."""

    __slots__ = ("_line", "address")

    def __init__(self, address: Address, line: "_Line") -> None:
        self.address = address
        self._line = line

    def __repr__(self) -> str:
        return f"<Channel {self.address}{' closed' if self._line.lost else ''}>"

    @classmethod
    async def connect(
        cls, address: Address, login: Login, tls: ssl.SSLContext | None = None, field: str = LOGIN_FIELD
    ) -> "Channel":
        """Within CONNECT_S. Raises StoreAway, or StoreUnfit for a login that is refused, which names `field`."""
        line = _Line()
        channel = cls(address, line)
        try:
            async with asyncio.timeout(CONNECT_S):
                await _dial(line, address, tls)
                await _log_in(channel, login)
        except GONE as error:
            line.abort()
            raise fault(error, address) from None
        except redis.exceptions.ResponseError as error:
            line.abort()
            raise StoreUnfit(f"{field}: {error}") from None
        except BaseException:
            line.abort()
            raise
        return channel

    async def call(self, *words: bytes) -> Any:
        """One command and its answer: bytes, integers, None and lists of them (in which errors are exceptions).

        Raises one of GONE, after which the channel is of no use; redis's ResponseError for an error answer.
        """
        reply = await self._line.ask(wire.command(*words))
        if isinstance(reply, redis.exceptions.ResponseError):
            raise as_answered(reply)
        return reply

    def close(self) -> None:
        """At once, without a word to the server; a call that is under way ends with StoreAway. Idempotent."""
        self._line.abort()


class _Line(asyncio.Protocol):
    """Bytes out, and one reply at a time back. `lost` is why no more will come, None while it is open."""

    __slots__ = ("_reader", "_transport", "_waiter", "lost")

    def __init__(self) -> None:
        self.lost: Exception | None = None
        self._reader = hiredis.Reader(protocolError=redis.exceptions.InvalidResponse, replyError=_answered)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Any] | None = None

    async def ask(self, command: bytes) -> Any:
        """The next reply; an error answer is an exception in it. Raises one of GONE."""
        if self.lost is not None:
            raise StoreAway(str(self.lost))
        assert self._transport is not None
        assert self._waiter is None, "one call at a time"
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(command)
        try:
            return await self._waiter
        except asyncio.CancelledError:
            self._fail(StoreAway("a call was given up, and its answer may still come"))
            raise
        finally:
            self._waiter = None

    def abort(self) -> None:
        self._fail(StoreAway("the connection to the store is closed"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        if self.lost is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._fail(StoreAway("the store said something that nobody asked for"))
            return
        try:
            reply = self._reader.gets()
        except redis.exceptions.InvalidResponse as error:
            self._fail(error)
            return
        if reply is not False:  # it is not whole yet
            waiter.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(StoreAway(f"the store closed the connection{f': {exc}' if exc else ''}"))

    def _fail(self, error: Exception) -> None:
        if self.lost is None:
            self.lost = error
        if self._transport is not None:
            self._transport.abort()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self.lost)


async def _dial(line: _Line, address: Address, tls: ssl.SSLContext | None) -> None:
    loop = asyncio.get_running_loop()
    if address.path:
        await loop.create_unix_connection(lambda: line, address.path)
    else:
        name = address.host if tls is not None else None
        await loop.create_connection(lambda: line, address.host, address.port, ssl=tls, server_hostname=name)


async def _log_in(channel: Channel, login: Login) -> None:
    if login.password:
        await ask(channel, "AUTH", *([login.username] if login.username else []), login.password)
    if login.database:
        await ask(channel, "SELECT", str(login.database))
    else:
        await ask(channel, "PING")  # refused where a password is needed and none was given


_KINDS: dict[str, type[redis.exceptions.ResponseError]] = {
    "NOSCRIPT": redis.exceptions.NoScriptError,
    "NOPERM": redis.exceptions.NoPermissionError,
}


def _answered(text: str) -> redis.exceptions.ResponseError:
    """An error answer, of the kind that somebody here asks for."""
    return _KINDS.get(text.partition(" ")[0], redis.exceptions.ResponseError)(text)


async def ask(channel: Channel, *words: str) -> Any:
    """One rare command, as `call`."""
    return await channel.call(*(word.encode() for word in words))


def as_answered(error: redis.exceptions.ResponseError) -> Exception:
    """An error answer as what it means: StoreAway where it says that nothing ran and another time or server may do."""
    if str(error).partition(" ")[0] in NOT_NOW or "max number of clients" in str(error):
        return StoreAway(f"store.url: the server answers {error}".rstrip())
    return error


def fault(error: BaseException, address: Address) -> StoreAway:
    """What a failure to reach the store means."""
    return error if isinstance(error, StoreAway) else StoreAway(f"store.url: {address}: {str(error) or 'no answer'}")
