"""What the frames and bodies of OpenAI-compatible servers say: usage, errors, whether a frame carries output."""

import enum
import json
from typing import Any

import msgspec
from msgspec import Struct

from backends.protocol import Usage

USAGE_TAIL_BYTES = 64 * 1024
_TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed", "message_stop"})
_scan = json.JSONDecoder().raw_decode


class _Details(Struct):
    cached_tokens: int | None = None


class _Plain(Struct):
    """Usage as nearly all servers tell it."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


_NONE = _Plain(0, 0)
_decode_plain = msgspec.json.Decoder(_Plain).decode


class _Event(Struct):
    choices: Any = None
    usage: Any = None
    error: Any = None
    type: Any = None
    code: Any = None
    response: Any = None
    message: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Part(enum.Enum):
    """What one event is to us."""

    OUTPUT = "output"
    USAGE = "usage"  # nothing but usage: what `include_usage` asks for
    ERROR = "error"
    END = "end"
    OTHER = "other"


class Seen(Struct):
    """One event, looked at. `text` is the message of an error."""

    part: Part
    usage: Usage | None = None
    text: str = ""


def look(data: bytes) -> Seen:
    """What the data of one event is. Raises ValueError when it is not JSON."""
    if not data:
        return Seen(Part.OTHER)
    if data == b"[DONE]":
        return Seen(Part.END)
    try:
        event = _decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"an event that is no JSON object ({error}): {data[:100]!r}") from None
    return _look_at(event)


def read_usage(value: Any) -> Usage | None:
    """Usage in the words of any of the APIs, None where there is none."""
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details") or value.get("input_tokens_details")
    cached = _count(details, "cached_tokens")
    prompt = _count(value, "prompt_tokens") or _count(value, "input_tokens")
    if (read := _count(value, "cache_read_input_tokens")) or "cache_creation_input_tokens" in value:
        cached = read
        prompt += read + _count(value, "cache_creation_input_tokens")
    usage = Usage(prompt, _count(value, "completion_tokens") or _count(value, "output_tokens"), cached)
    return usage if usage != Usage() else None


def usage_in_tail(tail: bytes) -> Usage | None:
    """The last `"usage"` object in the end of a JSON body. Quotes in strings are escaped: a key cannot hide in one."""
    at = tail.rfind(b'"usage"')
    while at >= 0:
        start = tail.find(b"{", at)
        if start >= 0 and tail[at + 7 : start].strip() == b":":
            if (plain := _plain_usage(tail, start)) is not None:
                return plain
            try:
                value, _ = _scan(tail[start : start + 4096].decode("utf-8", "replace"))
            except ValueError:
                return None
            return read_usage(value)
        at = tail.rfind(b'"usage"', 0, at)
    return None


def _plain_usage(tail: bytes, start: int) -> Usage | None:
    """The object at `start`, if it is usage in the usual form with at most one object in it."""
    end = tail.find(b"}", start)
    if tail.find(b"{", start + 1, end) >= 0:
        end = tail.find(b"}", end + 1)
    try:
        usage = _decode_plain(tail[start : end + 1])
    except msgspec.MsgspecError:
        return None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    if usage.prompt_tokens < 0 or usage.completion_tokens < 0 or usage == _NONE:
        return None
    return Usage(usage.prompt_tokens, usage.completion_tokens, max(0, cached or 0))


def join(before: Usage | None, after: Usage | None) -> Usage | None:
    """Of usage that comes in pieces, the largest of each; the Messages API sends the prompt first, the output last."""
    if before is None or after is None:
        return after or before
    return Usage(
        max(before.prompt_tokens, after.prompt_tokens),
        max(before.completion_tokens, after.completion_tokens),
        max(before.cached_tokens, after.cached_tokens),
    )


def error_text(error: Any) -> str:
    """The message in an error object of any shape, at most 500 characters."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error.get("type") or error.get("code") or error
    return str(error)[:500]


def _look_at(event: _Event) -> Seen:
    if event.error or event.type == "error":
        return Seen(Part.ERROR, None, error_text(event.error or {"message": event.message, "code": event.code}))
    usage = _usage_of(event)
    if event.choices is not None:
        if not event.choices:
            return Seen(Part.USAGE if usage else Part.OTHER, usage)
        return Seen(Part.OUTPUT if any(map(_has_output, event.choices)) else Part.OTHER, usage)
    if event.type in _TERMINAL:
        return Seen(Part.END, usage)
    delta = isinstance(event.type, str) and (event.type.endswith(".delta") or event.type == "content_block_delta")
    return Seen(Part.OUTPUT if delta else Part.OTHER, usage)


def _usage_of(event: _Event) -> Usage | None:
    for holder in (event.response, event.message):
        if isinstance(holder, dict) and (usage := read_usage(holder.get("usage"))):
            return usage
    return read_usage(event.usage)


def _has_output(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(value for name, value in delta.items() if name != "role")
    return bool(choice.get("text"))


def _count(value: Any, name: str) -> int:
    number = value.get(name) if isinstance(value, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else 0
