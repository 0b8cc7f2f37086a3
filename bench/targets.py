"""The gateway and what it is compared with, started side by side before one mock upstream."""

import hashlib
import shlex
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.processes import Cores, Failed, Running, free_port, wait_for

KEY = "sk-bench-overhead"
GATEWAY = "{bin}/signalbox serve --config {config} --port {port}"
RELAY = "{python} -m bench.baseline_relay --port {port} --upstream {upstream}"
SMG = (
    "{smg} launch --host 127.0.0.1 --port {port} --prometheus-port {spare} --worker-urls {upstream}"
    " --policy round_robin --api-key {key} --log-level warn"
)
CONFIG = """
[store]
url = "embedded"

[telemetry]
access_log = "off"  # as in the others
{telemetry}

[[tenant]]
name = "bench"
keys = ["sha256:{digest}"]

[[pool]]
model = "mock"

[[pool.backend]]
kind = "openai"
name = "mock"
url = "{upstream}"
limits = {{ max_running = 1024, prefill_tokens_per_s = 10_000_000, kv_tokens = 100_000_000, chunk_tokens = 1_000_000 }}
"""


class Target(Struct):
    """Something that answers chat completions. The upstream itself is one too, for what a direct call takes."""

    name: str
    running: Running
    url: str
    key: str = ""


class Grid:
    """Starts targets one after the other, the upstream first. What it has started ends with `stack`."""

    def __init__(self, stack: ExitStack, cores: Cores) -> None:
        self._stack, self._cores = stack, cores
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="signalbox-bench-")))
        port = free_port()
        self._upstream = f"http://127.0.0.1:{port}"
        mock = self.start("upstream", [sys.executable, "-m", "bench.mock_openai", "--port", str(port)], cores.others)
        self.direct = Target("direct", mock, self._upstream)
        wait_for(mock, partial(_answers, self.direct))

    def start(self, name: str, argv: list[str], core: int | None) -> Running:
        running = Running(name, argv, core, self._folder / f"{name}.log")
        self._stack.callback(running.stop)
        return running

    def sink(self) -> str:
        """The URL of a trace collector."""
        port = free_port()
        sink = self.start("sink", [sys.executable, "-m", "bench.mock_otlp", "--port", str(port)], self._cores.others)
        url = f"http://127.0.0.1:{port}"
        wait_for(sink, lambda: _taken_bytes(url) >= 0)
        return url

    def target(self, name: str, command: str, key: str = KEY, telemetry: str = "", smg: str = "") -> Target:
        """A gateway or what it is compared with, ready to answer. `telemetry` are further lines of that section."""
        config = self._folder / f"{name}.toml"
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        config.write_text(CONFIG.format(digest=digest, upstream=self._upstream, telemetry=telemetry))
        port, binaries = free_port(), Path(sys.executable).parent
        argv = [
            part.format(
                bin=binaries, python=sys.executable, smg=smg, config=config, port=port, spare=free_port(),
                upstream=self._upstream, key=KEY,
            )
            for part in shlex.split(command)
        ]  # fmt: skip
        target = Target(name, self.start(name, argv, self._cores.target), f"http://127.0.0.1:{port}", key)
        wait_for(target.running, partial(_answers, target))
        target.running.move_stores(self._cores.others)
        return target


@contextmanager
def started(cores: Cores, gateway: str, smg: str) -> Iterator[list[Target]]:
    """The gateway, and what it is compared with. Everything ends with the context."""
    with ExitStack() as stack:
        grid = Grid(stack, cores)
        targets = [grid.direct, grid.target("signalbox", gateway), grid.target("relay", RELAY, key="")]
        if smg:
            targets.append(grid.target("smg", SMG, smg=smg))
        yield targets


TRACED = {"untraced": 0.0, "at_1": 0.01, "at_100": 1.0}
"""Names of gateways, and the share of requests they trace; none at 0."""


@contextmanager
def traced(cores: Cores, gateway: str) -> Iterator[list[Target]]:
    """The same gateway without traces and with more and more of them, and a collector that takes them.

    Raises Failed when none came.
    """
    with ExitStack() as stack:
        grid = Grid(stack, cores)
        sink = grid.sink()
        yield [
            grid.target(name, gateway, telemetry=f'otlp_url = "{sink}"\ntrace_ratio = {ratio}' if ratio else "")
            for name, ratio in TRACED.items()
        ]
        if _taken_bytes(sink) <= 0:
            raise Failed(f"the collector at {sink} got no traces")


def _taken_bytes(sink: str) -> int:
    """What a collector has got; -1 if it does not answer."""
    try:
        with urllib.request.urlopen(sink, timeout=5) as answer:
            return int(answer.read())
    except OSError:
        return -1


def _answers(target: Target) -> bool:
    """Whether it answers a chat completion."""
    body = msgspec.json.encode({"model": "mock", "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1})
    headers = {"content-type": "application/json", "authorization": f"Bearer {target.key or 'none'}"}
    try:
        asked = urllib.request.Request(f"{target.url}/v1/chat/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
