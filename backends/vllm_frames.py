"""Our own frames for a plain text stream, cut from vLLM's: the same bytes without a pydantic object per token.

At start vLLM's own generators are run once over made-up outputs, and their events are cut at the marks. So the frames
are whatever this version of vLLM writes. What does not look as expected goes through vLLM's generators for ever.
"""

import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

from backends.protocol import Kind, Prompt, Refused
from backends.vllm_desk import Desk
from backends.vllm_seam import Call

log = logging.getLogger(__name__)

MARK = "signalbox-mark-"
SLOT = re.compile(
    rb'(?<="created":)\d+|"(?:chatcmpl-|cmpl-)signalbox-mark-id"|"signalbox-mark-(?:text|reason|stop)"'
    rb'|(?<="usage":)\{[^{}]*\}'
)
NUMBERS = {"prompt_tokens", "total_tokens", "completion_tokens"}
DONE = b"data: [DONE]\n\n"

PLAIN = frozenset({
    "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens",
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "ignore_eos", "n",
    "response_format", "structured_outputs", "skip_special_tokens", "spaces_between_special_tokens",
    "add_special_tokens", "add_generation_prompt", "truncate_prompt_tokens", "chat_template_kwargs", "user", "metadata",
    "service_tier", "store", "priority", "request_id", "session_id", "cache_salt", "tool_choice",
    "parallel_tool_calls", "include_reasoning", "reasoning_effort", "safety_identifier", "prompt_cache_key",
})  # fmt: skip
"""Request fields that change the prompt or the sampling, never the form of the stream. `tool_choice` without tools."""

encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


Parts = tuple[bytes | str, ...]
"""An event, cut: bytes as they are, and the names of what belongs between them."""


class Shape(Struct, frozen=True):
    """The events of one API's stream. `role` is empty where it opens with text, `usage` where nobody asked for it."""

    role: Parts
    text: Parts
    finish: Parts
    usage: Parts


