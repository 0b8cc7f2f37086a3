"""Ends what requests leave behind. A cancelled task cannot await; this can."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class Reaper:
    """Runs handed-over clean-ups as tasks of its own, each at most `limit_s`; drained at shutdown.

    A clean-up that fails or takes too long is logged and counted in `failed`, never raised: its owner is gone.
    """

    def __init__(self, limit_s: float = 5.0) -> None:
        self.limit_s = limit_s
        self.failed = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Reaper {len(self._tasks)} at work, {self.failed} failed>"

    def __len__(self) -> int:
        return len(self._tasks)

    def close(self, what: Callable[[], Awaitable[None]], then: Callable[[], None] | None = None) -> None:
        """Hand over one clean-up, and what to call when it is over. Synchronous: call it from `finally`."""
        task = asyncio.get_running_loop().create_task(self._end(what, then))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Wait until everything handed over has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _end(self, what: Callable[[], Awaitable[None]], then: Callable[[], None] | None) -> None:
        try:
            async with asyncio.timeout(self.limit_s):
                await what()
        except Exception:
            self.failed += 1
            log.exception("a clean-up failed or took more than %.1f s", self.limit_s)
        if then is not None:
            then()
