"""What this process has in the shared queue and has still to tell it. The owner is the authority on its tickets."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from gateway.queue import wire
from gateway.queue.place import Phase, Place, Quota, uncached
from gateway.queue.share import PoolShare, backend_event, part, tenant_event
from policies.quota import TenantLimits
from policies.reasons import Reason, Refusal
from policies.types import Ticket

log = logging.getLogger(__name__)


NO_LIMITS = TenantLimits()
STORE_LOST = Refusal(Reason.STORE_LOST, "the shared queue cannot be reached", retry_after_s=1.0)
DRAINING = Refusal(Reason.DRAINING, "this gateway is shutting down", retry_after_s=1.0)
EXPIRED = Refusal(Reason.EXPIRED, "the deadline for the first token passed while the request waited")
NO_POOL = Refusal(Reason.NO_BACKEND, "no backend serves this model here", retry_after_s=1.0)
MESSAGES = {
    Reason.QUEUE_FULL: "the queue for this model is full",
    Reason.NO_BACKEND: "no backend for this model can take the request now",
    Reason.EXPIRED: EXPIRED.message,
    Reason.RATE_LIMITED: "the tenant's requests or tokens per minute are used up",
    Reason.DEADLINE_IMPOSSIBLE: "no backend for this model could meet the deadline, not even an idle one",
    Reason.DEADLINE_UNREACHABLE: "the deadline cannot be met under the present load",
    Reason.OVERLOADED: "requests of this class wait for too long under the present load",
}


def refusal(word: str, retry_after_ms: int) -> Refusal:
    """The queue's own refusal as an answer."""
    try:
        reason = Reason(word)
    except ValueError:
        return Refusal(Reason.INTERNAL, f"the shared queue answered {word!r}")
    return Refusal(reason, MESSAGES.get(reason, reason.value), retry_after_s=retry_after_ms / 1000)


