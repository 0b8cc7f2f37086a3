"""The access log: a line per request, as an operator finds it on standard error."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.telemetry import logs
from tests.support.process import gateway
from tests.support.site import POOL, Site, running
from tests.support.upstream import Upstream
from tests.support.upstream_frames import Script
from tests.support.wire import chat_body, request, wire

SECRET = "xyzzy-nobody-may-read-this"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ASK = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
TRACED = '[telemetry]\notlp_url = "http://127.0.0.1:9"\n'
REMOTE = '[[pool]]\nmodel = "demo"\n[[pool.backend]]\nkind = "openai"\nname = "one"\nurl = "%s"\n'


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What goes to standard error, with the logging of this process put back afterwards."""
    root = logging.getLogger()
    before, level, uvicorn = list(root.handlers), root.level, logging.getLogger("uvicorn").level
    stream = io.StringIO()
    for handler in before:
        root.removeHandler(handler)
    logs.configure(stream=stream)
    yield stream
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in before:
        root.addHandler(handler)
    root.setLevel(level)
    logging.getLogger("uvicorn").setLevel(uvicorn)
    logging.captureWarnings(capture=False)


def lines(text: str) -> list[dict[str, Any]]:
    """All lines of the access log; every line of the log is JSON."""
    found = [json.loads(line) for line in text.splitlines()]
    return [one for one in found if one["logger"] == "signalbox.access"]


async def until_written(site: Site, log: io.StringIO, number: int) -> list[dict[str, Any]]:
    await site.until(lambda: len(lines(log.getvalue())) == number)
    return lines(log.getvalue())


async def test_a_whole_answer(log: io.StringIO) -> None:
    async with running() as site:
        headers = {"x-request-id": "r-1", "traceparent": TRACE}
        async with site.chat(stream=True, max_tokens=3, min_tokens=3, headers=headers) as answer:
            await answer.read()
        (line,) = await until_written(site, log, 1)
    assert set(line) == {
        "time", "level", "logger", "message", "request_id", "trace_id", "outcome", "status", "tenant", "class", "model",
        "backend", "stream", "prompt_tokens", "completion_tokens", "total_ms", "validate_ms", "admit_ms", "queue_ms",
        "prefill_ms", "decode_ms",
    }  # fmt: skip
    said = {name: line[name] for name in ("level", "message", "request_id", "trace_id", "outcome", "status", "tenant")}
    assert said == {
        "level": "info", "message": "POST /v1/chat/completions", "request_id": "r-1",
        "trace_id": TRACE[3:35], "outcome": "done", "status": 200, "tenant": "default",
    }  # fmt: skip
    assert (line["class"], line["model"], line["backend"], line["completion_tokens"]) == ("standard", "demo", "one", 3)
    phases = sum(line[f"{name}_ms"] for name in ("validate", "admit", "queue", "prefill", "decode"))
    assert abs(phases - line["total_ms"]) < 0.01
    assert line["time"].endswith("+00:00")


async def test_every_way_to_end_has_its_line(log: io.StringIO) -> None:
    async with Upstream("demo", itl_s=0.005) as upstream, running(TRACED + REMOTE % upstream.url) as site:
        async with site.chat(model="other") as answer:
            assert answer.status == 404
        upstream.script = Script(tokens=4, error_at=2)
        async with site.chat(stream=True, max_tokens=4) as answer:
            await answer.read()
        upstream.script = Script()
        async with wire(site) as line:
            await line.send(request(chat_body(stream=True, max_tokens=8_000)))
            await line.head()
            line.leave()
            found = await until_written(site, log, 3)
    unknown, broken, left = found
    assert (unknown["reason"], unknown["status"], unknown["level"], unknown["tenant"]) == (
        "unknown_model", 404, "info", "default",
    )  # fmt: skip
    assert "model" not in unknown
    assert (broken["reason"], broken["outcome"], broken["status"], broken["level"]) == (
        "engine_error", "failed", 200, "warning",
    )  # fmt: skip
    assert (left["reason"], left["outcome"], left["level"]) == ("client_gone", "cancelled", "info")
    assert all(len(one["trace_id"]) == 32 for one in found)


async def test_other_lines_about_a_request_carry_its_ids(log: io.StringIO) -> None:
    async with Upstream("demo") as upstream, running(TRACED + REMOTE % upstream.url) as site:
        upstream.script = Script(status=500)
        async with site.chat(headers={"x-request-id": "r-2", "traceparent": TRACE}) as answer:
            assert answer.status >= 500
        (line,) = await until_written(site, log, 1)
    warned = [one for one in map(json.loads, log.getvalue().splitlines()) if "before its first chunk" in one["message"]]
    assert [(one["request_id"], one["trace_id"]) for one in warned] == [("r-2", TRACE[3:35])]
    assert (line["request_id"], line["trace_id"]) == ("r-2", TRACE[3:35])


async def test_only_what_failed(log: io.StringIO) -> None:
    async with running('[telemetry]\naccess_log = "failed"\n' + POOL) as site:
        async with site.chat(max_tokens=1) as answer:
            await answer.read()
        async with site.chat(model="other") as answer:
            assert answer.status == 404
        (line,) = await until_written(site, log, 1)
    assert line["reason"] == "unknown_model"


async def test_none_at_all(log: io.StringIO) -> None:
    async with running('[telemetry]\naccess_log = "off"\n' + POOL) as site, site.chat(max_tokens=1) as answer:
        await answer.read()
    assert not lines(log.getvalue())


async def test_prompts_are_written_only_where_that_is_switched_on(log: io.StringIO) -> None:
    async with running() as site:
        await _ask_everything(site)
        await until_written(site, log, 5)
    assert SECRET not in log.getvalue()
    async with running("[telemetry]\nlog_prompts = true\n" + POOL) as site:
        await _ask_everything(site)
        found = (await until_written(site, log, 10))[5:]
    bodies = [one.get("body") for one in found]
    assert [isinstance(body, dict) and body["messages"][0]["content"] for body in bodies[:2]] == [SECRET, SECRET]
    assert isinstance(bodies[2], str)
    assert len(bodies[2]) == 64 * 1024
    assert bodies[3:] == [None, None]


async def _ask_everything(site: Site) -> None:
    """Whole, streamed, too long to be written whole, for an unknown model, and no JSON."""
    for fields in ({}, {"stream": True}, {"user": "u" * 100_000}, {"model": "other"}):
        async with site.chat(SECRET, max_tokens=1, **fields) as answer:
            await answer.read()
    headers = {"content-type": "application/json"}
    async with site.client.post(f"{site.url}/v1/chat/completions", data=SECRET, headers=headers) as answer:
        assert answer.status == 400


def test_a_gateway_writes_its_lines_before_it_ends(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(POOL)
    with gateway(tmp_path, "--config", str(config)) as one:
        for _ in range(3):
            one.ask("/v1/chat/completions", ASK)
        assert one.stop() == 0
    assert [line["status"] for line in lines(one.log)] == [200] * 3
