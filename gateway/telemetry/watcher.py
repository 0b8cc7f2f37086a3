"""Who hears of requests that have ended: traces, the access log, metrics. Business code counts nothing itself."""

import logging
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from gateway.exchange import Exchange

log = logging.getLogger(__name__)


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
    """All of them. One that fails is logged; no request suffers for it."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: tuple[Watcher, ...] = ()

    def __repr__(self) -> str:
        return f"<Watchers {self._all}>"

    def add(self, watcher: Watcher) -> None:
        """From now on it hears of every request. Before the first one, please."""
        self._all += (watcher,)

    def ended(self, exchange: "Exchange") -> None:
        for watcher in self._all:
            try:
                watcher.ended(exchange)
            except Exception:
                log.exception("%r failed at the end of a request", watcher)

    def stopped(self, exchange: "Exchange") -> None:
        for watcher in self._all:
            try:
                watcher.stopped(exchange)
            except Exception:
                log.exception("%r failed at the end of a cancellation", watcher)
