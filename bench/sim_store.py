"""A private store on a blocking socket, and gateway processes reduced to turns on it: the real book, session, scripts.

Turns take no virtual time. What happens at one instant goes in one turn; events nobody waits for linger as they do in
production, and other processes' mail is read in the same exchange.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import hiredis

from gateway.queue import scripts, wire
from gateway.queue.book import Book
from gateway.queue.embedded import Embedded
from gateway.queue.keys import Keys
from gateway.queue.session import Session
from gateway.queue.turns import LINGER_S

KEYS = Keys("simulation")
WALL_MS = 1_000_000  # at virtual time 0; the script takes 0 for the server's own clock
LINGER_MS = LINGER_S * 1000
SWEEP_MS, BEAT_MS = 100, 1000


class SimulationFault(Exception):
    """The queue said or left what it never should: a fault of the code that is simulated."""


class Store:
    """A private store server, started when first asked, and one connection to it. Close it."""

    def __init__(self) -> None:
        self.turns = 0
        self._loop = asyncio.Runner()
        self._server: Embedded | None = None
        self._socket = socket.socket(socket.AF_UNIX)
        self._reader = hiredis.Reader()
        self._turn = (b"FCALL", scripts.FUNCTION.encode(), b"1", KEYS.prefix.encode())

    def __repr__(self) -> str:
        return f"<Store {self._server!r}, {self.turns} turns>"

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, *words: str) -> Any:
        """One command. Raises hiredis's ReplyError for an error answer."""
        return self._exchange([wire.command(*(word.encode() for word in words))])[0]

    def turn(self, parts: tuple[bytes, ...], wall_ms: int, readers: "Iterable[Session]" = ()) -> list[Any]:
        """One turn, then what is in the mailbox of each of `readers`."""
        self.turns += 1
        commands = [wire.command(*self._turn, *parts, b"%d" % wall_ms)]
        for session in readers:
            key, cursor = KEYS.mailbox(session.name).encode(), (session.cursor or "0-0").encode()
            commands.append(wire.command(b"XREAD", b"STREAMS", key, cursor))
        return self._exchange(commands)

    def close(self) -> None:
        self._socket.close()
        if self._server is not None:
            self._loop.run(self._server.aclose())
        self._loop.close()

    def _start(self) -> None:
        self._server = self._loop.run(Embedded.start())
        self._socket.connect(str(self._server.socket))
        self.ask("FUNCTION", "LOAD", "REPLACE", scripts.library())

    def _exchange(self, commands: list[bytes]) -> list[Any]:
        if self._server is None:
            self._start()
        self._socket.sendall(b"".join(commands))
        answers: list[Any] = []
        while len(answers) < len(commands):
            answer = self._reader.gets()
            if answer is False:
                data = self._socket.recv(1 << 16)
                if not data:
                    raise SimulationFault("the store closed the connection")
                self._reader.feed(data)
                continue
            if isinstance(answer, hiredis.ReplyError):
                raise answer
            answers.append(answer)
        return answers


class _Book(Book):
    """Remembers whose outcome has come, since nobody awaits a place here."""

    def __init__(self, max_queued: int) -> None:
        super().__init__(max_queued)
        self.news: list[int] = []

    def deliver(self, outcomes: Iterable[wire.Outcome], now_s: float) -> None:
        known = list(outcomes)
        for number, code, word, *_ in known:
            if code == wire.ERROR:
                raise SimulationFault(f"the queue could not apply an event of ticket {number}: {word}")
            self.news.append(number)
        super().deliver(known, now_s)


class Clock(Protocol):
    """Virtual time."""

    now_ms: float

    def wake(self, at_ms: float) -> None:
        """Have `tick` called at a time, at least."""


class Process:
    """The queue's half of one gateway process. `others` share the store; `settled` hears of each ticket answered."""

    def __init__(self, store: Store, name: str, max_queued: int, clock: Clock) -> None:
        self.book = _Book(max_queued)
        self.session = Session(self.book, name)
        self.others: list[Process] = []
        self.settled: Callable[[int], None] = lambda number: None
        self._store, self._clock = store, clock
        self._urgent = False
        self._linger_ms = self._due_ms = float("inf")
        self._sweep_ms = self._beat_ms = 0.0
        self.book.wake = self._woken
        self.session.connected("the one")

    def __repr__(self) -> str:
        return f"<Process {self.session!r} {self.book!r}>"

    def begin(self) -> None:
        """Join at time 0: from then on deadlines are swept and beats sent until `leave`."""
        self.book.beat()
        self._clock.wake(0.0)

    def tick(self) -> None:
        """Do what is due."""
        now_ms = self._clock.now_ms
        if now_ms >= self._sweep_ms:
            self._sweep(now_ms)
        if not (self._urgent or now_ms >= self._linger_ms or now_ms >= self._due_ms):
            return
        self._due_ms = float("inf")
        while True:
            self._urgent, self._linger_ms = False, float("inf")
            self._make_turn(now_ms)
            if not self.book.pending:
                return

    def leave(self) -> None:
        """Say bye. Raises SimulationFault for a process that had to rejoin."""
        self.book.bye()
        self.tick()
        if self.session.rejoins:
            raise SimulationFault(f"{self!r} rejoined {self.session.rejoins} times")

    def _sweep(self, now_ms: float) -> None:
        self._sweep_ms = now_ms + SWEEP_MS
        waiting = list(self.book.waiting)
        self.book.expire(now_ms / 1000)
        if len(self.book.waiting) < len(waiting):
            self._settle([number for number in waiting if number not in self.book.waiting])
        if now_ms >= self._beat_ms:
            self._beat_ms = now_ms + BEAT_MS
            self.book.beat()
        if not self.book.leaving:
            self._clock.wake(self._sweep_ms)

    def _make_turn(self, now_ms: float) -> None:
        wall_ms = WALL_MS + int(now_ms)
        raw, *mails = self._store.turn(
            self.session.depart(now_ms / 1000), wall_ms, [one.session for one in (self, *self.others) if self.others]
        )
        reply = self.session.arrive(raw, now_ms / 1000)
        if reply.status is not wire.Status.OK:
            raise SimulationFault(f"{self!r}: the store answered {reply.status}")
        if reply.due_ms:
            self._due_ms = now_ms + reply.due_ms
            self._clock.wake(self._due_ms)
        for process, mail in zip((self, *self.others), mails, strict=False):
            process.read(mail)
        self._settle_news()

    def read(self, mail: Any) -> None:
        """Take what a read of this process's mailbox answered."""
        if not mail:
            return
        for entry, fields in mail[0][1]:
            self.session.mail(self.session.name, entry.decode(), fields[1], self._clock.now_ms / 1000)
        self._settle_news()

    def _settle_news(self) -> None:
        news, self.book.news = self.book.news, []
        self._settle(news)

    def _settle(self, numbers: list[int]) -> None:
        for number in numbers:
            self.settled(number)

    def _woken(self, urgent: bool) -> None:
        if urgent:
            self._urgent = True
        elif self._linger_ms == float("inf"):
            self._linger_ms = self._clock.now_ms + LINGER_MS
            self._clock.wake(self._linger_ms)
