"""One pool with a vLLM, a Triton and a simulated engine that serve the same model name."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.conftest import FLAGS, START_S, TINY, TOOLS
from tests.engines.triton.asking import INFLIGHT, scripted
from tests.engines.triton.server import TritonServer
from tests.engines.triton_models.repository import write
from tests.support.process import ROOT, Gateway, until

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
    pytest.mark.timeout(START_S * 2),
]

CONFIG = """
[[pool]]
model = "demo"
[[pool.backend]]
kind = "vllm"
name = "vllm"
model = "{tiny}"
limits = {{ max_running = 4 }}
[pool.backend.args]
{args}
[[pool.backend]]
kind = "triton"
name = "triton"
url = "grpc://127.0.0.1:{grpc}"
metrics_url = "http://127.0.0.1:{metrics}/metrics"
tokenizer = "{tokenizer}"
first_token_s = 2.0
limits = {{ max_running = 4 }}
[[pool.backend]]
kind = "simulated"
name = "simulated"
a0_ms = 5.0
output_mean_tokens = 8
limits = {{ max_running = 4 }}
"""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "maxProperties": 0}}}
CLIENTS = 24


class Mixed:
    """A gateway process with the three engines."""

    def __init__(self, gateway: Gateway, server: TritonServer) -> None:
        self.gateway, self.server = gateway, server

    def all_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.gateway.url}/readyz", timeout=10) as answer:
                pools = json.load(answer)["pools"]
        except OSError:  # 503, or too busy with loading vLLM to answer
            return False
        return set(pools["demo"].values()) == {"up"}

    def ask(self, text: str = "Hello world", **fields: Any) -> tuple[int, str]:
        """The status and which engine answered; the error where none did."""
        said = [{"role": "user", "content": text}]
        body = {"model": "demo", "messages": said, "max_tokens": 6, "temperature": 0, **fields}
        try:
            answer = self.gateway.ask("/v1/chat/completions", body)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        return 200, engine_of(answer)

    def many(self, count: int, text: str = "Hello world") -> Counter[tuple[int, str]]:
        """What so many clients at once got."""
        with ThreadPoolExecutor(count) as clients:
            return Counter(clients.map(lambda n: self.ask(f"{n} {text}"), range(count)))


def engine_of(answer: dict[str, Any]) -> str:
    said = answer.get("system_fingerprint") or ""
    return next((name for name in ("simulated", "tensorrt-llm") if said.startswith(name)), "vllm")


@pytest.fixture(scope="module")
def mixed(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    folder = tmp_path_factory.mktemp("mixed")
    if not TINY.is_dir():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "make_tiny.py"), str(TINY)], check=True, timeout=120)
    write(folder / "models")
    server = TritonServer(folder, INFLIGHT)
    asyncio.run(server.start())
    args = "\n".join(f"{name} = {toml(value)}" for name, value in (FLAGS | TOOLS).items())
    config = folder / "config.toml"
    ports = {"grpc": server.grpc, "metrics": server.metrics}
    config.write_text(CONFIG.format(tiny=TINY, args=args, tokenizer=tokenizer, **ports))
    gateway = Gateway(["--config", str(config)], folder)
    family: list[psutil.Process] = []
    try:
        gateway.ready()
        one = Mixed(gateway, server)
        until(one.all_up, START_S, lambda: gateway.log[-3000:])
        family = gateway.descendants()
        yield one
    finally:
        gateway.process.terminate()
        psutil.wait_procs([gateway.process], timeout=15)
        for left in (gateway.process, *family):
            if left.is_running():
                left.kill()
        asyncio.run(server.aclose(gently=False))


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)


def test_all_three_serve(mixed: Mixed) -> None:
    got = mixed.many(CLIENTS)
    assert {status for status, _ in got} == {200}, got
    assert {engine for _, engine in got} == {"vllm", "tensorrt-llm", "simulated"}


@pytest.mark.parametrize(
    ("fields", "engines"),
    [
        ({"tools": [TOOL], "tool_choice": "auto"}, {"vllm"}),
        ({"logprobs": True, "top_logprobs": 2}, {"vllm"}),
        ({"response_format": FORM}, {"vllm", "tensorrt-llm"}),
        ({"n": 2, "temperature": 1}, {"vllm", "simulated"}),
    ],
)
def test_a_feature_goes_where_it_is(fields: dict[str, Any], engines: set[str], mixed: Mixed) -> None:
    with ThreadPoolExecutor(8) as clients:
        got = list(clients.map(lambda _: mixed.ask(**fields), range(8)))
    assert {status for status, _ in got} == {200}, got
    assert {engine for _, engine in got} <= engines


def test_an_api_goes_where_it_is(mixed: Mixed) -> None:
    answer = mixed.gateway.ask("/v1/embeddings", {"model": "demo", "input": "Hello"})
    assert len(answer["data"][0]["embedding"]) == 256  # the simulated engine's


def test_an_engine_that_never_begins_is_left_for_another(mixed: Mixed) -> None:
    """Only the stand-in behind Triton obeys the script: it falls silent before its first token."""
    got = mixed.many(CLIENTS, scripted(stall_after=0))
    assert {status for status, _ in got} == {200}, got
    assert "tensorrt-llm" not in {engine for _, engine in got}
    assert "no first token within 2 s" in mixed.gateway.log


def test_killed_engines_are_left_for_the_others(mixed: Mixed) -> None:
    mixed.server.kill()
    got = mixed.many(CLIENTS)
    assert {status for status, _ in got} == {200}, got
    assert "tensorrt-llm" not in {engine for _, engine in got}
    cores = [process for process in mixed.gateway.descendants() if _is_core(process)]
    assert cores, mixed.gateway.descendants()
    for core in cores:
        os.kill(core.pid, signal.SIGKILL)
    got = mixed.many(CLIENTS)
    assert {status for status, _ in got} == {200}, got
    assert {engine for _, engine in got} <= {"simulated", "vllm"}
    assert (200, "simulated") in got


def _is_core(process: psutil.Process) -> bool:
    return "EngineCore" in " ".join([process.name(), *process.cmdline()])
