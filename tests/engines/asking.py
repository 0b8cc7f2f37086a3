"""Asks a backend and vLLM's own server the same, and makes the answers comparable."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from backends.protocol import PATHS, Chunk, Kind, Plan, Prompt, Refused, Stream, Usage

if TYPE_CHECKING:
    from backends.vllm_engine import InProcess
    from tests.engines.conftest import Server

VOLATILE = {"id", "created", "created_at", "completed_at", "item_id", "system_fingerprint", "call_id", "request_id"}
"""Fields that differ between two answers to the same request."""

CLOCK = re.compile(r"\[\d\d:\d\d:\d\d\]")  # in what the grammar library says

MESSAGES = [{"role": "user", "content": "Hello world, what is a list?"}]
CHAT: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24, "messages": MESSAGES}
TEXT: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24, "prompt": "def main():"}
LONG: dict[str, Any] = CHAT | {"max_tokens": 1500, "ignore_eos": True, "temperature": 1}
USAGE = {"include_usage": True}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


def shaped(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def prompt(kind: Kind, body: dict[str, Any], **more: Any) -> Prompt:
    return Prompt(
        kind=kind,
        model=body.get("model", "tiny"),
        body=json.dumps(body).encode(),
        stream=body.get("stream", False),
        **more,
    )


async def start(backend: InProcess, kind: Kind, body: dict[str, Any], **more: Any) -> tuple[Plan, Stream]:
    plan = await backend.plan(prompt(kind, body, **more))
    return plan, await backend.open(plan)


async def read(stream: Stream) -> list[Chunk]:
    chunks = []
    while (chunk := await stream.next()) is not None:
        chunks.append(chunk)
    await stream.aclose()
    return chunks


async def answer(backend: InProcess, kind: Kind, body: dict[str, Any]) -> tuple[int, Any, Plan | None, Usage | None]:
    """Status, comparable body, and for an answer what was planned and what was used."""
    try:
        plan, stream = await start(backend, kind, body)
        chunks = await read(stream)
    except Refused as no:
        assert no.body is not None
        return no.status, scrub(json.loads(no.body)), None, None
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == 1
    assert chunks[-1].usage is usages[0]
    assert sum(chunk.tokens for chunk in chunks) == usages[0].completion_tokens
    data = b"".join(chunk.data for chunk in chunks)
    return 200, events(data) if body.get("stream") else scrub(json.loads(data)), plan, usages[0]


async def server_answer(server: Server, kind: Kind, body: dict[str, Any]) -> tuple[int, Any]:
    path = "/tokenize" if kind is Kind.TOKENIZE else PATHS[kind]
    status, data = await asyncio.to_thread(server.post, path, json.dumps(body).encode())
    return status, events(data) if body.get("stream") and status == 200 else scrub(json.loads(data))


def scrub(value: Any) -> Any:
    """The value with its volatile fields hidden."""
    if isinstance(value, dict):
        return {key: "*" if key in VOLATILE and one is not None else scrub(one) for key, one in value.items()}
    if isinstance(value, list):
        return [scrub(one) for one in value]
    return CLOCK.sub("*", value) if isinstance(value, str) else value


def events(data: bytes) -> list[Any]:
    """The data of server-sent events, scrubbed; `event:` lines and `[DONE]` as text."""
    found: list[Any] = []
    for line in data.decode().splitlines():
        if line.startswith("event: "):
            found.append(line)
        elif line.startswith("data: "):
            found.append(line[6:] if line == "data: [DONE]" else scrub(json.loads(line[6:])))
    return found


class Joined(Struct):
    """A stream without the borders between its deltas, which depend on who was faster.

    `text` is joined by choice and field; `values` are all other values that a field had, in order of their first
    appearance; `rest` are the events that are no deltas, as they are.
    """

    text: dict[str, Any]
    values: dict[str, list[Any]]
    rest: list[Any]


GROWING = ("content", "text", "arguments", "delta", "partial_json")


def joined(found: list[Any]) -> Joined:
    whole = Joined({}, {}, [])
    for one in found:
        if not isinstance(one, dict) or not (one.get("choices") or "delta" in one):
            if not str(one).startswith("event: ") or "delta" not in str(one):
                whole.rest.append(
                    {k: v for k, v in one.items() if k != "sequence_number"} if isinstance(one, dict) else one
                )
            continue
        choice = str(one["choices"][0]["index"]) if "choices" in one else str(one["type"])
        for path, leaf in _leaves(one):
            name = path.rpartition(".")[2]
            if name in GROWING and isinstance(leaf, str):
                whole.text[f"{choice} {path}"] = whole.text.get(f"{choice} {path}", "") + leaf
            elif path.endswith("logprobs.content") and isinstance(leaf, list):
                whole.text[f"{choice} {path}"] = whole.text.get(f"{choice} {path}", []) + leaf
            elif name != "sequence_number":
                values = whole.values.setdefault(path, [])
                values += [] if leaf in values else [leaf]
    return whole


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every path with its value; lists of objects are looked into, others and log-probabilities are values."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _leaves(one, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict) and not path.endswith("logprobs.content"):
        for one in value:
            yield from _leaves(one, f"{path}[]")
    else:
        yield path, value
