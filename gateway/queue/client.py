"""The shared queue as the gateway sees it: declare pools, submit tickets, wait in a place, end."""

import asyncio
import contextlib
import logging
import re
import secrets
from typing import Annotated, Literal

import redis.exceptions
from msgspec import Meta, Struct

from gateway import clock
from gateway.queue.advice import advise
from gateway.queue.book import Book
from gateway.queue.channel import GONE, StoreAway, StoreUnfit, ask
from gateway.queue.embedded import Embedded, is_private
from gateway.queue.keys import Keys
from gateway.queue.link import Link, facts_of
from gateway.queue.mailbox import Mailbox
from gateway.queue.place import Place, QueueRefusal, Quota
from gateway.queue.session import Session
from gateway.queue.share import BackendShare, PoolShare
from gateway.queue.target import Target, secret
from gateway.queue.turns import LOCAL, Turns
from gateway.queue.urls import read_url, shown
from gateway.queue.watch import Fallback, follow
from gateway.supervisor import Supervisor
from policies.quota import TenantLimits
from policies.types import Ticket

__all__ = ["BackendShare", "Place", "PoolShare", "Queue", "QueueRefusal", "Quota", "Store", "StoreAway", "StoreUnfit"]

log = logging.getLogger(__name__)

SWEEP_S = 0.1
BEAT_S = 1.0
CONNECT_S = 5.0
BYE_S = 2.0


