"""Short ways to a simulated engine and to requests for it."""

from typing import Any

import msgspec
import pytest

from backends.protocol import Chunk, Kind, Prompt, Refused
from backends.simulated import Simulated, SimulatedBackend
from tests.contract.bench import Answer, to_end
from tests.support import virtual


def backend(**config: Any) -> SimulatedBackend:
    return SimulatedBackend(Simulated(name="sim", **config), "m")


def ask(kind: Kind = Kind.CHAT, *, stream: bool = True, usage: bool = False, **fields: Any) -> Prompt:
    said = {Kind.CHAT: "messages", Kind.COMPLETION: "prompt", Kind.EMBEDDINGS: "input", Kind.TOKENIZE: "prompt"}[kind]
    body: dict[str, Any] = {
        "model": "m",
        said: "Hello" if said != "messages" else [{"role": "user", "content": "Hello"}],
    }
    body |= {"stream": stream, **({"stream_options": {"include_usage": True}} if usage else {}), **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    return Prompt(kind=kind, model="m", body=msgspec.json.encode(body), stream=stream, want_usage=usage)


async def answer(engine: SimulatedBackend, prompt: Prompt) -> Answer:
    plan = await engine.plan(prompt)
    stream = await engine.open(plan)
    return Answer(plan, await to_end(stream), prompt.stream)


async def body(engine: SimulatedBackend, prompt: Prompt) -> Any:
    return msgspec.json.decode((await only(engine, prompt)).data)


async def only(engine: SimulatedBackend, prompt: Prompt) -> Chunk:
    chunks = await to_end(await engine.open(await engine.plan(prompt)))
    assert len(chunks) == 1
    return chunks[0]


def refusal(prompt: Prompt, **config: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        virtual.run(backend(**config).plan(prompt))
    assert caught.value.status == 400
    return caught.value
