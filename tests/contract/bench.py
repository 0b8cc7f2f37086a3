"""What the contract suite needs to know of a backend, and the small steps that its cases are made of."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backends.protocol import Backend, Chunk, Kind, Plan, Prompt, Refused, Stream, Usage


@dataclass(kw_only=True)
class Bench:
    """One connected backend under test.

    `busy` is how many requests its engine holds, asked of the engine itself. `can` names what the cases may rely on:
    `kill` (the engine may be killed), `stop` (it obeys stop strings), `exact` (planned prompt tokens are those of the
    usage), `choices` (n > 1), `checks` (it refuses wrong values), `repeats` (the same request gives the same text),
    `busy-gauge` (its gauge counts requests). `idle_s` is how soon an engine must be free of a cancelled request.
    """

    backend: Backend
    model: str
    busy: Callable[[], Awaitable[int]]
    kill: Callable[[], Awaitable[None]]
    can: frozenset[str]
    unsupported: dict[str, Any] = field(default_factory=dict)
    idle_s: float = 0.1
    long_tokens: int = 200

    def prompt(self, *, kind: Kind = Kind.CHAT, stream: bool = True, usage: bool = False, **fields: Any) -> Prompt:
        """A request with the given body fields; `text` is what it says."""
        text = fields.pop("text", "Tell me of the signal box by the river.")
        body: dict[str, Any] = {"model": self.model, "temperature": 0, "max_tokens": 8, "stream": stream, **fields}
        if kind is Kind.CHAT:
            body.setdefault("messages", [{"role": "user", "content": text}])
        else:
            body.setdefault("prompt", text)
        if usage:
            body["stream_options"] = {"include_usage": True}
        limit = body["max_tokens"]
        return Prompt(
            kind=kind,
            model=self.model,
            body=msgspec.json.encode(body),
            stream=stream,
            want_usage=usage,
            has_stream_options=usage,
            max_tokens=limit if isinstance(limit, int) and limit > 0 else 0,
        )

    async def open(self, **fields: Any) -> Stream:
        return await self.backend.open(await self.backend.plan(self.prompt(**fields)))

    async def answer(self, **fields: Any) -> "Answer":
        """A request from its plan to its end."""
        plan = await self.backend.plan(self.prompt(**fields))
        stream = await self.backend.open(plan)
        try:
            return Answer(plan, await to_end(stream), fields.get("stream", True))
        finally:
            await stream.aclose()

    async def refusal(self, **fields: Any) -> Refused:
        """The Refused that a request meets, wherever the backend first sees the fault."""
        try:
            answer = await self.answer(**fields)
        except Refused as refused:
            return refused
        raise AssertionError(f"not refused: {fields}, answered {answer.data!r}")

    async def idle(self) -> None:
        """Fails unless the engine is free of all requests within `idle_s`."""
        await until(self._is_idle, self.idle_s)

    async def _is_idle(self) -> bool:
        return await self.busy() == 0


class Answer:
    """A whole answer, taken apart."""

    def __init__(self, plan: Plan, chunks: list[Chunk], streamed: bool) -> None:
        self.plan, self.chunks = plan, chunks
        self.data = b"".join(chunk.data for chunk in chunks)
        self.tokens = sum(chunk.tokens for chunk in chunks)
        usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
        assert len(usages) == 1, f"usage came {len(usages)} times"
        self.usage: Usage = usages[0]
        self.events = events(self.data) if streamed else []
        self.frames = (
            [event for event in self.events if event != "[DONE]"] if streamed else [msgspec.json.decode(self.data)]
        )

    def text(self, index: int = 0) -> str:
        return "".join(_text(choice) for choice in self._choices(index))

    def finish_reasons(self, index: int = 0) -> list[str]:
        return [reason for choice in self._choices(index) if (reason := choice.get("finish_reason"))]

    def _choices(self, index: int) -> list[dict[str, Any]]:
        return [choice for frame in self.frames for choice in frame["choices"] if choice["index"] == index]


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    said = choice.get("delta") or choice.get("message") or {}
    return said.get("content") or ""


def events(data: bytes) -> list[Any]:
    """The events of an SSE text, decoded; fails on anything that is not whole `data:` events."""
    assert data.endswith(b"\n\n"), f"ends inside an event: {data[-80:]!r}"
    found = []
    for event in data[:-2].split(b"\n\n"):
        assert event.startswith(b"data: "), event
        payload = event.removeprefix(b"data: ")
        found.append("[DONE]" if payload == b"[DONE]" else msgspec.json.decode(payload))
    return found


async def to_end(stream: Stream) -> list[Chunk]:
    """All chunks from here on; fails when one follows a chunk that said it was the last."""
    chunks: list[Chunk] = []
    while (chunk := await stream.next()) is not None:
        assert not (chunks and chunks[-1].last), f"after the last chunk came {chunk!r}"
        chunks.append(chunk)
    return chunks


async def until(holds: Callable[[], Awaitable[bool]], limit_s: float) -> None:
    """Return once `holds` does; fail after `limit_s` of the loop's time."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + limit_s
    while not await holds():
        assert loop.time() < deadline_s, f"not within {limit_s} s"
        await asyncio.sleep(0.002)
