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

from bench.processes import Cores, Running, free_port, wait_for

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


@contextmanager
def started(cores: Cores, gateway: str, smg: str) -> Iterator[list[Target]]:
    """The upstream first, then all that stand before it. Everything ends with the context."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="signalbox-bench-")))

        def start(name: str, argv: list[str], core: int | None) -> Running:
            running = Running(name, argv, core, folder / f"{name}.log")
            stack.callback(running.stop)
            return running

        port = free_port()
        upstream = f"http://127.0.0.1:{port}"
        mock = start("upstream", [sys.executable, "-m", "bench.mock_openai", "--port", str(port)], cores.others)
        targets = [Target("direct", mock, upstream)]
        wait_for(mock, partial(_answers, targets[0]))
        config = folder / "config.toml"
        config.write_text(CONFIG.format(digest=hashlib.sha256(KEY.encode()).hexdigest(), upstream=upstream))
        for name, command in (("signalbox", gateway), ("relay", RELAY), *((("smg", SMG),) if smg else ())):
            port, binaries = free_port(), Path(sys.executable).parent
            argv = [
                part.format(
                    bin=binaries, python=sys.executable, smg=smg, config=config, port=port, spare=free_port(),
                    upstream=upstream, key=KEY,
                )
                for part in shlex.split(command)
            ]  # fmt: skip
            key = "" if name == "relay" else KEY
            target = Target(name, start(name, argv, cores.target), f"http://127.0.0.1:{port}", key)
            wait_for(target.running, partial(_answers, target))
            target.running.move_stores(cores.others)
            targets.append(target)
        yield targets


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
