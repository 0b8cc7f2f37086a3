"""The whole gateway with an engine in its process: answers as vLLM's own server gives them, and deaths of both."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import psutil
import pytest

from backends.protocol import PATHS, Kind
from bench import agreement
from tests.engines.asking import CHAT, LONG, MESSAGES, SCHEMA, events, joined, scrub, server_answer, shaped
from tests.engines.conftest import FLAGS, START_S, TOOLS
from tests.engines.test_orphan import alive
from tests.engines.test_parity import BETTER, NAMED, SAME, TOOL
from tests.support.process import Gateway, until

if TYPE_CHECKING:
    from tests.engines.conftest import Server

pytestmark = pytest.mark.engines

CONFIG = """
[[pool]]
model = "tiny"

[[pool.backend]]
kind = "vllm"
name = "in-process"
model = "{model}"

[pool.backend.args]
{args}

[[pool]]
model = "other"

[[pool.backend]]
kind = "simulated"
name = "other"
a0_ms = 5.0
"""
GONE_S = 5.0


@pytest.fixture(scope="module")
def gateway(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    args = "\n".join(f"{name} = {toml(value)}" for name, value in (FLAGS | TOOLS).items())
    (folder / "config.toml").write_text(CONFIG.format(model=tiny, args=args))
    running = Gateway(["--config", str(folder / "config.toml")], folder)
    family: list[psutil.Process] = []
    try:
        ended = running.process.poll
        until(lambda: "Signalbox serves " in running.out or ended() is not None, START_S, lambda: running.log[-3000:])
        assert ended() is None, running.log[-3000:]
        running.url = running.out.split("Signalbox serves ")[1].split()[0]
        until(lambda: running.status("/readyz") == 200, START_S, lambda: running.log[-3000:])
        family = running.descendants()
        yield running
    finally:
        running.process.terminate()
        psutil.wait_procs([running.process], timeout=15)
        for left in [running.process, *family]:
            if left.is_running():
                left.kill()


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)


def ask(gateway: Gateway, kind: Kind, body: dict[str, Any]) -> tuple[int, bytes]:
    """The status and the whole body. Blocks."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(gateway.url + PATHS[kind], data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("case", sorted(SAME.keys() - {"unknown model"}))
async def test_same_answer_through_the_gateway(case: str, gateway: Gateway, server: Server) -> None:
    kind, body = SAME[case]
    status, data = await asyncio.to_thread(ask, gateway, kind, body)
    theirs_status, theirs = await server_answer(server, kind, body)
    assert status == theirs_status
    if body.get("stream") and status == 200:
        assert joined(events(data)) == joined(theirs)
    else:
        assert scrub(json.loads(data)) == theirs


def test_vllms_own_bench_measures_the_same(
    gateway: Gateway, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some hundred requests on a busy machine: what is left between the two is chance, so this is no close look."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["--url", gateway.url, "--model", "tiny", "--tokenizer", str(tiny), "--rate", "3", "--requests", "120"]
    code = agreement.main([*words, "--output", "20", "--goodput", "ttft:30000", "tpot:10000", "--within", "0.35"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert len(said.splitlines()) == 9


@pytest.mark.parametrize("case", BETTER)
def test_better_answer_through_the_gateway(case: str, gateway: Gateway) -> None:
    status, data = ask(gateway, Kind.CHAT, BETTER[case])
    assert status == 400
    assert "error" in json.loads(data)


def test_openai_sdk(gateway: Gateway) -> None:
    client = openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0)
    assert {model.id for model in client.models.list()} == {"tiny", "other"}
    plain: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**plain)
    parts = list(client.chat.completions.create(**plain, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    assert parts[-1].usage is not None
    assert whole.usage.completion_tokens == parts[-1].usage.completion_tokens == 12
    look = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    calls = (
        client.chat.completions.create(
            **plain | {"max_tokens": 300, "temperature": 1, "seed": 1}, tools=[look], tool_choice=NAMED["tool_choice"]
        )
        .choices[0]
        .message.tool_calls
    )
    assert calls is not None
    assert calls[0].function.name == "look"
    assert set(json.loads(calls[0].function.arguments)) == {"n", "ok"}
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.chat.completions.create(**plain | {"messages": [{"role": "user", "content": "word " * 4000}]})
    said = client.responses.create(model="tiny", input="Hello", max_output_tokens=8)
    assert said.usage is not None
    assert said.usage.output_tokens == 8
    client.close()


def test_schemas_hold_through_the_gateway(gateway: Gateway) -> None:
    for seed in range(20):
        body = CHAT | {"max_tokens": 64, "temperature": 1, "seed": seed} | shaped(SCHEMA)
        status, data = ask(gateway, Kind.CHAT, body)
        assert status == 200
        value = json.loads(json.loads(data)["choices"][0]["message"]["content"])
        assert 0 <= value["n"] <= 99
        assert value["ok"] in (True, False)


def test_a_killed_engine_is_told_and_rebuilt(gateway: Gateway) -> None:
    (before,) = [one.pid for one in gateway.descendants() if alive(one.pid) and "EngineCore" in one.cmdline()[0]]
    with ThreadPoolExecutor(24) as pool:
        begun: list[float] = []
        wholes = [pool.submit(timed, gateway, LONG, []) for _ in range(8)]
        others = [pool.submit(timed, gateway, LONG | {"model": "other", "stream": True, "max_tokens": 300}, [])]
        streams = [pool.submit(timed, gateway, LONG | {"stream": True}, begun) for _ in range(8)]
        until(lambda: len(begun) == 8, 20.0, lambda: str([one.result(60)[1:] for one in streams])[:3000])
        killed_at = time.monotonic()
        os.kill(before, signal.SIGKILL)
        ends = [one.result(20) for one in (*wholes, *streams)]
        cut = [end for end in ends if end[0] > killed_at]
        assert len(cut) >= 8  # on a slow machine some were through before
        for ended_at, status, data in cut:
            assert ended_at - killed_at < 1.0
            assert status in (200, 502, 503)
            assert b"error" in data
            assert b"[DONE]" not in data
        assert ask(gateway, Kind.CHAT, CHAT | {"model": "other"})[0] == 200
        _, status, data = others[0].result(30)
        assert status == 200
        assert b"[DONE]" in data
    assert ask(gateway, Kind.CHAT, CHAT)[0] == 503
    until(lambda: ask(gateway, Kind.CHAT, CHAT)[0] == 200, START_S, lambda: gateway.log[-3000:])
    assert not alive(before)


def timed(gateway: Gateway, body: dict[str, Any], begun: list[float]) -> tuple[float, int, bytes]:
    """When an answer ended, its status and its bytes; `begun` hears of its first ones."""
    request = urllib.request.Request(gateway.url + PATHS[Kind.CHAT], json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            data = answer.read(100)
            begun.append(time.monotonic())
            data += answer.read()
            return time.monotonic(), answer.status, data
    except urllib.error.HTTPError as error:
        return time.monotonic(), error.code, error.read()


def test_a_killed_gateway_leaves_no_process(gateway: Gateway) -> None:
    family = [one for one in gateway.descendants() if alive(one.pid)]
    names = " ".join(" ".join(one.cmdline()) for one in family)
    assert "EngineCore" in names
    assert "server" in names
    gateway.process.kill()
    until(
        lambda: not any(alive(one.pid) for one in family),
        GONE_S,
        lambda: str([*filter(alive, (p.pid for p in family))]),
    )
