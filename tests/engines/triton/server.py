"""A real Triton server with stand-in models, as a process of its own: `scripts/triton.sh` installs it.

    python -m tests.engines.triton.server [NAME=VALUE of the stand-in's parameters ...]

starts one and prints where it listens.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp

from tests.engines.triton_models.repository import write

ROOT = Path(__file__).resolve().parents[3]
VENV = Path(os.environ.get("VENV_TRITON", ROOT / ".venv-triton"))
HOME = VENV / "server" / "pytriton" / "tritonserver"
START_S = 120.0
END_S = 10.0
TRIES = 5


def installed() -> bool:
    return (VENV / ".installed").is_file()


class PortTaken(Exception):
    """Somebody else took a port between our looking and the server's binding."""


class TritonServer:
    """One running server. `grpc` and `metrics` are ports on the loopback interface."""

    def __init__(self, folder: Path, models: tuple[str, ...] = ()) -> None:
        """`folder` holds the repository in `models`, and gets the log. `models` are the ones to load, all if empty."""
        self.folder, self._models = folder, models
        self.log = folder / "triton.log"
        self.http = self.grpc = self.metrics = 0
        self._prefix = f"signalbox{secrets.token_hex(4)}_"
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<TritonServer grpc {self.grpc}, metrics {self.metrics}>"

    async def start(self) -> "TritonServer":
        """Returns once every model is ready. Port 0 would bind a free one, but the server never says which."""
        for attempt in range(TRIES):
            self.http, self.grpc, self.metrics = free_ports(3)
            await asyncio.to_thread(self._launch)
            try:
                await self._ready()
            except PortTaken:
                if attempt == TRIES - 1:
                    raise
                await self.aclose()
                continue
            return self
        raise AssertionError("unreachable")

    def kill(self) -> None:
        """As an out-of-memory killer would."""
        assert self._process is not None
        self._process.kill()

    async def aclose(self, gently: bool = True) -> None:
        """It, its models' processes and their shared memory are gone when this returns. Gently takes seconds."""
        process = self._process
        if process is None:
            return
        (process.terminate if gently else process.kill)()
        try:
            await asyncio.to_thread(process.wait, END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait, END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for left in Path("/dev/shm").glob(f"{self._prefix}*"):
            left.unlink(missing_ok=True)
        self._process = None

    async def samples(self, name: str, session: aiohttp.ClientSession) -> dict[str, float]:
        """The samples of one metric by their labels, as text."""
        async with session.get(f"http://127.0.0.1:{self.metrics}/metrics") as answer:
            text = await answer.text()
        found = re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
        return {labels: float(value) for labels, value in found}

    async def reload(self, model: str, session: aiohttp.ClientSession) -> None:
        """Unload and load a model, which makes it a new process."""
        for verb in ("unload", "load"):
            url = f"http://127.0.0.1:{self.http}/v2/repository/models/{model}/{verb}"
            async with session.post(url) as answer:
                assert answer.status == 200, await answer.text()

    def _launch(self) -> None:
        libraries = (VENV / "libdir").read_text().strip()
        command = [str(HOME / "bin" / "tritonserver"), f"--model-repository={self.folder / 'models'}"]
        command += [
            f"--backend-directory={HOME / 'backends'}",
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
        ]
        for kind, port in (("http", self.http), ("grpc", self.grpc), ("metrics", self.metrics)):
            command += [f"--{kind}-address=127.0.0.1", f"--{kind}-port={port}"]
        command += ["--allow-gpu-metrics=false", "--pinned-memory-pool-byte-size=0", "--exit-timeout-secs=2"]
        command += ["--model-control-mode=explicit", *(f"--load-model={one}" for one in self._models or ("*",))]
        # The models' interpreter is the python3 that PATH finds first; it ignores PYTHONPATH.
        environment = {**os.environ, "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}", "LD_LIBRARY_PATH": libraries}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    async def _ready(self) -> None:
        url = f"http://127.0.0.1:{self.http}/v2/health/ready"
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
            while True:
                assert self._process is not None
                if self._process.poll() is not None:
                    text = self.log.read_text(errors="replace")
                    if "in use" in text or "failed to start" in text.lower():
                        raise PortTaken(text[-1000:])
                    raise AssertionError(f"the Triton server did not start:\n{text[-4000:]}")
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(url) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; held all at once, so that they differ."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


async def main(settings: list[str]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="triton-"))
    write(folder / "models", **dict(one.split("=", 1) for one in settings))  # type: ignore[arg-type]
    server = await TritonServer(folder).start()
    print(f"grpc://127.0.0.1:{server.grpc} http://127.0.0.1:{server.metrics}/metrics", flush=True)
    print(f"HTTP {server.http}, log {server.log}", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await server.aclose()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1:]))
