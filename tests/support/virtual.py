"""An event loop whose time jumps to the next timer: hours of waiting take milliseconds, and a deadlock is an error.

For code that waits for timers, futures and events only. Sockets work too, but nobody waits for the other side.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Every task waits, and nothing that could wake one is scheduled."""


class _JumpingSelector(selectors.DefaultSelector):
    """Passes the time that it is asked to wait instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if found := super().select(0):
            return found
        if timeout is None:
            waiting = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(asyncio.get_running_loop())))
            raise Deadlock(f"nothing is scheduled, and these wait: {waiting}")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, on a virtual loop of its own that starts at 0 s. Raises Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
