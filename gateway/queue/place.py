"""One request's place in the shared queue, from its submit to its end."""

import asyncio
import enum
from typing import TYPE_CHECKING

from msgspec import Struct

from gateway.queue import wire
from policies.reasons import Reason, Refusal
from policies.types import Ticket

if TYPE_CHECKING:
    from gateway.queue.book import Book


class QueueRefusal(Exception):
    """The queue said no: full, too late, nothing to serve with, store lost."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Quota(Struct, frozen=True):
    """What a tenant may use a minute and has left of it; 0 is no limit, and then nothing is said of the rest.

    The resets say in how many seconds all of it is back, if nothing more is asked.
    """

    requests: int
    requests_left: int
    requests_reset_s: float
    tokens: int
    tokens_left: int
    tokens_reset_s: float


class Phase(enum.IntEnum):
    WAITING = 0
    HELD = 1  # granted: the owner may not have read it yet
    REFUSED = 2
    ENDED = 3


LEFT = Refusal(Reason.CLIENT_GONE, "the request was withdrawn while it waited")


def uncached(ticket: Ticket) -> int:
    """Prompt tokens that are to be computed."""
    tokens = ticket.uncached_tokens
    return ticket.prompt_tokens if tokens < 0 else min(tokens, ticket.prompt_tokens)


class Place:
    """One ticket. Its owner calls `end` when it is done with it, whatever happened; everything else is optional.

    `position` is the granted backend's in the pool's declaration, -1 before; `expected_s` what the queue expects from
    the grant to the first token. `quota` is the tenant's when the ticket was granted or refused, None if it has no
    limits a minute. `nearer_s` is by how much its deadlines are nearer than its ticket says, since it has come before.
    `sent` says whether the store may know the ticket; `standing` how it is to be taken there.
    """

    __slots__ = (
        "_book",
        "_waiter",
        "backend",
        "deadline_s",
        "expected_s",
        "kv_tokens",
        "kv_variance",
        "nearer_s",
        "number",
        "phase",
        "position",
        "prefill_tokens",
        "quota",
        "refusal",
        "reported",
        "sent",
        "since_s",
        "standing",
        "ticket",
    )

    def __init__(self, book: "Book", number: int, ticket: Ticket, now_s: float) -> None:
        self.number = number
        self.ticket = ticket
        self.phase = Phase.WAITING
        self.since_s = now_s
        self.deadline_s = now_s + ticket.waits_ms / 1000
        self.nearer_s = 0.0
        self.backend = ""
        self.expected_s = 0.0
        self.position = -1
        self.prefill_tokens = 0
        self.kv_tokens = 0
        self.kv_variance = 0
        self.quota: Quota | None = None
        self.refusal: Refusal | None = None
        self.sent = False
        self.reported = True
        self.standing = 0
        self._book = book
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        where = f" on {self.backend}" if self.backend else ""
        return f"<Place {self.number} {self.phase.name.lower()}{where}>"

    async def granted(self) -> int:
        """Wait for a lease: the backend's position in the pool's declaration. Raises QueueRefusal.

        Cancelling it does not give the place up: the caller's `finally` calls `end`, which also gives back a grant that
        arrived in the same tick. One waiter at a time.
        """
        if self.phase is Phase.WAITING:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.phase is Phase.HELD:
            return self.position
        raise QueueRefusal(self.refusal or LEFT)

    def first_token(self) -> None:
        """The prompt has been computed: its prefill share returns."""
        if self.phase is Phase.HELD and self.prefill_tokens:
            self.prefill_tokens = 0
            self._book.first(self)

    def progress(self, kv_tokens: int, kv_variance: int = 0) -> None:
        """The KV tokens the request is expected to need from now on, and their variance, as absolute numbers."""
        if self.phase is Phase.HELD and (kv_tokens, kv_variance) != (self.kv_tokens, self.kv_variance):
            self.kv_tokens, self.kv_variance = max(0, kv_tokens), max(0, kv_variance)
            self._book.progress(self)

    def end(self, output_tokens: int = 0, ran: bool = False, answered: bool = False) -> None:
        """Withdraw, or give the lease back. Synchronous, from any phase, safely twice.

        `ran` says that the prompt was computed, `output_tokens` what came of it, `answered` that this is all of it.
        """
        if self.phase is Phase.WAITING or self.phase is Phase.HELD:
            self._book.end(self, output_tokens, (wire.ANSWERED if answered else wire.RAN) if ran else wire.NOT_RUN)

    def grant(self, backend: str, position: int, expected_s: float = 0.0) -> None:
        """For the book: the lease is this place's."""
        self.phase, self.backend, self.position, self.expected_s = Phase.HELD, backend, position, expected_s
        ticket = self.ticket
        self.prefill_tokens = uncached(ticket)
        self.kv_tokens = ticket.prompt_tokens + ticket.output_tokens
        self.kv_variance = ticket.output_variance
        self._wake()

    def nearer(self, seconds: float) -> None:
        """For the book: its deadlines are so much nearer."""
        self.nearer_s += seconds
        self.deadline_s -= seconds

    def close(self, phase: Phase, refusal: Refusal | None = None) -> None:
        """For the book: nothing comes any more."""
        self.phase, self.refusal = phase, refusal
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