class Book:
    """Places, pools and pending events of one process. No I/O: a session takes batches out and puts outcomes in.

    `wake(urgent)` is called when there is something to tell; what is not urgent may linger. `depths` is how many wait
    by pool and rank, `levels` the thousandths of arrivals that may not wait, as last heard. `known` is the number of
    tickets the store has of this process once all batches taken are applied; `crowded`: somebody waits in a pool;
    `doubted`: the store granted what is held already; `cut`: the last batch could not take all. `parts`: what
    is declared is one of so many parts of what there is.
    """

    def __init__(self, max_queued: int) -> None:
        self.waiting: dict[int, Place] = {}
        self.held: dict[int, Place] = {}
        self.pools: dict[str, PoolShare] = {}
        self.tenants: dict[str, TenantLimits] = {}
        self.depths: dict[str, list[int]] = {}
        self.levels: dict[str, list[int]] = {}
        self.known = 0
        self.parts = 1
        self.crowded = False
        self.leaving = False
        self.doubted = False
        self.cut = False
        self.refusing: Refusal | None = None
        self._positions: dict[str, dict[str, int]] = {}
        self._max_queued = max_queued
        self.wake: Callable[[bool], None] = lambda urgent: None
        self._pending: deque[tuple[int, Any]] = deque()
        self._beat = False
        self._called = 0  # how it was woken since the last batch: 1 in time, 2 urgently
        self._number = 0
        self._encode: dict[int, Callable[[Any, float], wire.Event | None]] = {
            wire.SUBMIT: self._submit_event,
            wire.FIRST: self._first_event,
            wire.PROGRESS: self._progress_event,
            wire.FINISH: self._finish_event,
            wire.HELD: self._held_event,
            wire.POOL: self._pool_event,
            wire.TENANT: self._tenant_event,
        }

    def __repr__(self) -> str:
        return f"<Book {len(self.waiting)} waiting, {len(self.held)} held, {len(self._pending)} to tell>"

    @property
    def pending(self) -> bool:
        return bool(self._pending) or self._beat

    # what the process says

    def declare(self, pool: PoolShare) -> None:
        self.pools[pool.name] = pool
        self._positions[pool.name] = {share.name: i for i, share in enumerate(pool.backends)}
        self._tell(wire.POOL, pool.name, urgent=True)

    def declare_tenant(self, name: str, limits: TenantLimits) -> None:
        if self.tenants.get(name, NO_LIMITS) != limits:
            self.tenants[name] = limits
            self._tell(wire.TENANT, name, urgent=True)

    def submit(self, ticket: Ticket, now_s: float) -> Place:
        self._number += 1
        place = Place(self, self._number, ticket, now_s)
        why = self.refusing or (None if ticket.pool in self.pools else NO_POOL)
        if why is not None:
            place.close(Phase.REFUSED, why)
            return place
        place.standing = wire.RETRY if ticket.retry else wire.NEW
        self.waiting[place.number] = place
        self._tell(wire.SUBMIT, place, urgent=True)
        return place

    def first(self, place: Place) -> None:
        self._tell(wire.FIRST, place)

    def progress(self, place: Place) -> None:
        if place.reported:
            place.reported = False
            self._tell(wire.PROGRESS, place)

    def end(self, place: Place, output_tokens: int, ran: int) -> None:
        if place.phase is Phase.WAITING:
            self._remove(place, Phase.ENDED, None, output_tokens, ran)
            return
        del self.held[place.number]
        place.phase = Phase.ENDED
        if place.sent:
            self._tell(wire.FINISH, (place.number, output_tokens, ran), self.crowded or bool(self.waiting))

    def beat(self) -> None:
        """Say with the next turn that this process lives."""
        self._beat = True
        self.wake(True)

    def bye(self) -> None:
        """Withdraw and give back everything, take no more, and leave."""
        self.refusing = DRAINING
        self.refuse_waiting(DRAINING)
        for place in list(self.held.values()):
            self.end(place, 0, wire.RAN)
        self.leaving = True
        self._tell(wire.BYE, None, urgent=True)

    # what happens to places without the store

    def expire(self, now_s: float) -> None:
        """Refuse what waits past its deadline; linear in what waits here, called some ten times a second."""
        late = [place for place in self.waiting.values() if place.deadline_s < now_s]
        for place in late:
            self._remove(place, Phase.REFUSED, EXPIRED)

    def lose(self) -> None:
        """The store is away: refuse who waits and who comes. Held leases stay as they are."""
        if not self.leaving:
            self.refusing = STORE_LOST
        self.refuse_waiting(STORE_LOST)

    def regain(self) -> None:
        if not self.leaving:
            self.refusing = None

    def refuse_waiting(self, why: Refusal) -> None:
        for place in list(self.waiting.values()):
            self._remove(place, Phase.REFUSED, why)

    # what a session takes and brings

    def batch(self, now_s: float) -> list[wire.Event]:
        """The next events, at most what a turn may hold. They count as told from here on."""
        events: list[wire.Event] = [[wire.BEAT]] if self._beat else []
        self._beat = False
        self._called = 0
        while self._pending and len(events) < wire.MAX_EVENTS:
            code, what = self._pending.popleft()
            encode = self._encode.get(code)
            if encode is None:
                events.append([code] if what is None else [code, what])
            elif (event := encode(what, now_s)) is not None:
                events.append(event)
        self.cut = bool(self._pending)
        return events

    def declare_again(self, former: str) -> None:
        """Forget what was told; say hello and everything that is true now, first what is taken, then what waits."""
        self._pending.clear()
        self.known = 0
        self.doubted = False
        self._pending.append((wire.HELLO, former))
        self._pending.extend((wire.POOL, name) for name in self.pools)
        self._pending.extend((wire.TENANT, name) for name in self.tenants)
        for place in self.held.values():
            place.reported = True
            place.sent = False
            self._pending.append((wire.HELD, place))
        for place in self.waiting.values():
            if place.sent and place.standing == wire.NEW:
                place.standing = wire.AGAIN
            place.sent = False
            self._pending.append((wire.SUBMIT, place))
        if self.leaving:
            self._pending.append((wire.BYE, None))
        self.wake(True)

    def deliver(self, outcomes: Iterable[wire.Outcome], now_s: float) -> None:
        for number, code, word, ms, left in outcomes:
            place = self.waiting.get(number)
            if code == wire.NEARER:
                if place is not None:
                    place.nearer(ms / 1000)
                continue
            if place is not None and left is not None:
                place.quota = self._quota(place.ticket.tenant, left)
            if code == wire.ERROR:
                log.error("the shared queue could not apply an event of ticket %d: %s", number, word)
            if place is None:  # withdrawn meanwhile, and its end is on its way; or the store forgot that it was granted
                self.doubted |= code == wire.GRANT and number in self.held
                continue
            if code == wire.GRANT:
                self._grant(place, word, now_s, ms / 1000)
                continue
            del self.waiting[number]
            self.known -= place.sent
            place.close(Phase.REFUSED, refusal(word if code == wire.REFUSE else "internal", ms))

    def hear(self, depths: Iterable[tuple[str, list[int], list[int]]]) -> None:
        """What waits in each pool, and how much of what comes may not."""
        for pool, waiting, levels in depths:
            self.depths[pool], self.levels[pool] = waiting, levels

    def _quota(self, tenant: str, left: tuple[int, int, int, int]) -> Quota:
        limits = self.tenants.get(tenant, NO_LIMITS)
        requests, tokens, requests_ms, tokens_ms = left
        return Quota(
            limits.requests_per_min, requests, requests_ms / 1000, limits.tokens_per_min, tokens, tokens_ms / 1000
        )

    def _grant(self, place: Place, backend: str, now_s: float, expected_s: float) -> None:
        if place.deadline_s < now_s:
            self._remove(place, Phase.REFUSED, EXPIRED)
            return
        position = self._positions[place.ticket.pool].get(backend)
        if position is None:  # another process declares it, this one does not (any more)
            self._remove(place, Phase.REFUSED, refusal(Reason.NO_BACKEND, 1000))
            return
        del self.waiting[place.number]
        self.held[place.number] = place
        place.grant(backend, position, expected_s)

    def _remove(
        self, place: Place, phase: Phase, why: Refusal | None, output_tokens: int = 0, ran: int = wire.NOT_RUN
    ) -> None:
        """Of a place that waits."""
        del self.waiting[place.number]
        if place.sent:
            self._tell(wire.FINISH, (place.number, output_tokens, ran))
        place.close(phase, why)

    def _tell(self, code: int, what: Any, urgent: bool = False) -> None:
        self._pending.append((code, what))
        if self._called < 1 + urgent:
            self._called = 1 + urgent
            self.wake(urgent)

    # events as they travel; None where nothing is left to say

    def _submit_event(self, place: Place, now_s: float) -> wire.Event | None:
        if place.phase is not Phase.WAITING:
            return None
        place.sent = True
        self.known += 1
        ticket = place.ticket
        names: list[str] | bool = False
        if ticket.backends:
            shares = self.pools[ticket.pool].backends
            names = [shares[i].name for i in ticket.backends if 0 <= i < len(shares)] or ["-"]
        age_ms = max(0, int((now_s - place.since_s) * 1000))
        gone_ms = age_ms + round(place.nearer_s * 1000)
        return [
            wire.SUBMIT,
            place.number,
            ticket.tenant,
            ticket.rank,
            ticket.pool,
            ticket.prompt_tokens,
            ticket.output_tokens,
            max(0, int((place.deadline_s - now_s) * 1000)),
            max(1, ticket.total_ms - gone_ms) if ticket.total_ms else 0,
            ticket.tpot_ms,
            names,
            place.standing,
            age_ms if place.standing == wire.AGAIN else 0,
            uncached(ticket),
            ticket.output_variance,
            ticket.output_high,
            ticket.key_ms + 1,
            ticket.prefill_price,
            ticket.output_price,
            int(ticket.billed),
            ticket.identity,
            ticket.target_ms,
        ]

    def _held_event(self, place: Place, _: float) -> wire.Event | None:
        if place.phase is not Phase.HELD:
            return None
        place.sent = True
        self.known += 1
        ticket = place.ticket
        return [
            wire.HELD,
            place.number,
            ticket.tenant,
            ticket.rank,
            ticket.pool,
            ticket.prompt_tokens,
            ticket.output_tokens,
            ticket.tpot_ms,
            place.backend,
            place.prefill_tokens,
            place.kv_tokens,
            uncached(ticket),
            place.kv_variance,
            ticket.prefill_price,
            ticket.output_price,
        ]

    def _first_event(self, place: Place, _: float) -> wire.Event | None:
        return [wire.FIRST, place.number] if place.phase is Phase.HELD else None

    def _progress_event(self, place: Place, _: float) -> wire.Event | None:
        place.reported = True
        return [wire.PROGRESS, place.number, place.kv_tokens, place.kv_variance] if place.phase is Phase.HELD else None

    def _finish_event(self, what: tuple[int, int, int], _: float) -> wire.Event:
        self.known -= 1
        number, output_tokens, ran = what
        return [wire.FINISH, number, max(0, output_tokens), ran]

    def _pool_event(self, name: str, _: float) -> wire.Event:
        shares = [backend_event(share, self.parts) for share in self.pools[name].backends]
        return [wire.POOL, name, part(self._max_queued, self.parts), shares]

    def _tenant_event(self, name: str, _: float) -> wire.Event:
        return tenant_event(name, self.tenants[name], self.parts)
