"""Those who watch the console: one snapshot a second for all of them together, and none while there is nobody."""

import asyncio
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from gateway import __version__
from gateway.clock import now, wall
from gateway.telemetry import live
from gateway.telemetry.live import Roll
from gateway.telemetry.metrics_sampler import Sampler
from gateway.telemetry.metrics_sheet import Row
from gateway.telemetry.metrics_text import Scrape, merge
from gateway.telemetry.snapshot import FAMILIES, Names, snapshot
from gateway.telemetry.window import Numbers, Window
from policies.reasons import Reason, Refusal

if TYPE_CHECKING:
    from gateway.trunk import Trunk

EVERY_S = 1.0
EARLY_S = 0.01
"""Timers may ring a little early: who is woken for a new snapshot is not to get the old one again."""
WINDOW_S = 10.0
WATCHED_S = 5.0
"""So long after its last snapshot the other processes go on writing what is live in them."""
MOST_VIEWERS = 16
FULL = Refusal(Reason.QUEUE_FULL, f"{MOST_VIEWERS} viewers watch this process already", retry_after_s=5.0)

_encode = msgspec.json.Encoder().encode


class Full(Exception):
    """There are as many viewers as there may be."""


class Audience:
    """The viewers of this process. `closed` is set when they have to go."""

    def __init__(self, trunk: "Trunk", scrape: Scrape, sampler: Sampler) -> None:
        self.viewers = 0
        self.made = 0  # snapshots
        self.closed = asyncio.Event()
        self._slate = trunk.metrics.board.slate
        self._scrape, self._sampler = scrape, sampler
        self._names = Names(
            __version__,
            [one.name for one in trunk.by_rank],
            {pool.model: [member.config.name for member in pool.members] for pool in trunk.pools.values()},
        )
        self._window = Window(WINDOW_S)
        self._lock = asyncio.Lock()
        self._made_at = -math.inf
        self._text = b""

    def __repr__(self) -> str:
        return f"<Audience of {self.viewers}, {self.made} snapshots made>"

    @contextmanager
    def seat(self) -> Iterator[None]:
        """For one viewer. Raises Full."""
        if self.viewers >= MOST_VIEWERS:
            raise Full
        self.viewers += 1
        try:
            yield
        finally:
            self.viewers -= 1

    async def snapshot(self) -> bytes:
        """The present one as JSON: made now, unless there is one that is not yet EVERY_S old."""
        async with self._lock:
            at = now()
            if at - self._made_at >= EVERY_S - EARLY_S:
                self._slate.watch(at + WATCHED_S)
                self._sampler.show()
                self._text = await self._scrape.read(self._made)
                self._made_at = max(at, now() - EVERY_S / 2)  # slow ones do not follow each other without a pause
                self.made += 1
            return self._text

    async def next(self) -> bool:
        """Wait until another snapshot is due; False once the viewers have to go."""
        left_s = self._made_at + EVERY_S - now()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                await self.closed.wait()
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        self.closed.set()

    def _made(self, rows: Iterable[Row]) -> bytes:
        """Beside the event loop."""
        at, clock = now(), wall()
        span = self._window.add(at, Numbers(merge(row for row in rows if row.name in FAMILIES)))
        return _encode(snapshot(self._names, span, [*self._rolls(at)], at, clock))

    def _rolls(self, at: float) -> Iterator[Roll]:
        """Passes over what a worker of another version wrote."""
        for text in self._slate.read(at):
            with suppress(msgspec.MsgspecError):
                yield live.decode(text)
