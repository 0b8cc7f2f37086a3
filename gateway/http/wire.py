"""What is read from a request: the few fields that are routed on. The rest of the body stays bytes."""

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from backends.features import FIELDS, Feature
from backends.protocol import Kind
from policies.reasons import Reason, Refusal
from policies.types import Objective, ServiceClass


class Malformed(Exception):
    """The request cannot be read; `refusal` names the field."""

    def __init__(self, reason: Reason, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.refusal = Refusal(reason, message, param)


class Peek(Struct, frozen=True, gc=False):
    """The routed fields. Only `model` and `stream` are typed: the engine judges the others, in its own words."""

    model: str
    stream: bool | None = None
    max_tokens: Raw = Raw()
    max_completion_tokens: Raw = Raw()
    max_output_tokens: Raw = Raw()
    stream_options: Raw = Raw()
    service_tier: str | None = None


class _StreamOptions(Struct):
    include_usage: bool | None = None


_decode = msgspec.json.Decoder(Peek).decode
_decode_options = msgspec.json.Decoder(_StreamOptions).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode

TIERS = {
    "priority": "interactive",
    "fast": "interactive",
    "default": "standard",
    "auto": "standard",
    "scale": "standard",
    "flex": "batch",
}
"""OpenAI's `service_tier` and the class it asks for."""


def peek(body: bytes) -> Peek:
    """Raises Malformed with the field's name."""
    try:
        return _decode(body)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise Malformed(Reason.INVALID_REQUEST, str(error), where.rstrip("`") or _missing(what)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(Reason.INVALID_REQUEST, f"the body is not valid JSON: {error}") from None


def _missing(what: str) -> str | None:
    parts = what.split("`")
    return parts[1] if "missing required field" in what and len(parts) > 1 else None


def with_model(body: bytes, model: str) -> bytes:
    """The same body asking for another model: an alias becomes the name that the engines know. Raises Malformed."""
    fields = _fields(body)
    fields["model"] = Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


def _fields(body: bytes) -> dict[str, Raw]:
    try:
        return _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(Reason.INVALID_REQUEST, f"the body is not valid JSON: {error}") from None


def whole(raw: Raw) -> int:
    """The value of a JSON integer, 0 for anything else (the engine will say what is wrong with it)."""
    data = bytes(raw)
    return int(data) if data.isdigit() and len(data) < 12 else 0


def output_limit(seen: Peek) -> int:
    """The client's limit on output tokens per choice; 0 if it set none."""
    return whole(seen.max_completion_tokens) or whole(seen.max_tokens) or whole(seen.max_output_tokens)


def wants_usage(seen: Peek) -> bool:
    """Whether the client asked for a usage frame at the end of its stream."""
    raw = bytes(seen.stream_options)
    if not raw or raw == b"null":
        return False
    try:
        return bool(_decode_options(raw).include_usage)
    except msgspec.MsgspecError as error:
        raise Malformed(Reason.INVALID_REQUEST, f"stream_options: {error}", "stream_options") from None


_NOTHING = frozenset({b"null", b"false", b"[]", b"{}"})


def features(body: bytes) -> dict[Feature, str]:
    """The features that a body asks for, each with the field that asks. The body has been peeked before.

    Raises Malformed: names that are not looked at in `peek` are read here.
    """
    found: dict[Feature, str] = {}
    fields = _fields(body)
    for name, raw in fields.items():
        feature = FIELDS.get(name)
        if feature is None or (value := bytes(raw)) in _NOTHING:
            continue
        if (feature is Feature.CHOICES and value == b"1") or (value == b'"none"' and name == "tool_choice"):
            continue
        if name == "response_format" and _type_of(value) == "text":
            continue
        if name == "top_logprobs" and value == b"0":
            continue
        found.setdefault(feature, name)
    messages = bytes(fields.get("messages", b""))
    if b'"image_url"' in messages:
        found.setdefault(Feature.IMAGES, "messages")
    if b'"input_audio"' in messages:
        found.setdefault(Feature.AUDIO, "messages")
    prompt = bytes(fields.get("prompt", b""))
    if prompt.startswith(b"["):
        flat = prompt[1:16].lstrip()[:1].isdigit()
        found.setdefault(Feature.TOKEN_IDS if flat else Feature.PROMPTS, "prompt")
    return found


def _type_of(raw: bytes) -> Any:
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return value.get("type") if isinstance(value, dict) else None


def service_class(
    seen: Peek, header: bytes | None, classes: Mapping[str, ServiceClass], default: ServiceClass
) -> ServiceClass:
    """The class that the header or the body asks for; the header wins."""
    if header is not None:
        name = header.decode("latin-1").strip()
        if (found := classes.get(name)) is None:
            raise Malformed(
                Reason.INVALID_REQUEST, f"unknown class {name!r}; known: {', '.join(classes)}", "x-priority-class"
            )
        return found
    if seen.service_tier is None:
        return default
    if (name := TIERS.get(seen.service_tier, "")) == "":
        raise Malformed(
            Reason.INVALID_REQUEST,
            f"unknown service_tier {seen.service_tier!r}; known: {', '.join(TIERS)}",
            "service_tier",
        )
    return classes.get(name, default)


_MAX_MS = 86_400_000


def objective(service: ServiceClass, headers: Mapping[bytes, bytes]) -> Objective:
    """The class's objective with what the headers say instead. The SDK's own time-out bounds the total."""
    if not headers.keys() & _OBJECTIVE_HEADERS:
        return service.objective
    ttft = _ms(headers, b"x-slo-ttft-ms") or service.ttft_ms
    tpot = _ms(headers, b"x-slo-tpot-ms") or service.tpot_ms
    total = _ms(headers, b"x-deadline-ms") or service.total_ms
    if client := _sdk_timeout_ms(headers.get(b"x-stainless-read-timeout")):
        total = min(total, client) if total else client
    return Objective(ttft, tpot, total)


def due(goal: Objective, received_at: float) -> tuple[float, float]:
    """By when the first token and the end are due, in seconds of the clock of `received_at`; 0 is no deadline."""
    first_by = received_at + goal.ttft_ms / 1000 if goal.ttft_ms else 0.0
    end_by = received_at + goal.total_ms / 1000 if goal.total_ms else 0.0
    return (end_by if end_by and (not first_by or end_by < first_by) else first_by), end_by


def _sdk_timeout_ms(raw: bytes | None) -> int:
    """The SDK sends whatever its user set, in seconds; what is no positive number bounds nothing."""
    try:
        value = float(raw or 0.0) * 1000
    except ValueError:
        return 0
    return int(value) if 1.0 <= value <= _MAX_MS else 0


_OBJECTIVE_HEADERS = frozenset({b"x-slo-ttft-ms", b"x-slo-tpot-ms", b"x-deadline-ms", b"x-stainless-read-timeout"})


def _ms(headers: Mapping[bytes, bytes], name: bytes) -> int:
    raw = headers.get(name)
    if raw is None:
        return 0
    try:
        value = float(raw)
    except ValueError:
        value = -1.0
    if not 0.0 < value < float("inf"):
        raise Malformed(Reason.INVALID_REQUEST, f"{name.decode()}: a positive number is needed", name.decode())
    return max(1, min(int(value), _MAX_MS))


LONGEST_KEY = 255


def identity(kind: Kind, headers: Mapping[bytes, bytes], body: bytes) -> str:
    """What a request is known by when its client sends it again: its `Idempotency-Key` with its API and body, hashed.

    Empty without such a key. Of another body it is another request, under whatever key. Raises Malformed.
    """
    key = headers.get(b"idempotency-key")
    if key is None:
        return ""
    if not 0 < len(key) <= LONGEST_KEY:
        what = f"idempotency-key: 1 to {LONGEST_KEY} characters are needed"
        raise Malformed(Reason.INVALID_REQUEST, what, "idempotency-key")
    digest = hashlib.blake2b(key + b"\0" + kind.value.encode() + b"\0", digest_size=12)
    digest.update(body)
    return digest.hexdigest()


def comes_again(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the OpenAI SDK says that it sends this not for the first time."""
    count = headers.get(b"x-stainless-retry-count", b"0")
    return count != b"0" and count.isdigit() and int(count[:9]) > 0


WANTED = frozenset(
    {
        b"authorization",
        b"x-api-key",
        b"content-type",
        b"content-length",
        b"content-encoding",
        b"x-request-id",
        b"x-priority-class",
        b"traceparent",
        b"tracestate",
        b"idempotency-key",
        b"x-stainless-retry-count",
        *_OBJECTIVE_HEADERS,
    }
)
"""The request headers that are looked at; everything else is not even copied."""

KINDS_THAT_STREAM = frozenset({Kind.CHAT, Kind.COMPLETION, Kind.RESPONSES, Kind.MESSAGES})


def request_id(given: bytes | None) -> str:
    """The client's id if it is printable ASCII of at most 128 characters, else a fresh one."""
    if given and len(given) <= 128 and given.isascii():
        text = given.decode()
        if text.isprintable() and " " not in text:
            return text
    return f"{random.getrandbits(128):032x}"


def trace(headers: Mapping[bytes, bytes]) -> tuple[tuple[str, str], ...]:
    """The client's trace context, as it came."""
    out = []
    for name in (b"traceparent", b"tracestate"):
        value = headers.get(name)
        if value is not None and value.isascii() and value.decode().isprintable():
            out.append((name.decode(), value.decode()))
    return tuple(out)
