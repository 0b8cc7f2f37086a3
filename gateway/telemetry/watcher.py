"""Who hears of requests that have ended: traces, the access log, metrics. Business code counts nothing itself."""

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from gateway.exchange import Exchange

log = logging.getLogger(__name__)

TOGETHER = 32
SOON_S = 0.02


class Attempt(Struct, frozen=True):
    """A backend that failed before its first chunk. Times are seconds of the loop's clock."""

    submitted_at: float
    granted_at: float
    failed_at: float
    backend: str
    error: str  # its kind


class Watcher(Protocol):
    """Called on the event loop; reads what the exchange recorded, and keeps it no longer than it must."""

    def ended(self, exchange: "Exchange") -> None:
        """It is in its last state. Where `exchange.stopping` is set, `stopped` follows."""
        ...

    def stopped(self, exchange: "Exchange") -> None:
        """The engine of a request that was cut short has been told to stop, or the time for that ran out."""
        ...


class Watchers:
    """All of them. They hear of ended requests a few at a time, which costs a fraction of one by one, and late by
    SOON_S at most. One that fails is logged; no request suffers for it.
    """

    __slots__ = ("_all", "_ended", "_timer")

    def __init__(self) -> None:
        self._all: tuple[Watcher, ...] = ()
        self._ended: list[Exchange] = []
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Watchers {self._all}, {len(self._ended)} to tell of>"

    def add(self, watcher: Watcher) -> None:
        """From now on it hears of every request. Before the first one, please."""
        self._all += (watcher,)

    def ended(self, exchange: "Exchange") -> None:
        self._ended.append(exchange)
        if len(self._ended) >= TOGETHER:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SOON_S, self._due)

    def stopped(self, exchange: "Exchange") -> None:
        self.flush()
        for watcher in self._all:
            try:
                watcher.stopped(exchange)
            except Exception:
                log.exception("%r failed at the end of a cancellation", watcher)

    def flush(self) -> None:
        """Tell them now."""
        ended, self._ended = self._ended, []
        for watcher in self._all:
            for exchange in ended:
                try:
                    watcher.ended(exchange)
                except Exception:
                    log.exception("%r failed at the end of a request", watcher)

    def close(self) -> None:
        """Tell the last, and leave no timer behind."""
        self.flush()
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        self._timer = None
        self.flush()
