"""A gateway in a process of its own, as an operator starts it."""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent.parent
START_S = 20.0


class Gateway:
    """One `signalbox serve` on a free port. `url` is there once it is ready; `log` is everything it wrote so far."""

    def __init__(
        self,
        arguments: list[str],
        directory: Path,
        environ: dict[str, str] | None = None,
        ca_file: Path | None = None,
    ) -> None:
        self._tls = ssl.create_default_context(cafile=ca_file)
        self._out = directory / "out"
        self._err = directory / "err"
        command = [sys.executable, "-m", "gateway", "serve", "--port", "0", *arguments]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = psutil.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=os.environ | (environ or {}),
                start_new_session=True,
            )
        self.url = ""

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def log(self) -> str:
        return self._err.read_text()

    def ready(self) -> "Gateway":
        """Wait until it has said its address and every pool is up."""
        until(lambda: "Signalbox serves " in self.out or self.process.poll() is not None, START_S, self._story)
        found = re.search(r"Signalbox serves (\S+)", self.out)
        assert found, self._story()
        self.url = found[1]
        until(lambda: self.status("/readyz") == 200, START_S, self._story)
        return self

    def descendants(self) -> list[psutil.Process]:
        return list(self.process.children(recursive=True))

    def status(self, path: str) -> int:
        """The status of a GET; 0 where there is no answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5, context=self._tls) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def post(self, path: str, body: dict[str, Any], key: str = "") -> Any:
        """The answer to a POST, still to be read. Raises urllib.error.HTTPError."""
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=20, context=self._tls)

    def ask(self, path: str, body: dict[str, Any], key: str = "") -> dict[str, Any]:
        """The JSON answer to a POST. Raises urllib.error.HTTPError."""
        with self.post(path, body, key) as answer:
            read: dict[str, Any] = json.load(answer)
            return read

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait; the exit code."""
        self.process.send_signal(signum)
        return int(self.process.wait(START_S))

    def _story(self) -> str:
        return f"exit code {self.process.poll()}\n{self.out}\n{self.log}"


@contextmanager
def gateway(
    directory: Path, *arguments: str, environ: dict[str, str] | None = None, ca_file: Path | None = None
) -> Iterator[Gateway]:
    """A ready gateway; whatever is left of it afterwards is killed."""
    directory.mkdir(exist_ok=True)
    one = Gateway(list(arguments), directory, environ, ca_file)
    family: list[psutil.Process] = []
    try:
        one.ready()
        family = one.descendants()
        yield one
    finally:
        family += one.descendants() if one.process.is_running() else []
        for process in (one.process, *family):
            if process.is_running():
                process.kill()
        psutil.wait_procs([one.process, *family], timeout=START_S)


def until(condition: Callable[[], bool], limit_s: float, story: Callable[[], str] = str) -> None:
    """Wait for a condition that another process brings about. Fails with the story when it does not come."""
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends, f"not within {limit_s} s\n{story()}"
        time.sleep(0.02)
