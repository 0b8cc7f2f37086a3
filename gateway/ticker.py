"""One timer for all live requests: late watchers, deadlines, stalls. It runs only while there is a request."""

import asyncio
from typing import TYPE_CHECKING, Protocol

from policies.reasons import Refusal

if TYPE_CHECKING:
    from gateway.exchange import Exchange

PERIOD_S = 0.02


class Live(Protocol):
    """A request between its first byte and its end."""

    @property
    def exchange(self) -> "Exchange": ...

    def tick(self, now: float) -> None:
        """Look at the clock: `now` is the loop's time in seconds."""
        ...

    def cut(self, refusal: Refusal) -> None:
        """End early, for this reason. Idempotent; the first reason stands."""
        ...


class Ticker:
    """Calls `tick` of every member about every 20 ms. A member may leave during its own tick."""

    __slots__ = ("_handle", "_idle", "_live", "_loop")

    def __init__(self) -> None:
        self._live: dict[Live, None] = {}
        self._handle: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<Ticker {len(self._live)} live>"

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, what: Live) -> bool:
        return what in self._live

    def cut(self, refusal: Refusal) -> None:
        """End every live request for this reason."""
        for what in tuple(self._live):
            what.cut(refusal)

    def add(self, what: Live) -> None:
        if not self._live:
            self._idle.clear()
        self._live[what] = None
        if self._handle is None:
            self._handle = self._loop.call_later(PERIOD_S, self._tick)

    def discard(self, what: Live) -> None:
        self._live.pop(what, None)
        if not self._live:
            self._idle.set()

    def members(self) -> tuple[Live, ...]:
        """Everything that is live, oldest first."""
        return tuple(self._live)

    async def idle(self) -> None:
        """Wait until nothing is live."""
        await self._idle.wait()

    def _tick(self) -> None:
        now = self._loop.time()
        for what in tuple(self._live):
            what.tick(now)
        self._handle = self._loop.call_later(PERIOD_S, self._tick) if self._live else None
