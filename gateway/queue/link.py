"""One connection to the store: found, authenticated, checked and given the library by redis-py; calls packed by us.

redis-py retries silently by default and would reconnect inside a call. Both are off: a turn that may have run is sent
again only by the protocol that knows how, and only after it has seen which server answers.
"""

import asyncio
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import redis.exceptions
from msgspec import Struct
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.queue import scripts, wire
from gateway.queue.keys import SCHEMA

CONNECT_S = 2.0
OLDEST = {"redis": (7, 0), "valkey": (7, 2)}


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
"""What a dead connection raises; anything else from the server is an answer."""


class Target(Struct, frozen=True):
    """Where the store is and how to get in."""

    url: str
    namespace: str
    password: str = ""

    def connection(self) -> AbstractConnection:
        """A connection that has not been opened. Raises StoreUnfit for a URL that cannot be used."""
        scheme = self.url.partition("://")[0]
        if "sentinel" in scheme or "cluster" in scheme:
            raise StoreUnfit(
                f"store.url: {scheme} addresses are not supported yet; give the primary's redis:// address"
            )
        try:
            arguments: dict[str, Any] = dict(parse_url(self.url))
            kind = arguments.pop("connection_class", None)
            if kind is None:
                from redis.asyncio.connection import Connection as kind  # noqa: PLC0415, N813
            if self.password:
                arguments["password"] = self.password
            connection: AbstractConnection = kind(
                **{
                    **arguments,
                    "protocol": 2,
                    "socket_timeout": None,
                    "socket_connect_timeout": CONNECT_S,
                    "retry": Retry(NoBackoff(), 0),
                    "retry_on_timeout": False,
                    "health_check_interval": 0,
                    "driver_info": None,
                }
            )
        except (ValueError, TypeError) as error:
            raise StoreUnfit(f"store.url: {error}") from None
        return connection


def secret(field: str, env: str, file: str) -> str:
    """A secret given by the name of an environment variable or a file. Raises StoreUnfit when it is not there."""
    if env:
        if env not in os.environ:
            raise StoreUnfit(f"{field}_env: the environment has no {env}")
        return os.environ[env]
    if file:
        try:
            return pathlib.Path(file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise StoreUnfit(f"{field}_file: {error}") from None
    return ""


def _fault(error: BaseException) -> StoreUnfit | StoreAway:
    """What a failure to connect means. redis-py wraps a wrong password in a connection error."""
    for cause in (error, error.__cause__):
        if isinstance(cause, redis.exceptions.AuthenticationError):
            return StoreUnfit(f"store.password_env, store.password_file or store.url: {cause}")
    return StoreAway(f"store.url: {str(error) or 'no answer'}")


async def open_connection(target: Target) -> AbstractConnection:
    """Connected and authenticated. Raises StoreAway or StoreUnfit."""
    connection = target.connection()
    try:
        async with asyncio.timeout(CONNECT_S):
            await connection.connect()  # type: ignore[no-untyped-call]
    except GONE as error:
        await connection.disconnect(nowait=True)
        raise _fault(error) from None
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    return connection


async def ask(connection: AbstractConnection, *words: str) -> Any:
    """One rare command. Raises redis's ResponseError for an error answer."""
    await connection.send_command(*words, check_health=False)
    return await connection.read_response()


def _facts(info: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in info.decode().splitlines())
    return {name: value for name, colon, value in lines if colon}


def check_server(facts: Mapping[str, str]) -> None:
    """Raises StoreUnfit for a server that is too old or evicts; StoreAway for a replica."""
    kind = "valkey" if "valkey_version" in facts else "redis"
    version = facts.get("valkey_version") or facts.get("redis_version", "0.0")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST[kind]:
        raise StoreUnfit(f"store.url: {kind} {version} is too old: redis 7.0 or valkey 7.2 is needed")
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StoreUnfit(f"store.url: maxmemory-policy is {policy}; an evicted key is a broken ledger: set noeviction")
    if facts.get("role", "master") != "master":
        raise StoreAway("store.url: the server is a replica")


def check_schema(found: bytes | None) -> None:
    """Raises StoreUnfit when the namespace is kept by another schema."""
    if found is not None and int(found) != SCHEMA:
        raise StoreUnfit(
            f"store.namespace: gateways of schema {int(found)} keep it, this one has {SCHEMA}: "
            "stop them and delete its keys, or choose another namespace"
        )


class Link:
    """A checked connection that can make turns. `run_id` is the server's."""

    def __init__(self, connection: AbstractConnection, run_id: str, prefix: str) -> None:
        self.run_id = run_id
        self._connection = connection
        self._prefix = prefix.encode()
        self._verb: tuple[bytes, bytes] = (b"FCALL", scripts.FUNCTION.encode())

    @classmethod
    async def connect(cls, target: Target, prefix: str) -> "Link":
        """Raises StoreAway or StoreUnfit."""
        connection = await open_connection(target)
        try:
            async with asyncio.timeout(CONNECT_S):
                facts = _facts(await ask(connection, "INFO"))
                check_server(facts)
                check_schema(await ask(connection, "HGET", f"{prefix}meta", "schema"))
                link = cls(connection, facts["run_id"], prefix)
                await link.load()
        except GONE as error:
            await connection.disconnect(nowait=True)
            raise _fault(error) from None
        except redis.exceptions.ResponseError as error:
            await connection.disconnect(nowait=True)
            raise StoreUnfit(f"store.url: the server refuses what the queue needs: {error}") from None
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return link

    @property
    def functions(self) -> bool:
        return self._verb[0] == b"FCALL"

    async def load(self) -> None:
        """Give the server the library; as a script where it has no functions. Raises redis's ResponseError."""
        try:
            await ask(self._connection, "FUNCTION", "LOAD", "REPLACE", await asyncio.to_thread(scripts.library))
        except redis.exceptions.ResponseError as error:
            if "unknown" not in str(error).lower() and not isinstance(error, redis.exceptions.NoPermissionError):
                raise
            await self.load_script()

    async def load_script(self) -> None:
        sha = await ask(self._connection, "SCRIPT", "LOAD", await asyncio.to_thread(scripts.script))
        self._verb = (b"EVALSHA", sha)

    async def turn(self, name: bytes, number: bytes, cursor: bytes, batch: bytes) -> bytes:
        """One turn. Raises one of GONE, after which the link is of no use; ResponseError when the script failed."""
        try:
            return await self._call(name, number, cursor, batch)
        except redis.exceptions.ResponseError as error:
            if not isinstance(error, redis.exceptions.NoScriptError) and "Function not found" not in str(error):
                raise
        await self.load()  # comes before anything ran, so sending again is safe
        return await self._call(name, number, cursor, batch)

    async def _call(self, *arguments: bytes) -> bytes:
        connection = self._connection
        if not connection.is_connected:
            raise StoreAway("the connection to the store is closed")
        await connection.send_packed_command(
            [wire.command(*self._verb, b"1", self._prefix, *arguments, b"0")], check_health=False
        )
        answer: bytes = await connection.read_response(disable_decoding=True)
        return answer

    async def aclose(self) -> None:
        await self._connection.disconnect(nowait=True)
