"""Parents of background tasks. A crashed one stops the process: serving on without it would be a lie."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Fatal(Exception):
    """A background task cannot go on, for a reason that its text tells the operator: logged without a traceback."""


def stop_process() -> None:
    """Ask this process to end in the ordinary way (the server drains, the lifespan ends)."""
    os.kill(os.getpid(), signal.SIGTERM)


class Supervisor:
    """Owns the process's long-lived tasks; `on_crash` runs once when one of them ends with an error."""

    def __init__(self, on_crash: Callable[[], None] = stop_process) -> None:
        self.crashed: str | None = None
        self.on_crash = on_crash
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        names = ", ".join(sorted(task.get_name() for task in self._tasks))
        return f"<Supervisor {names or 'idle'}{f', crashed: {self.crashed}' if self.crashed else ''}>"

    def start(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` until it ends or `aclose`. Ending without an error is fine."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def aclose(self) -> None:
        """Cancel everything and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, Fatal):
            log.critical("%s; the process stops", error)
        else:
            log.critical("background task %s crashed; the process stops", task.get_name(), exc_info=error)
        if self.crashed is None:
            self.crashed = task.get_name()
            self.on_crash()
