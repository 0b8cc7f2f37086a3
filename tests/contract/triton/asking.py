"""Short ways to a backend on a fake server and to its answers."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
from tritonclient.grpc import service_pb2 as pb

from backends.protocol import Kind, Prompt
from backends.triton import Triton
from tests.contract.bench import Answer, to_end
from tests.contract.triton.fake import FakeTriton, reply

Message = pb.ModelStreamInferResponse


@asynccontextmanager
async def connected(fake: FakeTriton, words: Path | None, /, **config: Any) -> AsyncIterator[Any]:
    """A backend on a running fake; without metrics and canaries unless asked for."""
    given = {"metrics_url": "off", "canary_s": 0.0, "tokenizer": str(words or ""), **config}
    backend = await Triton(name="triton", url=fake.url, **given).connect("demo")
    try:
        yield backend
    finally:
        await backend.aclose()


def prompt(text: str = "Hello", *, kind: Kind = Kind.CHAT, stream: bool = True, **fields: Any) -> Prompt:
    said = {"messages": [{"role": "user", "content": text}]} if kind is Kind.CHAT else {"prompt": text}
    body = {"model": "demo", "temperature": 0, "max_tokens": 8, "stream": stream, **said, **fields}
    body = {name: value for name, value in body.items() if value is not ...}
    return Prompt(kind=kind, model="demo", body=msgspec.json.encode(body), stream=stream)


async def ask(backend: Any, asked: Prompt) -> Answer:
    """From its plan to its end."""
    plan = await backend.plan(asked)
    stream = await backend.open(plan)
    try:
        return Answer(plan, await to_end(stream), asked.stream)
    finally:
        await stream.aclose()


def saying(*messages: Callable[[pb.ModelInferRequest], Message] | Message) -> Any:
    """A behaviour: these messages, each made for the request where it is a function."""

    async def behave(request: pb.ModelInferRequest, _: grpc.aio.ServicerContext) -> AsyncIterator[Message]:
        for message in messages:
            yield message(request) if callable(message) else message

    return behave


def ids(*tokens: int, final: bool = False, **more: tuple[str, list[Any]]) -> Callable[[pb.ModelInferRequest], Message]:
    """A response with new token ids."""
    outputs: dict[str, tuple[str, list[Any]]] = {
        "output_ids": ("INT32", list(tokens)),
        "sequence_length": ("INT32", [len(tokens)]),
        **more,
    }
    return lambda request: reply(request, outputs, final=final)


def text(
    said: str | bytes, final: bool = False, **more: tuple[str, list[Any]]
) -> Callable[[pb.ModelInferRequest], Message]:
    """A response with text."""
    outputs: dict[str, tuple[str, list[Any]]] = {"text_output": ("BYTES", [said]), **more}
    return lambda request: reply(request, outputs, final=final)
