"""The exactly-once protocol of turns, without any I/O.

A turn is (process name, number, mailbox cursor, batch). One is in the air at a time and stays there, byte for byte,
until its answer comes: the store applies a number once and keeps its whole reply. When the store may have forgotten
something (it does not know the process, misses turns, is another server than before, or counts other tickets) the
process takes a new name and declares what is true now. Turn numbers alone would miss a failover that loses *another*
process's turn.
"""

import logging
from collections.abc import Callable

from gateway.queue import wire
from gateway.queue.book import Book

log = logging.getLogger(__name__)

STRIKES = 3
"""Beats in a row with differing counts before a rejoin: a refusal may lie unread in the mailbox for a moment."""


class SchemaMismatch(Exception):
    """The namespace is kept by another schema: two versions whose keys mean different things."""


class Session:
    """One process's side of the turns. `name` changes with each rejoin, and `renamed` is called; `run_id` is the last
    server's, `where` which of the stores it is."""

    def __init__(self, book: Book, base: str) -> None:
        self.book = book
        self.base = base
        self.name = ""
        self.number = 0
        self.cursor = ""
        self.run_id = ""
        self.where = ""
        self._former: dict[str, str] = {}
        self.rejoins = -1
        self.told = 0  # events in the last turn
        self.renamed: Callable[[], None] = lambda: None
        self._strikes = 0
        self._flying: tuple[bytes, bytes, bytes, bytes] | None = None

    def __repr__(self) -> str:
        return f"<Session {self.name or self.base} turn {self.number}{' in the air' if self._flying else ''}>"

    @property
    def flying(self) -> bool:
        return self._flying is not None

    def connected(self, run_id: str, where: str = "") -> None:
        """A connection was made to the server of this run id."""
        if run_id != self.run_id or where != self.where:
            self.run_id, self.where = run_id, where
            self.rejoin("another server" if self.name else "start")

    def rejoin(self, why: str) -> None:
        """Void the name and what is in the air; declare everything under a new one."""
        former = self._former.get(self.where, "")  # what this store may still know
        self.rejoins += 1
        self.name = self._former[self.where] = f"{self.base}.{self.rejoins}"
        self.number, self.cursor, self._flying, self._strikes = 0, "", None, 0
        if former:
            log.warning("rejoining the shared queue as %s: %s", self.name, why)
        self.book.declare_again(former)
        self.renamed()

    def depart(self, now_s: float) -> tuple[bytes, bytes, bytes, bytes]:
        """The turn to send: name, number, cursor, batch. The same bytes again until `arrive`."""
        if self._flying is None:
            self.number += 1
            events = self.book.batch(now_s)
            self.told = len(events)
            self._flying = (self.name.encode(), b"%d" % self.number, self.cursor.encode(), wire.encode_batch(events))
        return self._flying

    def arrive(self, raw: bytes, now_s: float) -> wire.Reply:
        """Take the answer to the turn in the air. Raises SchemaMismatch."""
        reply = wire.decode_reply(raw)
        if reply.status is wire.Status.OK:
            self._flying = None
            self.book.deliver(reply.outcomes, now_s)
            self.book.hear(reply.depths)
            if reply.waiting >= 0:
                self.book.crowded = reply.waiting > 0
            if self.book.doubted:
                self.rejoin("the store granted a lease twice")
            elif reply.live >= 0:
                self._compare(reply.live)
        elif reply.status is wire.Status.VERSION_MISMATCH:
            raise SchemaMismatch(
                f"store.namespace: gateways of schema {reply.now_ms} keep it; stop them or choose another namespace"
            )
        else:
            self.rejoin(f"the store answered {reply.status.value}")
        return reply

    def mail(self, name: str, entry: str, blob: bytes, now_s: float) -> None:
        """An entry of the mailbox stream of `name`; void where the name is."""
        if name == self.name:
            self.book.deliver(wire.decode_mail(blob), now_s)
            self.cursor = entry

    def _compare(self, live: int) -> None:
        if live == self.book.known:
            self._strikes = 0
            return
        self._strikes += 1
        if self._strikes >= STRIKES:
            self.rejoin(f"the store has {live} of {self.book.known} tickets")
