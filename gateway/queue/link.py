"""A checked channel to the store that can make turns."""

import asyncio
from collections.abc import Mapping

import redis.exceptions

from gateway.queue import scripts
from gateway.queue.channel import CONNECT_S, GONE, Channel, StoreAway, StoreUnfit, ask, fault
from gateway.queue.keys import SCHEMA
from gateway.queue.target import Target

OLDEST = {"redis": (7, 0), "valkey": (7, 2)}


def facts_of(info: bytes) -> dict[str, str]:
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
    """A checked connection that can make turns. `run_id` is that of the server at `address`."""

    def __init__(self, channel: Channel, run_id: str, prefix: str) -> None:
        self.run_id = run_id
        self.address = channel.address
        self._channel = channel
        self._prefix = prefix.encode()
        self._verb: tuple[bytes, bytes] = (b"FCALL", scripts.FUNCTION.encode())

    @classmethod
    async def connect(cls, target: Target, prefix: str) -> "Link":
        """Raises StoreAway or StoreUnfit."""
        channel = await target.open()
        try:
            async with asyncio.timeout(CONNECT_S):
                facts = facts_of(await ask(channel, "INFO"))
                check_server(facts)
                if facts.get("cluster_enabled") == "1" and target.kind != "cluster":
                    raise StoreUnfit("store.url: the server is a node of a cluster: give a redis+cluster:// address")
                check_schema(await ask(channel, "HGET", f"{prefix}meta", "schema"))
                link = cls(channel, facts["run_id"], prefix)
                await link.load()
        except GONE as error:
            channel.close()
            raise fault(error, channel.address) from None
        except redis.exceptions.ResponseError as error:
            channel.close()
            raise StoreUnfit(f"store.url: the server refuses what the queue needs: {error}") from None
        except BaseException:
            channel.close()
            raise
        return link

    @property
    def functions(self) -> bool:
        return self._verb[0] == b"FCALL"

    async def load(self) -> None:
        """Give the server the library; as a script where it has no functions. Raises redis's ResponseError."""
        try:
            await ask(self._channel, "FUNCTION", "LOAD", "REPLACE", await asyncio.to_thread(scripts.library))
        except redis.exceptions.ResponseError as error:
            if "unknown" not in str(error).lower() and not isinstance(error, redis.exceptions.NoPermissionError):
                raise
            await self.load_script()

    async def load_script(self) -> None:
        sha = await ask(self._channel, "SCRIPT", "LOAD", await asyncio.to_thread(scripts.script))
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
        answer: bytes = await self._channel.call(*self._verb, b"1", self._prefix, *arguments, b"0")
        return answer

    def close(self) -> None:
        """At once; a turn that is under way ends with StoreAway. Idempotent."""
        self._channel.close()
