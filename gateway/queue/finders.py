"""Find the server that has the queue now: the one named, the sentinels' primary, the owner of a cluster's slot.

Nothing is remembered of who it was: each new channel asks anew, and what was found is checked on the channel itself.
redis-py's own classes for this keep pools of connections that retry by themselves; here it takes one question.
"""

import asyncio
import ssl
from typing import Any, Protocol

import redis.exceptions

from gateway import clock
from gateway.queue.channel import GONE, Address, Channel, Login, StoreAway, StoreUnfit, ask

ANSWER_S = 1.0
"""How long a sentinel or a node may take to answer, its connection included."""

REST_S = 5.0
"""How long one that did not answer is left alone."""

SENTINEL_LOGIN_FIELD = "store.sentinel_password_env, store.sentinel_password_file"


class Finder(Protocol):
    """Where the queue is."""

    async def find(self) -> Address:
        """Raises StoreAway when nobody knows now, StoreUnfit when asking is refused."""
        ...

    async def aclose(self) -> None: ...


class Fixed:
    """The one server that was named."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def find(self) -> Address:
        return self._address

    async def aclose(self) -> None:
        pass


class Sentinels:
    """The primary of `service`, as the sentinel with the newest configuration says (the highest `config-epoch`: one
    that was cut off may still name the old primary)."""

    def __init__(self, addresses: tuple[Address, ...], service: str, login: Login, tls: ssl.SSLContext | None) -> None:
        self._addresses = addresses
        self._service = service
        self._login, self._tls = login, tls
        self._channels: dict[Address, Channel] = {}
        self._resting: dict[Address, float] = {}
        self._lock = asyncio.Lock()

    async def find(self) -> Address:
        async with self._lock:
            now_s = clock.now()
            awake = [one for one in self._addresses if self._resting.get(one, 0.0) <= now_s] or self._addresses
            answers = await asyncio.gather(*map(self._ask, awake))
        known = [answer for answer in answers if not isinstance(answer, Exception)]
        if known:
            return max(known, key=lambda answer: answer[0])[1]
        for answer in answers:
            if isinstance(answer, StoreUnfit):
                raise answer
        raise StoreAway(f"store.url: no sentinel answers: {'; '.join(map(str, answers))}")

    async def aclose(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    async def _ask(self, sentinel: Address) -> tuple[int, Address] | StoreAway | StoreUnfit:
        """One sentinel's configuration epoch and primary, or why it has none."""
        try:
            async with asyncio.timeout(ANSWER_S):
                channel = self._channels.get(sentinel)
                if channel is None:
                    channel = await Channel.connect(sentinel, self._login, self._tls, SENTINEL_LOGIN_FIELD)
                    self._channels[sentinel] = channel
                pairs = await ask(channel, "SENTINEL", "MASTER", self._service)
        except (StoreUnfit, redis.exceptions.ResponseError, *GONE) as error:
            await self._drop(sentinel)
            if isinstance(error, redis.exceptions.ResponseError):
                return StoreUnfit(f"store.url: the sentinel {sentinel}, asked for {self._service!r}: {error}")
            self._resting[sentinel] = clock.now() + REST_S
            return error if isinstance(error, StoreUnfit) else StoreAway(_why(sentinel, error))
        except BaseException:  # its answer may still come
            await self._drop(sentinel)
            raise
        facts = dict(zip(pairs[::2], pairs[1::2], strict=True))
        return int(facts[b"config-epoch"]), Address(facts[b"ip"].decode(), int(facts[b"port"]))

    async def _drop(self, sentinel: Address) -> None:
        if channel := self._channels.pop(sentinel, None):
            channel.close()


class Cluster:
    """The primary that owns `slot`, as some node says. Nodes that are heard of are asked too, another first each time:
    it may be the one asked last that fails."""

    def __init__(self, seeds: tuple[Address, ...], slot: int, login: Login, tls: ssl.SSLContext | None) -> None:
        self._seeds = seeds
        self._slot = slot
        self._login, self._tls = login, tls
        self._nodes: list[Address] = []
        self._turn = 0

    async def find(self) -> Address:
        nodes = list(dict.fromkeys((*self._nodes, *self._seeds)))
        self._turn += 1
        first = self._turn % len(nodes)
        trouble: list[str] = []
        for node in nodes[first:] + nodes[:first]:
            try:
                async with asyncio.timeout(ANSWER_S):
                    owner = await self._ask(node)
            except redis.exceptions.ResponseError as error:
                raise StoreUnfit(f"store.url: {node} can't tell the nodes of its cluster: {error}") from None
            except GONE as error:
                trouble.append(_why(node, error))
                continue
            if owner is not None:
                return owner
            trouble.append(f"{node}: nobody owns slot {self._slot}")
        raise StoreAway(f"store.url: no node of the cluster helps: {'; '.join(trouble)}")

    async def aclose(self) -> None:
        pass

    async def _ask(self, node: Address) -> Address | None:
        channel = await Channel.connect(node, self._login, self._tls)
        try:
            ranges = await ask(channel, "CLUSTER", "SLOTS")
        finally:
            channel.close()
        self._nodes = list(dict.fromkeys(_node(one, node) for _, _, *nodes in ranges for one in nodes))
        owners = [nodes[0] for first, last, *nodes in ranges if first <= self._slot <= last]
        return _node(owners[0], node) if owners else None


def _why(asked: Address, error: Exception) -> str:
    text = str(error).removeprefix("store.url: ").removeprefix(f"{asked}: ")
    return f"{asked}: {text or 'no answer'}"


def _node(said: list[Any], asked: Address) -> Address:
    """A node as CLUSTER SLOTS gives it; without an endpoint it is reached where the asked one is."""
    host = said[0].decode() if said[0] else ""
    return Address(asked.host if host in {"", "?"} else host, int(said[1]))
