"""Requests to the remote backend, from their plan to their end."""

import json
from typing import Any

from backends.openai import RemoteEngine
from backends.protocol import (
    Chunk,
    Kind,
    Prompt,
    Stream,
)
from tests.contract.bench import to_end


def prompt(stream: bool = True, usage: bool = False, **more: Any) -> Prompt:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 5}
    body |= {"stream": True} if stream else {}
    body |= {"stream_options": {"include_usage": True}} if usage else {}
    return Prompt(
        **{
            "kind": Kind.CHAT,
            "model": "m",
            "body": json.dumps(body).encode(),
            "stream": stream,
            "want_usage": usage,
            "has_stream_options": usage,
            "max_tokens": 5,
            **more,
        }
    )


async def start(engine: RemoteEngine, **fields: Any) -> Stream:
    return await engine.open(await engine.plan(prompt(**fields)))


async def ask(engine: RemoteEngine, **fields: Any) -> list[Chunk]:
    stream = await start(engine, **fields)
    try:
        return await to_end(stream)
    finally:
        await stream.aclose()
