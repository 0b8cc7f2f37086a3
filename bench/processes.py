"""Processes under measurement: started on a core of their own, watched through /proc, and ended."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_STORES = ("valkey-server", "redis-server")


class Failed(Exception):
    """A process could not be started or ended early; the text holds the end of what it said."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Cores(NamedTuple):
    """A core for what is measured and one for everything else; None where there are not two, or no way to choose."""

    target: int | None
    others: int | None

    @staticmethod
    def found() -> "Cores":
        allowed = sorted(os.sched_getaffinity(0))
        return Cores(allowed[0], allowed[1]) if len(allowed) > 1 and shutil.which("taskset") else Cores(None, None)

    @property
    def apart(self) -> bool:
        return self.target is not None


def pinned(argv: list[str], core: int | None) -> list[str]:
    return argv if core is None else ["taskset", "-c", str(core), *argv]


class Running:
    """One started process with its children. The store that a gateway starts counts apart, on the other core."""

    def __init__(self, name: str, argv: list[str], core: int | None, log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                pinned(argv, core), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    def __repr__(self) -> str:
        return f"<Running {self.name}, pid {self._process.pid}>"

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises Failed if it has ended."""
        if self._process.poll() is not None:
            raise Failed(f"{self.name} ended with {self._process.returncode}:\n{self.said()[-2_000:]}")

    def move_stores(self, core: int | None) -> None:
        """Put the stores among the children on a core."""
        for pid in self._pids(stores=True):
            if core is not None:
                os.sched_setaffinity(pid, {core})

    def cpu_s(self, stores: bool = False) -> float:
        """User and system time so far, of the stores or of all others."""
        return sum(sum(map(int, _stat(pid)[11:13])) for pid in self._pids(stores)) / _TICKS

    def memory_mib(self) -> float:
        """Resident memory, without the stores."""
        return sum(int(_stat(pid)[21]) for pid in self._pids(stores=False)) * _PAGE / 2**20

    def stop(self) -> None:
        """Ask it to end, and make it end after 10 s."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """At once."""
        self._process.kill()
        self._process.wait()

    def _pids(self, stores: bool) -> list[int]:
        parents = {pid: int(stat[1]) for pid in _all_pids() if (stat := _stat(pid))}
        family = [self._process.pid]
        for one in family:
            family += [pid for pid, parent in parents.items() if parent == one]
        return [pid for pid in family if (_name(pid) in _STORES) == stores]


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; zeros for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 50


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def wait_for(what: Running, ready: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Return once `ready` answers true. Raises Failed when the process ends or the time is up."""
    deadline_s = time.perf_counter() + limit_s
    while not ready():
        what.check()
        if time.perf_counter() > deadline_s:
            raise Failed(f"{what.name} was not ready after {limit_s:.0f} s:\n{what.said()[-2_000:]}")
        time.sleep(0.05)
