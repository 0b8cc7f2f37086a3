"""What a tenant may use at most, and how a minute is counted.

A minute is a window of SLOTS slots that moves with time; the oldest counts whole until it has left, so that no 60 s,
whenever they begin, hold more than the limit. (A bucket that refills, such as GCRA's, lets through twice the limit in
the minute after a pause.) What is asked is reserved at once and corrected when its length is known. The queue's script
keeps the windows of all replicas; this is the same arithmetic, for tests and for `signalbox explain`.
"""

from typing import Annotated

from msgspec import Meta, Struct

MOST = 1_000_000_000_000
"""The largest limit: sums of it stay exact in the queue's script, whose numbers are doubles."""

SLOTS = 13
SLOT_MS = 5_000
MINUTE_MS = 60_000

Limit = Annotated[int, Meta(ge=0, le=MOST)]


class TenantLimits(Struct, frozen=True, kw_only=True):
    """A tenant's quotas, over all replicas together; 0 is no limit.

    Tokens are prompt and output tokens together. `tokens_in_flight` counts those of requests that an engine has now;
    `max_queued` the requests that may wait.
    """

    requests_per_min: Limit = 0
    tokens_per_min: Limit = 0
    tokens_in_flight: Limit = 0
    max_queued: Limit = 0


class Minute:
    """A limit per minute, in integer units, at times in milliseconds that never go back."""

    __slots__ = ("_slots", "limit")

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit}")
        self.limit = limit
        self._slots: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Minute {sum(self._slots.values())} of {self.limit}>"

    def left(self, now_ms: int) -> int:
        """Units that may be taken now."""
        self._roll(now_ms)
        return max(0, self.limit - sum(self._slots.values()))

    def take(self, units: int, now_ms: int) -> int:
        """Reserve. Returns the slot, for `correct`; it may exceed the limit: ask `wait_ms` first."""
        slot = self._roll(now_ms)
        self._slots[slot] = self._slots.get(slot, 0) + units
        return slot

    def correct(self, slot: int, reserved: int, truth: int, now_ms: int) -> None:
        """The truth in place of what was reserved: too much returns to where it was, what is missing is spent now."""
        current = self._roll(now_ms)
        if truth >= reserved:
            self._slots[current] = self._slots.get(current, 0) + truth - reserved
        elif slot in self._slots:
            self._slots[slot] = max(0, self._slots[slot] + truth - reserved)

    def wait_ms(self, units: int, now_ms: int) -> int:
        """How long until `units` more fit; 0 is now. What never fits waits a whole window."""
        self._roll(now_ms)
        over = sum(self._slots.values()) + units - self.limit
        if over <= 0:
            return 0
        for slot in sorted(self._slots):
            over -= self._slots[slot]
            if over <= 0:
                return (slot + SLOTS) * SLOT_MS - now_ms
        return MINUTE_MS + SLOT_MS

    def _roll(self, now_ms: int) -> int:
        current = now_ms // SLOT_MS
        self._slots = {slot: n for slot, n in self._slots.items() if slot > current - SLOTS}
        return current
