"""Looks after where the queue is: follows the sentinels' word, counts who shares it, and goes on without it."""

import asyncio
import contextlib
import enum
import logging
from collections import deque

import redis.exceptions

from gateway import clock
from gateway.queue.book import Book
from gateway.queue.channel import GONE, Channel, StoreAway, StoreUnfit, ask
from gateway.queue.embedded import Embedded
from gateway.queue.keys import Keys
from gateway.queue.link import Link
from gateway.queue.target import Target
from gateway.queue.turns import LOCAL, Turns

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two questions to the sentinels, and between two counts of the gateways."""

COUNTS = 10

ANSWER_S = 2.0

RETURN_S = 0.5
"""Between two tries to get back to the shared store."""


async def follow(target: Target, turns: Turns) -> None:
    """Until cancelled: leave a primary that the sentinels have replaced, though it still answers."""
    while True:
        await asyncio.sleep(LOOK_S)
        link = turns.link
        if link is None or turns.where == LOCAL:
            continue
        try:
            address = await target.find()
        except (StoreAway, StoreUnfit):
            continue
        if turns.link is link and address != link.address:
            log.warning("the store has moved from %s to %s", link.address, address)
            turns.leave()


class _At(enum.Enum):
    HOME = enum.auto()
    LEAVING = enum.auto()
    LOCAL = enum.auto()
    STUCK = enum.auto()  # the local store does not answer either


class Fallback:
    """`store.on_loss = "local"`: while the shared store is away, an embedded one decides on this process's share.

    `peers` is the most gateway processes that shared the store at its last COUNTS counts (just after a failover they
    come back one by one): each goes on with that part of every backend and of every limit.
    """

    def __init__(self, embedded: Embedded, shared: Target, turns: Turns, book: Book) -> None:
        self._counts: deque[int] = deque((1,), COUNTS)
        self.embedded = embedded
        self._shared = shared
        self._local = Target(embedded.url, shared.namespace)
        self._turns = turns
        self._book = book
        self._at = _At.HOME
        self._gone = asyncio.Event()
        self._channel: Channel | None = None
        self._limit: asyncio.Timeout | None = None

    def __repr__(self) -> str:
        return f"<Fallback {self._at.name.lower()}, {self.peers} share {self._shared!r}>"

    @property
    def peers(self) -> int:
        return max(1, *self._counts)

    def leave(self) -> bool:
        """For the turns: the store is lost. -> whether there is another one to go on with."""
        if self._at is _At.HOME:
            self._at = _At.LEAVING
            self._gone.set()
            if self._limit is not None and not self._limit.expired():
                self._limit.reschedule(clock.now())
        return self._at is _At.LEAVING

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._stay()
                if await self._enter():
                    await self._come_back()
                else:
                    self._at = _At.STUCK
                    await asyncio.sleep(LOOK_S)
                self._at = _At.HOME
        finally:
            self._drop()

    async def _stay(self) -> None:
        """Until the shared store is lost."""
        while not self._gone.is_set():
            await self._count()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._gone.wait()
        self._gone.clear()
        self._drop()

    async def _count(self) -> None:
        """How many share the store: those that neither died nor took another name."""
        if self._turns.link is None:
            return
        try:
            async with asyncio.timeout(ANSWER_S) as self._limit:
                if self._channel is None:
                    self._channel = await self._shared.open()
                procs = Keys(self._shared.namespace).processes
                self._counts.append(await ask(self._channel, "ZCOUNT", procs, "0", "+inf"))
        except (StoreUnfit, redis.exceptions.RedisError, *GONE):
            self._drop()
        finally:
            self._limit = None

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def _enter(self) -> bool:
        """Begin on an empty local store: what it knew of an earlier time is void."""
        try:
            async with asyncio.timeout(ANSWER_S):
                channel = await self._local.open()
                try:
                    await ask(channel, "FLUSHALL")
                finally:
                    channel.close()
        except (StoreUnfit, redis.exceptions.RedisError, *GONE) as error:
            why = str(error) or "no answer"
            log.error("the local store can't take over: %s", why)  # noqa: TRY400 it is for the operator
            return False
        self._at = _At.LOCAL
        self._book.parts = self.peers
        log.error("the shared queue is lost; going on locally with 1/%d of every backend and limit", self.peers)
        self._turns.move(self._local, LOCAL)
        return True

    async def _come_back(self) -> None:
        while True:
            await asyncio.sleep(RETURN_S)
            try:
                link = await Link.connect(self._shared, Keys(self._shared.namespace).prefix)
            except (StoreAway, StoreUnfit):
                continue
            break
        log.warning("the shared queue is back: declaring what is held")
        self._book.parts = 1
        self._turns.move(self._shared, link=link)