class Store(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the shared queue is kept: the `[store]` section.

    `url`: `embedded` starts a private server; anything else is yours, see `gateway.queue.urls`. `namespace` is the hash
    tag of all keys; `max_queued` the tickets that may wait per pool. `on_loss`: while the store is gone, new requests
    are refused, or each process goes on locally with its part of everything. Passwords come from an environment
    variable or a file, by name.
    """

    url: str = "embedded"
    namespace: str = "signalbox"
    on_loss: Literal["refuse", "local"] = "refuse"
    max_queued: Annotated[int, Meta(ge=0)] = 10_000
    password_env: str = ""
    password_file: str = ""
    sentinel_password_env: str = ""
    sentinel_password_file: str = ""

    def __post_init__(self) -> None:
        if self.on_loss == "local" and self.url == "embedded":
            raise ValueError("store.on_loss: `local` is for a store of your own; the embedded one is started again")
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.namespace):
            raise ValueError("store.namespace: letters, digits, `_`, `.` and `-` only")
        if self.password_env and self.password_file:
            raise ValueError("store.password_env, store.password_file: give one of them")
        if self.sentinel_password_env and self.sentinel_password_file:
            raise ValueError("store.sentinel_password_env, store.sentinel_password_file: give one of them")
        if self.url != "embedded":
            try:
                kind = read_url(self.url).kind
            except ValueError as error:
                raise ValueError(f"store.url: `embedded`, or: {error}") from None
            if (self.sentinel_password_env or self.sentinel_password_file) and kind != "sentinel":
                raise ValueError("store.sentinel_password_env, store.sentinel_password_file: the url has no sentinels")

    def target(self, embedded: Embedded | None = None) -> Target:
        """Where it is, with the secrets read. Raises StoreUnfit."""
        password = secret("store.password", self.password_env, self.password_file)
        of_sentinels = secret("store.sentinel_password", self.sentinel_password_env, self.sentinel_password_file)
        return Target(embedded.url if embedded else self.url, self.namespace, password, of_sentinels)


async def _start_embedded(settings: Store) -> Embedded | None:
    """The store, or what stands in for it when it is lost. Raises StoreUnfit."""
    if settings.url == "embedded":
        return await Embedded.start()
    if settings.on_loss == "refuse":
        return None
    try:
        return await Embedded.start()
    except StoreUnfit as error:
        raise StoreUnfit(f"store.on_loss: `local` needs an embedded store to go on with: {error}") from None


async def _try(target: Target) -> None:
    """Connect once, for up to CONNECT_S. Raises StoreAway or StoreUnfit."""
    limit_s = clock.now() + CONNECT_S
    while True:
        try:
            link = await Link.connect(target, Keys(target.namespace).prefix)
        except StoreAway:
            if clock.now() >= limit_s:
                raise
            await asyncio.sleep(CONNECT_S / 20)
            continue
        link.close()
        return


async def _advise(target: Target) -> None:
    """Log one line on how the store is set up; never fails."""
    try:
        channel = await target.open()
        try:
            async with asyncio.timeout(CONNECT_S):
                advice = await advise(channel, facts_of(await ask(channel, "INFO")), target.kind)
        finally:
            channel.close()
    except (StoreUnfit, redis.exceptions.RedisError, *GONE) as error:
        log.info("no advice on the store: %s", error)
        return
    log.log(logging.INFO if advice.well else logging.WARNING, "the store has %s", advice.text)


class Queue:
    """This process's half of the shared queue. Its tasks belong to the supervisor it was connected with.

    `target` is the shared store, also while turns are made in a local one.
    """

    def __init__(self, settings: Store, target: Target, embedded: Embedded | None) -> None:
        keys = Keys(settings.namespace)
        self.book = Book(settings.max_queued)
        self.session = Session(self.book, secrets.token_hex(6))
        self.target = target
        self.turns = Turns(self.session, target, keys.prefix)
        self._mailbox = Mailbox(self.session, self.turns, keys)
        self.book.wake = self.turns.wake
        self.session.renamed = self._mailbox.renamed
        self._embedded = embedded
        self._fallback: Fallback | None = None
        if settings.on_loss == "local" and embedded is not None:
            self._fallback = Fallback(embedded, target, self.turns, self.book)
            self.turns.fallback = self._fallback.leave
        self._where = shown(settings.url)
        self._tasks: list[asyncio.Task[None]] = []
        self._beat_s = 0.0

    def __repr__(self) -> str:
        state = "lost" if self.lost else f"{self.state}, turn {self.turns.count}"
        return f"<Queue {self._where} {state}, {len(self.book.waiting)} waiting, {len(self.book.held)} held>"

    @classmethod
    async def connect(cls, settings: Store, supervisor: Supervisor) -> "Queue":
        """Start the embedded store if asked, check the server, load the library, join.

        Raises StoreAway or StoreUnfit, which name the field.
        """
        embedded, target = await _start_embedded(settings), None
        try:
            target = await asyncio.to_thread(settings.target, embedded if settings.url == "embedded" else None)
            await _try(target)
            if not is_private(target.url):
                await _advise(target)
        except BaseException:
            if target:
                await target.aclose()
            if embedded:
                await embedded.aclose()
            raise
        queue = cls(settings, target, embedded)
        queue._start(supervisor)
        return queue

    @property
    def functions(self) -> bool:
        """Whether the store runs the library as a function (else as a script, which costs it more)."""
        return self.turns.link is not None and self.turns.link.functions

    @property
    def joined(self) -> bool:
        """Whether the store has heard of this process."""
        return self.turns.count > 0

    @property
    def lost(self) -> bool:
        return self.turns.lost

    @property
    def state(self) -> Literal["up", "local", "lost"]:
        """`local`: the shared store is lost, and this process goes on with its part of everything."""
        if self.turns.lost:
            return "lost"
        return "local" if self.session.where == LOCAL else "up"

    def declare(self, pool: PoolShare) -> None:
        """Tell the queue what the backends of a pool may carry; goes with the next turn. Again at any change."""
        self.book.declare(pool)

    def declare_tenant(self, name: str, limits: TenantLimits) -> None:
        """Tell the queue what a tenant may use; goes with the next turn. Again at any change.

        A tenant that nobody declared has no limits. Weights are in the prices of its tickets.
        """
        self.book.declare_tenant(name, limits)

    def depth(self, pool: str) -> tuple[int, ...]:
        """How many wait in a pool, by class rank, as this process last heard (at its beat, once a second)."""
        return tuple(self.book.depths.get(pool, ()))

    def shedding(self, pool: str) -> tuple[int, ...]:
        """Thousandths of the arrivals of a pool that may not wait, by class rank; as fresh as `depth`."""
        return tuple(self.book.levels.get(pool, ()))

    def submit(self, ticket: Ticket) -> Place:
        """Ask for a lease. The caller ends the place, whatever becomes of it."""
        return self.book.submit(ticket, clock.now())

    async def aclose(self) -> None:
        """Refuse who waits, give back what is held, say bye, and end the tasks and the embedded store."""
        self.book.bye()
        turns = self._tasks[0]
        if not self.lost:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BYE_S):
                    await asyncio.wait([turns])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.turns.close()
        await self.target.aclose()
        if self._embedded:
            await self._embedded.aclose()

    def _start(self, supervisor: Supervisor) -> None:
        self._tasks = [
            supervisor.start("queue turns", self.turns.run()),
            supervisor.start("queue mailbox", self._mailbox.run()),
            supervisor.start("queue sweep", self._sweep()),
        ]
        if self._embedded:
            self._tasks.append(supervisor.start("embedded store", self._embedded.keep()))
        if self._fallback:
            self._tasks.append(supervisor.start("queue fallback", self._fallback.run()))
        if self.target.kind == "sentinel":
            self._tasks.append(supervisor.start("queue watch", follow(self.target, self.turns)))

    async def _sweep(self) -> None:
        """One ticker for deadlines, the beat and time-outs: no timer per ticket or turn."""
        now_s = clock.now()
        while True:
            before_s = now_s
            await asyncio.sleep(SWEEP_S)
            now_s = clock.now()
            if (late_s := now_s - before_s - SWEEP_S) > SWEEP_S:
                self.turns.forgive(late_s)
            self.book.expire(now_s)
            self.turns.check(now_s)
            if now_s - self._beat_s >= BEAT_S and not self.book.leaving:
                self._beat_s = now_s
                self.book.beat()
