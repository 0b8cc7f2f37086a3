"""A look at the whole queue without taking part in it: what waits, and what is taken on each backend."""

import asyncio
from collections.abc import Iterable

import msgspec
import redis.exceptions
from msgspec import Struct

from gateway.queue import scripts
from gateway.queue.channel import GONE, Channel, StoreAway
from gateway.queue.keys import Keys
from gateway.queue.target import Target

ANSWER_S = 1.0


class Line(Struct, array_like=True, frozen=True):
    """What waits in a pool and class: requests, their uncached prompt tokens, tenants in the order, and the distance
    between the virtual counters of the first and the last of these. `level` is how many of 1,000 arrivals may not wait.
    """

    rank: int
    waiting: int
    tokens: int
    tenants: int
    spread: int
    level: int


class Ledger(Struct, array_like=True, frozen=True):
    """What is taken on a backend, and of what. `open` is 1 where leases are given out."""

    backend: str
    open: int
    leases: int
    leases_limit: int
    prefill_tokens: int
    prefill_tokens_limit: int
    kv_tokens: int
    kv_tokens_limit: int


class PoolLook(Struct, array_like=True, frozen=True):
    model: str
    lines: list[Line]
    ledgers: list[Ledger]


class Look(Struct, array_like=True, frozen=True):
    """The queue at one instant. `processes` are the gateway processes that it knows."""

    processes: int
    pools: list[PoolLook]


_decode = msgspec.msgpack.Decoder(Look, strict=False).decode


async def look(target: Target, ranks: Iterable[int], pools: Iterable[str]) -> Look:
    """One call on a channel of its own, within ANSWER_S. Raises StoreAway or StoreUnfit."""
    channel = await target.open()
    try:
        async with asyncio.timeout(ANSWER_S):
            return _decode(await _ask(channel, target, [*ranks], [*pools]))
    except (*GONE, TimeoutError, redis.exceptions.RedisError) as error:
        raise StoreAway(str(error) or "the store does not answer") from None
    finally:
        channel.close()


async def _ask(channel: Channel, target: Target, ranks: list[int], pools: list[str]) -> bytes:
    script = (await asyncio.to_thread(scripts.look)).encode()
    prefix = Keys(target.namespace).prefix.encode()
    pack = msgspec.msgpack.encode
    answer: bytes = await channel.call(b"EVAL", script, b"1", prefix, pack(ranks), pack(pools))
    return answer
