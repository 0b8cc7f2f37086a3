"""What has to change in a request body before an engine gets it; most often nothing."""

import msgspec
from msgspec import Raw, Struct

from backends.protocol import Kind, Prompt


class _Choices(Struct):
    n: int | None = None
    best_of: int | None = None


_decode = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_choices = msgspec.json.Decoder(_Choices).decode
_encode = msgspec.json.Encoder().encode

_ASK = b'{"include_usage":true}'
_STREAMED_WITH_USAGE = frozenset({Kind.CHAT, Kind.COMPLETION})


def fit(prompt: Prompt, upstream: str) -> bytes:
    """The body for an engine that calls the model `upstream`; asks for usage in a stream where the client did not.

    A body that says `model` or `stream` twice, or spells a name with escapes, is written anew, so that gateway and
    engine cannot read different things out of it. Raises ValueError when the body is not a JSON object.
    """
    body = prompt.body
    ask = prompt.stream and not prompt.want_usage and prompt.kind in _STREAMED_WITH_USAGE
    if prompt.model != upstream or _ambiguous(body):
        return _rewrite(prompt, upstream, ask)
    if not ask:
        return body
    if prompt.has_stream_options or b'"stream_options"' in body:
        return _rewrite(prompt, upstream, ask)
    open_object = body.rstrip()
    if not open_object.endswith(b"}"):
        raise ValueError("the body is not a JSON object")
    return open_object[:-1] + b',"stream_options":' + _ASK + b"}"


def choices(body: bytes) -> int:
    """How many answers a body asks for at once; 1 where it says nothing or nonsense."""
    if b'"n"' not in body and b'"best_of"' not in body:
        return 1
    try:
        asked = _decode_choices(body)
    except msgspec.MsgspecError:
        return 1
    return max(1, asked.n or 1, asked.best_of or 1)


def _ambiguous(body: bytes) -> bool:
    """Whether a name that is routed on may stand in it more than once. Sometimes wrongly yes, never wrongly no."""
    if body.count(b'"model"') != 1 or body.count(b'"stream"') > 1:
        return True
    return b"\\u00" in body and (b"\\u006" in body or b"\\u007" in body or b"\\u005" in body)


def _rewrite(prompt: Prompt, upstream: str, ask: bool) -> bytes:
    try:
        fields = _decode(prompt.body)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the body is not a JSON object: {error}") from None
    fields["model"] = Raw(_encode(upstream))
    if prompt.stream or "stream" in fields:
        fields["stream"] = Raw(b"true" if prompt.stream else b"false")
    if ask:
        fields["stream_options"] = _with_usage(fields.get("stream_options"))
    return _encode(fields)


def _with_usage(options: Raw | None) -> Raw:
    given = bytes(options) if options is not None else b"null"
    if given == b"null":
        return Raw(_ASK)
    try:
        fields = _decode(given)
    except msgspec.MsgspecError:
        return Raw(given)  # the engine will say what is wrong with it
    fields["include_usage"] = Raw(b"true")
    return Raw(_encode(fields))
