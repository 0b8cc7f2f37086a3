"""When to leave a failing backend alone, and when to try it again."""

import enum
from typing import Annotated

from msgspec import Meta, Struct


class BreakerRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Opens at `failures` within `window_s` if they are at least `share` of all outcomes in it.

    The first opening lasts `open_s`; each that follows a failed probe lasts `growth` times longer, up to `most_s`.
    """

    failures: Annotated[int, Meta(ge=1)] = 5
    share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    window_s: Annotated[float, Meta(gt=0)] = 10.0
    open_s: Annotated[float, Meta(gt=0)] = 1.0
    growth: Annotated[float, Meta(ge=1)] = 2.0
    most_s: Annotated[float, Meta(gt=0)] = 30.0
    probe_s: Annotated[float, Meta(gt=0)] = 5.0


class Circuit(enum.StrEnum):
    CLOSED = "closed"  # all may pass
    OPEN = "open"  # none may
    HALF_OPEN = "half_open"  # one may, to see


class Breaker:
    """Counts the outcomes of one backend. `at` is in seconds of one clock and does not go back.

    What is no fault of the backend (a refused request, a busy engine, a client that left) is not reported at all. A
    probe whose outcome never comes, for that or any other reason, is replaced after `probe_s`.
    """

    __slots__ = ("_bad", "_circuit", "_good", "_opened_s", "_until", "_was_bad", "_was_good", "_window_from", "rule")

    def __init__(self, rule: BreakerRule | None = None) -> None:
        self.rule = rule or BreakerRule()
        self._circuit = Circuit.CLOSED
        self._until = 0.0  # open: no pass before; half open: no further probe before
        self._opened_s = 0.0  # how long the present opening lasts
        self._window_from = 0.0
        self._good = self._bad = 0
        self._was_good = self._was_bad = 0  # the window before

    def __repr__(self) -> str:
        return f"<Breaker {self._circuit.value}, {self._bad + self._was_bad} failures>"

    @property
    def closed(self) -> bool:
        """Whether all may pass, without a look at the clock."""
        return self._circuit is Circuit.CLOSED

    def circuit(self, at: float) -> Circuit:
        """What a request would find."""
        return Circuit.HALF_OPEN if self._circuit is Circuit.OPEN and at >= self._until else self._circuit

    def allows(self, at: float) -> bool:
        """Whether a request may go there. Half open, the one that is told yes is the probe."""
        if self._circuit is Circuit.CLOSED:
            return True
        if at < self._until:
            return False
        self._circuit = Circuit.HALF_OPEN
        self._until = at + self.rule.probe_s
        return True

    def opens_in_s(self, at: float) -> float:
        """Seconds until `allows` may say yes; 0 when it would now."""
        return 0.0 if self._circuit is Circuit.CLOSED else max(0.0, self._until - at)

    def success(self, at: float) -> None:
        """An answer came as it should."""
        if self._circuit is Circuit.OPEN:
            return  # of a request from before
        if self._circuit is Circuit.HALF_OPEN:
            self._close(at)
        self._turn(at)
        self._good += 1

    def failure(self, at: float) -> None:
        """The backend failed or was not there."""
        if self._circuit is Circuit.OPEN:
            return
        if self._circuit is Circuit.HALF_OPEN:
            self._open(at, min(self._opened_s * self.rule.growth, self.rule.most_s))
            return
        self._turn(at)
        self._bad += 1
        bad = self._bad + self._was_bad
        if bad >= self.rule.failures and bad >= self.rule.share * (bad + self._good + self._was_good):
            self._open(at, min(self.rule.open_s, self.rule.most_s))

    def _open(self, at: float, lasting_s: float) -> None:
        self._circuit = Circuit.OPEN
        self._opened_s = lasting_s
        self._until = at + lasting_s

    def _close(self, at: float) -> None:
        self._circuit = Circuit.CLOSED
        self._window_from = at
        self._good = self._bad = self._was_good = self._was_bad = 0

    def _turn(self, at: float) -> None:
        """Forget what is older than the window: two halves, of which the older is dropped whole."""
        half_s = self.rule.window_s / 2
        passed = (at - self._window_from) / half_s
        if passed < 1:
            return
        self._was_good, self._was_bad = (self._good, self._bad) if passed < 2 else (0, 0)
        self._good = self._bad = 0
        self._window_from = at
