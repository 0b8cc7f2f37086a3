"""How a request body is read where no engine does it: checked against a struct, every other field refused by name."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from backends.protocol import Kind, Prompt, Refused

Tokens = Annotated[int, Meta(ge=1)] | None
Penalty = Annotated[float, Meta(ge=-2, le=2)] | None

MAX_STOPS = 4


class Part(Struct):
    """A piece of a message. Only text is understood."""

    type: str
    text: str = ""


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class Generation(Struct, kw_only=True):
    """What chat and completion have in common, each checked for its range."""

    model: str = ""
    max_tokens: Tokens = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode

_NOTHING = frozenset({b"null", b"false", b"[]", b"{}", b'""'})
_ZERO, _ONE = frozenset({b"0", b"0.0"}), frozenset({b"1", b"1.0"})
_DEFAULTS = {
    "best_of": _ONE,
    "frequency_penalty": _ZERO,
    "length_penalty": _ONE,
    "min_p": _ZERO,
    "min_tokens": _ZERO,
    "modalities": frozenset({b'["text"]'}),
    "n": _ONE,
    "parallel_tool_calls": frozenset({b"true"}),
    "presence_penalty": _ZERO,
    "repetition_penalty": _ONE,
    "response_format": frozenset({b'{"type":"text"}', b'{"type": "text"}'}),
    "tool_choice": frozenset({b'"none"', b'"auto"'}),
    "skip_special_tokens": frozenset({b"true"}),
    "spaces_between_special_tokens": frozenset({b"true"}),
    "temperature": _ONE,
    "top_k": frozenset({b"-1", b"0"}),
    "top_logprobs": frozenset({b"0"}),
    "top_p": _ONE,
}
"""Values of fields that are not honoured which ask for nothing beyond plain text."""


class Reader:
    """Reads bodies for one engine, which its refusals call `what`.

    `bodies` are the structs by API; their fields are honoured, but those in `without`.
    """

    def __init__(self, what: str, bodies: dict[Kind, type[Struct]], without: frozenset[str] = frozenset()) -> None:
        self.what = what
        self._decoders: dict[Kind, msgspec.json.Decoder[Any]] = {
            kind: msgspec.json.Decoder(body) for kind, body in bodies.items()
        }
        self._honoured = {kind: frozenset(body.__struct_encode_fields__) - without for kind, body in bodies.items()}

    def read(self, prompt: Prompt) -> Any:
        """The checked body, one of `bodies`. Raises Refused, which names the field."""
        decoder = self._decoders.get(prompt.kind)
        if decoder is None:
            raise Refused(400, "unsupported_feature", f"{self.what} does not serve {prompt.kind.value}", "model")
        honoured = self._honoured[prompt.kind]
        try:
            for name, raw in _decode_fields(prompt.body).items():
                if name not in honoured and not asks_nothing(name, bytes(raw)):
                    raise self.unsupported(name)
            return decoder.decode(prompt.body)
        except msgspec.ValidationError as error:
            raise self._refusal(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(400, "invalid_request", f"the body is not valid JSON: {error}") from None

    def unsupported(self, name: str, message: str = "") -> Refused:
        """`name` may be a place in the body, as in `messages[1].role`."""
        return Refused(400, "unsupported_feature", message or f"{name!r} is not supported by {self.what}", param=name)

    def _refusal(self, text: str) -> Refused:
        """msgspec's complaint as ours: its path is the field."""
        what, _, path = text.partition(" - at `$")
        field = path.rstrip("`").removeprefix(".")
        named = what.split("`")[1] if what.startswith("Object ") else ""
        param = ".".join(part for part in (field, named) if part) or None
        if "unknown field" in what and param is not None:
            return self.unsupported(param)
        if field == "prompt" and "got `array`" in what:
            return self.unsupported("prompt", f"{self.what} takes one prompt, as a string")
        missing = "missing required" in what
        message = f"required field {param} is missing" if missing else f"{what} at {param or 'the body'}"
        return Refused(400, "invalid_request", message, param=param)


def invalid(name: str, message: str) -> Refused:
    return Refused(400, "invalid_request", f"{name}: {message}", param=name)


def asks_nothing(name: str, raw: bytes) -> bool:
    """Whether a field that is not honoured may be ignored: its value is what happens anyway."""
    return raw in _NOTHING or raw in _DEFAULTS.get(name, ())


def stops(body: Generation) -> tuple[str, ...]:
    """The stop strings. Raises Refused for too many or an empty one."""
    found = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(found) > MAX_STOPS:
        raise invalid("stop", f"at most {MAX_STOPS} strings")
    if not all(found):
        raise invalid("stop", "an empty string would stop at once")
    return found
