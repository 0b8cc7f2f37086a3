"""Signalbox with vLLM in its process, and vLLM's own HTTP server, with the same flags: started, waited for, ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.processes import free_port

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / ".models" / "tiny"
START_S = 1200.0  # a busy machine may need minutes
ASK = json.dumps(
    {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}], "stream": False}
).encode()
CONFIG = """
[[pool]]
model = "tiny"

[[pool.backend]]
kind = "vllm"
name = "vllm"
model = {model}
limits = {{ {limits} }}

[pool.backend.args]
{args}
"""

Flags = Mapping[str, str | int | bool]
"""Of `vllm serve`, without their dashes."""


class Server(Struct, frozen=True):
    """A server under test, answering."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def signalbox(folder: Path, model: Path, flags: Flags, limits: Mapping[str, int]) -> tuple[list[str], int]:
    """The command and the port."""
    text = CONFIG.format(
        model=_toml(str(model)),
        limits=", ".join(f"{name} = {value}" for name, value in limits.items()),
        args="\n".join(f"{name} = {_toml(value)}" for name, value in flags.items()),
    )
    config = folder / "config.toml"
    config.write_text(text)
    port = free_port()
    return [sys.executable, "-m", "gateway", "serve", "--config", str(config), "--port", str(port)], port


def vllm_server(model: Path, flags: Flags) -> tuple[list[str], int]:
    """The same."""
    port = free_port()
    given = [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *given]
    return [*command, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)], port


@contextlib.contextmanager
def running(flags: Flags, limits: Mapping[str, int], model: Path = TINY) -> Iterator[list[Server]]:
    """Both servers, Signalbox first, answering. They and their engines are gone afterwards.

    They run on the cores that this process may use now. The tiny model is made where `model` is it and missing.
    """
    if model == TINY and not TINY.is_dir():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "make_tiny.py"), str(TINY)], check=True)
    with tempfile.TemporaryDirectory(prefix="signalbox-bench-") as name:
        folder, servers = Path(name), list[Server]()
        try:
            for label, (command, port) in (
                ("signalbox", signalbox(folder, model, flags, limits)),
                ("vllm", vllm_server(model, flags)),
            ):
                servers.append(_started(label, command, port, folder))
                print(f"starting {label} ...", flush=True)
                _wait(servers[-1])
            yield servers
        finally:
            for server in servers:
                server.process.terminate()
            for server in servers:
                _end(server)


def _toml(value: str | int | bool) -> str:
    return msgspec.json.encode(value).decode()


def _started(name: str, command: list[str], port: int, folder: Path) -> Server:
    log = folder / f"{name}.log"
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, "PYTHONPATH": path}
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True)
    return Server(name, process, port, log)


def _wait(server: Server) -> None:
    deadline_s = time.perf_counter() + START_S
    while time.perf_counter() < deadline_s:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            ask = urllib.request.Request(f"{server.url}/v1/chat/completions", ASK)
            ask.add_header("content-type", "application/json")
            with urllib.request.urlopen(ask, timeout=60) as answer:
                answer.read()
            return
        time.sleep(0.2)
    raise SystemExit(f"{server.name} did not come up:\n{server.log.read_text(errors='replace')[-3_000:]}")


def _end(server: Server) -> None:
    try:
        server.process.wait(20)
    except subprocess.TimeoutExpired:
        print(f"{server.name} had to be killed")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
