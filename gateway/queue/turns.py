"""Makes the turns: one in the air, what happens meanwhile rides with the next. Knows when the store is lost."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import redis.exceptions

from gateway import clock
from gateway.queue.channel import GONE, StoreAway, StoreUnfit
from gateway.queue.link import Link
from gateway.queue.session import Session
from gateway.queue.target import Target

log = logging.getLogger(__name__)

LINGER_S = 0.003
"""How long an event that nobody waits for may wait for company."""

TURN_S = 2.0
"""After this the store counts as lost: who waits is refused, and the connection is given up."""

HOME, LOCAL = "", "local"
"""Which store the turns are made in: the shared one, or one that stands in for it."""

CROWD = 6
"""After a turn with more events than this, the next one waits for company: it will come."""

BACKOFF_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Turns:
    """Owns the turn connection, to `target`. `lost` from a turn's time-out until the next one's answer.

    `fallback` is asked when the store is lost: true means that there is another to go on with, and `move` is coming.
    """

    def __init__(self, session: Session, target: Target, prefix: str) -> None:
        self.lost = False
        self.count = 0
        self.turned: Callable[[float, int], None] = lambda seconds, events: None
        self.link: Link | None = None
        self._session = session
        self.target = target
        self.where = HOME
        self.fallback: Callable[[], bool] = lambda: False
        self._prefix = prefix
        self._next: Link | None = None
        self._leaving = False
        self._hurry = asyncio.Event()
        self._connecting: asyncio.Timeout | None = None
        self._go = asyncio.Event()
        self._linger: asyncio.TimerHandle | None = None
        self._due: asyncio.TimerHandle | None = None
        self._trouble_s: float | None = None
        self._sent_s = 0.0
        self._flying = False
        self._tries = 0

    def wake(self, urgent: bool) -> None:
        """Something is to be told. Urgent: with the next turn, which starts in this tick when none is in the air."""
        if urgent:
            self._go.set()
        elif self._linger is None:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._lingered)

    def check(self, now_s: float) -> None:
        """For the sweep: give up a turn that takes too long; say so when the store is lost."""
        if self._flying and self.link is not None and now_s - self._sent_s > TURN_S:
            self.link.close()
        if self._trouble_s is None or now_s - self._trouble_s < TURN_S or self.fallback() or self.lost:
            return
        self.lost = True
        log.error("the shared queue is lost: no answer for %.1f s; %r", now_s - self._trouble_s, self._session)
        self._session.book.lose()

    def leave(self) -> None:
        """Give up this connection, and what is in the air on it; find the store anew."""
        self._leaving = True
        self._go.set()
        self._hurry.set()
        if self._flying and self.link is not None:
            self.link.close()
        if self._connecting is not None and not self._connecting.expired():
            self._connecting.reschedule(clock.now())

    def move(self, target: Target, where: str = HOME, link: Link | None = None) -> None:
        """Make turns in another store from now on, over `link` if there is one already."""
        self.target, self.where, self._next = target, where, link
        self._trouble_s, self._tries = None, 0
        self.leave()

    def forgive(self, stall_s: float) -> None:
        """This process itself stood still: that is no fault of the store."""
        self._sent_s += stall_s
        if self._trouble_s is not None:
            self._trouble_s += stall_s

    async def run(self) -> None:
        """Until the session has said bye. Raises SchemaMismatch."""
        try:
            await self._run()
        finally:
            if self._next is not None:
                self._next.close()

    async def _run(self) -> None:
        while not self._done():
            try:
                self.link = await self._connect()
            except (StoreAway, StoreUnfit) as error:
                await self._back_off(error)
                continue
            try:
                self._session.connected(self.link.run_id, self.where)
                self._go.set()
                await self._serve(self.link)
            except GONE as error:
                await self._back_off(error)
            except redis.exceptions.ResponseError as error:
                log.error("the store could not make a turn: %s", error)  # noqa: TRY400 it is the server's trace
                await self._back_off(error)
                self._session.rejoin("a turn failed in the store")
            finally:
                self.link.close()
                self.link = None

    def close(self) -> None:
        for timer in (self._linger, self._due):
            if timer is not None:
                timer.cancel()

    def _done(self) -> bool:
        book = self._session.book
        return book.leaving and not book.pending and not self._session.flying

    async def _connect(self) -> Link:
        """Raises StoreAway, also when it was told to leave meanwhile, or StoreUnfit."""
        self._leaving = False
        self._hurry.clear()
        link, self._next = self._next, None
        if link is not None:
            return link
        try:
            async with asyncio.timeout(None) as self._connecting:
                link = await Link.connect(self.target, self._prefix)
        except TimeoutError:
            raise StoreAway("the store has moved") from None
        finally:
            self._connecting = None
        if self._leaving:  # told so when it was just there
            link.close()
            raise StoreAway("the store has moved")
        return link

    async def _serve(self, link: Link) -> None:
        while not self._done():
            await self._go.wait()
            if self._session.told > CROWD:
                await asyncio.sleep(0)  # for those who are ready in this turn of the loop
                await asyncio.sleep(0)  # and those whom they wake
            self._go.clear()
            if self._leaving:
                raise StoreAway("the store has moved")
            again = self._session.flying
            await self._turn(link)
            if again or self._session.book.cut:  # what happened meanwhile has not been told
                self._go.set()

    async def _turn(self, link: Link) -> None:
        self._sent_s = now_s = clock.now()
        if self._trouble_s is None:
            self._trouble_s = now_s
        self._flying = True
        try:
            raw = await link.turn(*self._session.depart(now_s))
        finally:
            self._flying = False
        back_s = clock.now()
        self.turned(back_s - now_s, self._session.told)
        reply = self._session.arrive(raw, back_s)
        self.count += 1
        self._trouble_s = None
        self._tries = 0
        if self.lost:
            self.lost = False
            self._session.book.regain()
            log.warning("the shared queue is back: %r", self._session)
        if reply.due_ms and self._due is None:
            self._due = asyncio.get_running_loop().call_later(reply.due_ms / 1000, self._came_due)

    async def _back_off(self, error: Exception) -> None:
        if self._trouble_s is None:
            self._trouble_s = clock.now()
        pause_s = BACKOFF_S[min(self._tries, len(BACKOFF_S) - 1)]
        if self._tries == 0 or isinstance(error, StoreUnfit):
            log.warning("no connection to the shared queue: %s", str(error) or "no answer in time")
        self._tries += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()

    def _lingered(self) -> None:
        self._linger = None
        if self._session.book.pending:
            self._go.set()

    def _came_due(self) -> None:
        self._due = None
        self._go.set()
