"""One connection to one store server: open, one command at a time, close. Nothing else touches a socket.

redis-py retries silently by default and would reconnect inside a call. Both are off: what may have run is sent again
only by a protocol that knows how, and only after it has seen which server answers.
"""

import asyncio
import ssl
from typing import Any

import redis.exceptions
from msgspec import Struct
from redis.asyncio.connection import AbstractConnection, Connection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.queue import wire

CONNECT_S = 2.0


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

    __slots__ = ("_connection", "address")

    def __init__(self, address: Address, connection: AbstractConnection) -> None:
        self.address = address
        self._connection = connection

    def __repr__(self) -> str:
        return f"<Channel {self.address}{'' if self._connection.is_connected else ' closed'}>"

    @classmethod
    async def connect(cls, address: Address, login: Login, tls: ssl.SSLContext | None = None) -> "Channel":
        """Within CONNECT_S. Raises StoreAway, or StoreUnfit for a login that is refused."""
        connection = _connection(address, login, tls)
        try:
            async with asyncio.timeout(CONNECT_S):
                await connection.connect()  # type: ignore[no-untyped-call]
        except GONE as error:
            await connection.disconnect(nowait=True)
            raise fault(error) from None
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return cls(address, connection)

    async def call(self, *words: bytes) -> Any:
        """One command and its answer: bytes, integers, None and lists of them (in which errors are exceptions).

        Raises one of GONE, after which the channel is of no use; redis's ResponseError for an error answer.
        """
        connection = self._connection
        if not connection.is_connected:
            raise StoreAway("the connection to the store is closed")
        await connection.send_packed_command([wire.command(*words)], check_health=False)
        try:
            return await connection.read_response(disable_decoding=True)
        except redis.exceptions.ResponseError as error:
            raise as_answered(error) from None

    async def close(self) -> None:
        """At once, without a word to the server."""
        await self._connection.disconnect(nowait=True)


async def ask(channel: Channel, *words: str) -> Any:
    """One rare command, as `call`."""
    return await channel.call(*(word.encode() for word in words))


def as_answered(error: redis.exceptions.ResponseError) -> Exception:
    """An error answer as what it means: StoreAway where it says that nothing ran and another time or server may do."""
    code = error.status_code or str(error).partition(" ")[0]
    if code in NOT_NOW:
        return StoreAway(f"store.url: the server answers {code} {str(error).removeprefix(code).strip()}".rstrip())
    return error


def fault(error: BaseException) -> StoreUnfit | StoreAway:
    """What a failure to connect means. redis-py wraps a wrong password in a connection error."""
    for cause in (error, error.__cause__):
        if isinstance(cause, redis.exceptions.AuthenticationError):
            return StoreUnfit(f"store.password_env, store.password_file or store.url: {cause}")
    if isinstance(error, StoreAway):
        return error
    return StoreAway(f"store.url: {str(error) or 'no answer'}")


class _TlsConnection(Connection):
    """TLS with a context that was made once, for every address."""

    def __init__(self, context: ssl.SSLContext, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._context = context

    def _connection_arguments(self) -> dict[str, Any]:
        return {**super()._connection_arguments(), "ssl": self._context}


def _connection(address: Address, login: Login, tls: ssl.SSLContext | None) -> AbstractConnection:
    common: dict[str, Any] = {
        "db": login.database,
        "username": login.username or None,
        "password": login.password or None,
        "protocol": 2,
        "socket_timeout": None,
        "socket_connect_timeout": CONNECT_S,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
        "driver_info": None,
    }
    if address.path:
        return UnixDomainSocketConnection(path=address.path, **common)
    where: dict[str, Any] = {"host": address.host, "port": address.port}
    return _TlsConnection(tls, **where, **common) if tls else Connection(**where, **common)
