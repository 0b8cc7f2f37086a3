"""Gateway processes reduced to turns: the real book and session on a blocking connection and a clock that tests set.

Faults are said, not awaited: a lost reply, a doubled turn, a server that is another one.
"""

from typing import Any

import redis

from gateway.queue import scripts, wire
from gateway.queue.book import Book
from gateway.queue.keys import Keys
from gateway.queue.place import Phase, Place
from gateway.queue.session import Session
from gateway.queue.share import PoolShare
from policies.types import Ticket
from tests.support.store import StoreServer

NAMESPACE = "signalbox"
KEYS = Keys(NAMESPACE)


class Clock:
    """The server's wall clock in milliseconds, and everybody's monotonic one."""

    def __init__(self) -> None:
        self.wall_ms = 1_000_000
        self.now_s = 0.0

    def advance(self, ms: int) -> None:
        self.wall_ms += ms
        self.now_s += ms / 1000


class Process:
    """One process. `run_id` is what it believes the server to be; `calls` counts what it sent."""

    def __init__(self, server: StoreServer, base: str, clock: Clock, max_queued: int = 1000) -> None:
        self.server = server
        self.clock = clock
        self.book = Book(max_queued)
        self.session = Session(self.book, base)
        self.replies: list[wire.Reply] = []
        self.connect("one")

    def connect(self, run_id: str) -> None:
        self.session.connected(run_id)

    def send(self) -> bytes:
        """Put the turn in the air on the wire; its answer is not taken."""
        parts = self.session.depart(self.clock.now_s)
        return call(self.server, *parts, b"%d" % self.clock.wall_ms)

    def turn(self, lost: int = 0, doubled: bool = False) -> wire.Reply:
        """One turn, after `lost` tries whose answers never came; `doubled`: a late copy arrives afterwards."""
        for _ in range(lost):
            self.send()
        parts = self.session.depart(self.clock.now_s)
        raw = self.send()
        if doubled:
            call(self.server, *parts, b"%d" % self.clock.wall_ms)
        reply = self.session.arrive(raw, self.clock.now_s)
        self.replies.append(reply)
        return reply

    def settle(self) -> wire.Reply:
        """Turns until nothing is left to say, at least one; then the mail."""
        reply = self.turn()
        while self.book.pending:
            reply = self.turn()
        self.mail()
        return reply

    def mail(self) -> None:
        name = self.session.name
        answer = self.server("XREAD", "STREAMS", KEYS.mailbox(name), self.session.cursor or "0-0")
        for entry, fields in answer[0][1] if answer else ():
            blob = fields[b"o"] if isinstance(fields, dict) else fields[1]
            self.session.mail(name, entry.decode(), blob, self.clock.now_s)

    def beat(self) -> wire.Reply:
        self.book.beat()
        return self.turn()

    def declare(self, pool: PoolShare) -> None:
        self.book.declare(pool)

    def submit(self, ticket: Ticket) -> Place:
        return self.book.submit(ticket, self.clock.now_s)

    def held(self) -> set[int]:
        return set(self.book.held)

    def phases(self) -> list[Phase]:
        return [place.phase for _, place in sorted({**self.book.waiting, **self.book.held}.items())]


def call(server: StoreServer, *parts: bytes) -> bytes:
    """One turn as raw bytes. Raises redis's ResponseError when the script fails."""
    try:
        answer: Any = server("FCALL", scripts.FUNCTION, 1, KEYS.prefix, *parts)
    except redis.ResponseError as error:
        if "Function not found" not in str(error):
            raise
        load(server)
        answer = server("FCALL", scripts.FUNCTION, 1, KEYS.prefix, *parts)
    return bytes(answer)


def load(server: StoreServer) -> None:
    server("FUNCTION", "LOAD", "REPLACE", scripts.library())


def advance_until_reaped(server: StoreServer, by: Process, name: str, limit_ms: int = 8000) -> int:
    """Let `by` make turns until nothing is left of a process. -> milliseconds it took."""
    for spent in range(0, limit_ms, 50):
        if server("ZSCORE", KEYS.processes, name) is None:
            return spent
        by.clock.advance(50)
        by.turn()
    raise AssertionError(f"{name} was not reaped")
