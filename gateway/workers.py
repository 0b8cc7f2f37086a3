"""Several gateway processes on one socket: the parent that keeps them, and the worker's side.

The configuration goes to a worker through its standard input, which then stays open: when it ends, the parent has.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

import msgspec

from gateway.app import build
from gateway.config import Config, ConfigError
from gateway.queue.client import StoreAway, StoreUnfit
from gateway.queue.embedded import Embedded
from gateway.serving import run
from gateway.supervisor import Supervisor
from gateway.telemetry import logs
from gateway.telemetry.metrics_sheet import Board, new_file
from gateway.telemetry.slate import SLOT

log = logging.getLogger(__name__)

READY = b"ready\n"
PAUSES_S = (0.0, 0.1, 0.5, 1.0, 5.0)
"""Before the nth start in a row of a worker that does not stay up for `STEADY_S`."""
STEADY_S = 10.0


async def serve(config: Config, listener: socket.socket, on_ready: Callable[[], object]) -> int:
    """The parent's whole life: one store for all workers if it is embedded, then the workers. The exit code."""
    supervisor = Supervisor()
    embedded: Embedded | None = None
    if config.store.url == "embedded":
        embedded = await Embedded.start()
        supervisor.start("embedded store", embedded.keep())
        config = msgspec.structs.replace(config, store=msgspec.structs.replace(config.store, url=embedded.url))
    workers = Workers(config, listener, on_ready)
    try:
        await workers.run()
    finally:
        await supervisor.aclose()
        if embedded is not None:
            await embedded.aclose()
    return 1 if workers.failed or supervisor.crashed else 0


class Workers:
    """The parent: starts `count` workers, starts a dead one again, and passes SIGTERM on.

    A worker that dies before it was ever ready would die again, so it stops everything: see `failed`.
    """

    def __init__(self, config: Config, listener: socket.socket, on_ready: Callable[[], object]) -> None:
        self.failed = False
        self._count = config.server.workers
        self._config = msgspec.json.encode(config)
        self._listener = listener
        self._shared = [new_file(SLOT * self._count), *(new_file() for _ in range(self._count))]
        self._on_ready = on_ready
        self._ready: set[int] = set()
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Workers {len(self._running)}/{self._count} running, {len(self._ready)} were ready>"

    async def run(self) -> None:
        """Until SIGTERM or SIGINT, or a worker that can't start."""
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(each, self._stop)
        async with asyncio.TaskGroup() as group:
            for nth in range(self._count):
                group.create_task(self._keep(nth), name=f"worker {nth}")

    def _stop(self) -> None:
        self._stopping.set()
        for process in self._running.values():
            _terminate(process)

    async def _keep(self, nth: int) -> None:
        loop, falls = asyncio.get_running_loop(), 0
        while not self._stopping.is_set():
            began = loop.time()
            code = await self._once(nth)
            if self._stopping.is_set():
                return
            if nth not in self._ready:
                self.failed = True
                self._stop()
                return
            falls = 0 if loop.time() - began > STEADY_S else falls + 1
            pause_s = PAUSES_S[min(falls, len(PAUSES_S) - 1)]
            log.error("worker %d ended with %d; it starts again in %.1f s", nth, code, pause_s)
            await self._pause(pause_s)

    async def _once(self, nth: int) -> int:
        """One life of a worker; its exit code. A Ctrl-C of the terminal reaches the parent alone."""
        fds = [self._listener.fileno(), *self._shared]
        command = (sys.executable, "-m", "gateway.workers", str(nth), *map(str, fds))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, pass_fds=fds, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._running[nth] = process
        try:
            if self._stopping.is_set():
                _terminate(process)
            process.stdin.write(self._config + b"\n")
            if await process.stdout.readline() == READY:
                self._came_up(nth)
            return await process.wait()
        finally:
            del self._running[nth]
            process.stdin.close()

    def _came_up(self, nth: int) -> None:
        if nth not in self._ready:
            self._ready.add(nth)
            if len(self._ready) == self._count:
                self._on_ready()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return


def _terminate(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


def main() -> int:
    """A worker: its place and the descriptors of the listening socket, the slate and all sheets of metrics are its
    arguments, the configuration its first line of input."""
    ready = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not look like our word to the parent
    logs.configure()
    place, descriptor, slate, *sheets = map(int, sys.argv[1:])
    listener = socket.socket(fileno=descriptor)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=Config)
    try:
        app = build(config, Board(tuple(sheets), place, slate))
        return run(app, listener, lambda: os.write(ready, READY), lifeline=0)
    except (ConfigError, StoreAway, StoreUnfit) as error:
        log.critical("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
