"""The shared queue as the gateway sees it: declare pools, submit tickets, wait in a place, end."""

import asyncio
import contextlib
import logging
import re
import secrets
from typing import Annotated, Literal

from msgspec import Meta, Struct

from gateway import clock
from gateway.queue.book import BackendShare, Book, PoolShare
from gateway.queue.channel import StoreAway, StoreUnfit
from gateway.queue.embedded import Embedded
from gateway.queue.keys import Keys
from gateway.queue.link import Link
from gateway.queue.mailbox import Mailbox
from gateway.queue.place import Place, QueueRefusal, Quota
from gateway.queue.session import Session
from gateway.queue.target import Target, secret
from gateway.queue.turns import Turns
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

    `url`: `embedded` starts a private server; `redis://`, `rediss://` and `unix://` use yours. `namespace` is the hash
    tag of all keys; `max_queued` the tickets that may wait per pool. A password comes from an environment variable or a
    file, by name.
    """

    url: str = "embedded"
    namespace: str = "signalbox"
    on_loss: Literal["refuse", "local"] = "refuse"
    max_queued: Annotated[int, Meta(ge=0)] = 10_000
    password_env: str = ""
    password_file: str = ""

    def __post_init__(self) -> None:
        if self.on_loss == "local":
            raise ValueError("store.on_loss: `local` is not available yet; use `refuse`")
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.namespace):
            raise ValueError("store.namespace: letters, digits, `_`, `.` and `-` only")
        if self.password_env and self.password_file:
            raise ValueError("store.password_env, store.password_file: give one of them")
        if self.url != "embedded" and "://" not in self.url:
            raise ValueError("store.url: `embedded` or a redis://, rediss:// or unix:// address")


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
        await link.aclose()
        return


class Queue:
    """This process's half of the shared queue. Its tasks belong to the supervisor it was connected with."""

    def __init__(self, settings: Store, target: Target, embedded: Embedded | None) -> None:
        keys = Keys(settings.namespace)
        self.book = Book(settings.max_queued)
        self.session = Session(self.book, secrets.token_hex(6))
        self.turns = Turns(self.session, target, keys.prefix)
        self._mailbox = Mailbox(self.session, target, keys)
        self.book.wake = self.turns.wake
        self.session.renamed = self._mailbox.renamed
        self._embedded = embedded
        self._where = settings.url
        self._tasks: list[asyncio.Task[None]] = []
        self._beat_s = 0.0

    def __repr__(self) -> str:
        state = "lost" if self.lost else f"turn {self.turns.count}"
        return f"<Queue {self._where} {state}, {len(self.book.waiting)} waiting, {len(self.book.held)} held>"

    @classmethod
    async def connect(cls, settings: Store, supervisor: Supervisor) -> "Queue":
        """Start the embedded store if asked, check the server, load the library, join.

        Raises StoreAway or StoreUnfit, which name the field.
        """
        password = await asyncio.to_thread(secret, "store.password", settings.password_env, settings.password_file)
        embedded = await Embedded.start() if settings.url == "embedded" else None
        url = embedded.url if embedded else settings.url
        try:
            target = Target(url, settings.namespace, password)
            await _try(target)
        except BaseException:
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
    def lost(self) -> bool:
        return self.turns.lost

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