class Frames:
    """The frames of one running stream."""

    __slots__ = ("_finish", "_head", "_tail", "_usage", "role")

    def __init__(self, shape: Shape, request_id: str, created_s: int) -> None:
        known = {"id": encode(request_id), "created": b"%d" % created_s}
        self.role = b"".join(_fill(shape.role, known))
        self._head, _, self._tail = _fill(shape.text, known)
        self._finish = _fill(shape.finish, known)
        self._usage = _fill(shape.usage, known)

    def text(self, text: str) -> bytes:
        frame: bytes = self._head + encode(text) + self._tail
        return frame

    def finish(self, text: str, reason: str, stop: int | str | None) -> bytes:
        values = {"text": encode(text), "reason": encode(reason), "stop": encode(stop)}
        return b"".join(_fill(self._finish, values))

    def usage(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The event with the numbers; empty where the client did not ask for it."""
        numbers = b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
            prompt_tokens,
            prompt_tokens + completion_tokens,
            completion_tokens,
        )
        return b"".join(_fill(self._usage, {"usage": numbers}))


class Stationery:
    """The shapes of the plain streams of one engine, by API and whether usage is asked for."""

    def __init__(self, shapes: dict[tuple[Kind, bool], Shape]) -> None:
        self._shapes = shapes

    def shape(self, call: Call) -> Shape | None:
        """How to stream this call without vLLM's generator; None where its form is not plain text."""
        request = call.request
        if len(call.works) != 1 or call.kind not in {Kind.CHAT, Kind.COMPLETION} or not request.stream:
            return None
        params = call.works[0].params
        if params.n != 1 or params.output_kind != RequestOutputKind.DELTA or params.logprobs is not None:
            return None
        if not _plain(request) or call.works[0].options.get("lora_request") is not None:
            return None
        return self._shapes.get((call.kind, bool(request.stream_options and request.stream_options.include_usage)))


async def learn(desk: Desk, model: str) -> Stationery:
    """The shapes as this vLLM writes them. A form that cannot be cut is left out, with a line in the log."""
    shapes: dict[tuple[Kind, bool], Shape] = {}
    for kind in (Kind.CHAT, Kind.COMPLETION):
        serving = desk.serving(kind)
        if serving is None or not _bare(serving):
            continue
        for usage in (False, True):
            try:
                shapes[kind, usage] = await _shape(desk, model, kind, usage)
            except (Refused, ValueError) as exc:
                log.warning("plain %s streams of %s take vLLM's slower way: %s", kind.value, model, exc)
    return Stationery(shapes)


def _bare(serving: Any) -> bool:
    """Whether the server's settings leave a plain stream plain: no parsers, no extra numbers, no logging of outputs."""
    return not (
        getattr(serving, "parser_cls", None)
        or getattr(serving, "enable_force_include_usage", False)
        or getattr(serving, "enable_per_request_metrics", False)
        or getattr(serving, "enable_log_outputs", False)
        or getattr(serving.engine_client.vllm_config, "speculative_config", None)
    )


def _plain(request: Any) -> bool:
    for name in request.model_fields_set - PLAIN:
        if name in type(request).model_fields and getattr(request, name):
            return False
    options = request.stream_options
    if options and (getattr(options, "continuous_usage_stats", False) or options.model_extra):
        return False
    return bool(getattr(request, "add_generation_prompt", True))


async def _shape(desk: Desk, model: str, kind: Kind, usage: bool) -> Shape:
    ask: dict[str, Any] = {"model": model, "stream": True, "max_tokens": 2, "stream_options": {"include_usage": usage}}
    ask |= {"prompt": "x"} if kind is Kind.COMPLETION else {"messages": [{"role": "user", "content": "x"}]}
    call = await desk.plan(Prompt(kind=kind, model=model, body=encode(ask), stream=True, request_id=MARK + "id"))
    try:
        events = await _rehearse(call)
    finally:
        await call.aclose()
    role = events.pop(0) if kind is Kind.CHAT else b""
    if len(events) != 3 + usage or events[-1] != DONE:
        raise ValueError(f"it has {len(events)} events")
    return Shape(
        role=_cut(role, {"id", "created"}) if role else (),
        text=_cut(events[0], {"id", "created", "text"}),
        finish=_cut(events[1], {"id", "created", "text", "reason", "stop"}),
        usage=_cut(events[2], {"id", "created", "usage"}) if usage else (),
    )


async def _rehearse(call: Call) -> list[bytes]:
    """vLLM's events for two made-up outputs of a call that the engine never hears of."""
    (work,) = call.works
    work.queue = queue = RequestOutputCollector(RequestOutputKind.DELTA, work.request_id)
    call.opened.set()
    events: list[bytes] = []
    for last in (False, True):
        reason, stop = (MARK + "reason", MARK + "stop") if last else (None, None)
        one = CompletionOutput(0, MARK + "text", [1], None, None, finish_reason=reason, stop_reason=stop)
        queue.put(RequestOutput(work.request_id, None, [1], None, [one], last))
        if not last:
            while not any(MARK.encode() + b"text" in event for event in events):
                events.append((await anext(call.result)).encode())
    return events + [event.encode() async for event in call.result]


def _cut(event: bytes, expected: set[str]) -> Parts:
    """The event in parts. Raises ValueError where the marks are not each there once."""
    parts: list[bytes | str] = []
    at = 0
    for found in SLOT.finditer(event):
        parts += [event[at : found.start()], _name(found.group())]
        at = found.end()
    names = [part for part in parts if isinstance(part, str)]
    if sorted(names) != sorted(expected):
        raise ValueError(f"an event has {names} where {sorted(expected)} was expected")
    return (*parts, event[at:])


def _name(slot: bytes) -> str:
    """What goes into a slot. Raises ValueError for usage with other numbers than the usual ones."""
    if slot.startswith(b"{"):
        if set(msgspec.json.decode(slot)) != NUMBERS:
            raise ValueError(f"usage is {slot!r}")
        return "usage"
    return slot.decode().strip('"').partition(MARK)[2] or "created"


def _fill(parts: Parts, values: dict[str, bytes]) -> tuple[Any, ...]:
    """The parts with `values` put in and neighbouring bytes joined; names without a value stay."""
    filled: list[bytes | str] = []
    for part in parts:
        piece = values.get(part, part) if isinstance(part, str) else part
        if isinstance(piece, bytes) and filled and isinstance(filled[-1], bytes):
            filled[-1] += piece
        else:
            filled.append(piece)
    return tuple(filled)
