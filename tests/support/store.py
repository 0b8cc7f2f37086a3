"""Private store servers for tests: every kind that is at hand, each on a unix socket of its own.

`SIGNALBOX_TEST_STORES` adds servers, separated by colons, to those on PATH and the packaged one.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from gateway.queue import embedded


def binaries() -> dict[str, str | None]:
    """Server binaries by kind; None where there is none."""
    found: dict[str, str | None] = {"valkey": shutil.which("valkey-server") or embedded._packaged(), "redis": None}
    extra = os.environ.get("SIGNALBOX_TEST_STORES", "").split(":")
    for path in [*extra, shutil.which("redis-server"), "/usr/bin/redis-server"]:
        if path and Path(path).exists():
            text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            found["redis" if text.startswith("Redis") else "valkey"] = path
    return found


class StoreServer:
    """One server process. Called with a command's words it answers like redis-cli; killed and started at will."""

    def __init__(self, binary: str, *settings: str) -> None:
        self.binary = binary
        self.settings = settings
        self.home = Path(tempfile.mkdtemp(prefix="store-test-"))
        self.socket = self.home / "s"
        self.url = f"unix://{self.socket}"
        self.process: subprocess.Popen[bytes] | None = None
        self._client: redis.Redis | None = None
        self.start()

    def __call__(self, *words: Any) -> Any:
        if self._client is None:
            self._client = redis.Redis(unix_socket_path=str(self.socket), single_connection_client=True, protocol=2)
        return self._client.execute_command(*words)

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [
                self.binary, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.home), "--save", "",
                "--enable-debug-command", "yes", "--loglevel", "warning", *self.settings,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for _ in range(1000):
            with contextlib.suppress(redis.ConnectionError, redis.BusyLoadingError):
                if self("PING"):
                    return
            self.disconnect()
            time.sleep(0.01)
        raise RuntimeError(f"{self.binary} did not start")

    def disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def kill(self) -> None:
        """As kill -9 does."""
        self.disconnect()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def scores(self, key: bytes) -> list[tuple[bytes, float]]:
        """A sorted set, in order."""
        assert self._client is not None
        return list(self._client.zrange(key, 0, -1, withscores=True))

    def keys(self) -> list[str]:
        return sorted(key.decode() for key in self("KEYS", "*"))

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)


@pytest.fixture(scope="session", params=["valkey", "redis"])
def shared_server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    """One server per kind for the whole run."""
    binary = binaries()[request.param]
    if binary is None:
        pytest.skip(f"no {request.param}-server here: not on PATH, not packaged, not in SIGNALBOX_TEST_STORES")
    server = StoreServer(binary)
    yield server
    server.close()


@pytest.fixture
def server(shared_server: StoreServer) -> StoreServer:
    """The shared server, empty."""
    shared_server("FLUSHALL")
    return shared_server


@pytest.fixture
def own_server(shared_server: StoreServer) -> Iterator[StoreServer]:
    """A server of the test's own, to be killed and restarted."""
    server = StoreServer(shared_server.binary)
    yield server
    server.close()
