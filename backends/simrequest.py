"""What a request asks of the simulated engine: the body read and checked, every field honoured or refused by name."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from backends.protocol import Kind, Prompt, Refused

Tokens = Annotated[int, Meta(ge=1)] | None
Penalty = Annotated[float, Meta(ge=-2, le=2)] | None

_MAX_STOPS = 4


class Part(Struct):
    """A piece of a message. Only text is understood."""

    type: str
    text: str = ""


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: Raw = Raw()
    function_call: Raw = Raw()


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class Generation(Struct, kw_only=True):
    """What chat and completion have in common.

    Temperature, penalties and the like are checked for their range and change nothing: the text is not sampled.
    """

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


class ChatBody(Generation, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Tokens = None


class CompletionBody(Generation, kw_only=True):
    prompt: str


class EmbeddingsBody(Struct, kw_only=True):
    model: str = ""
    input: str | list[str]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None
    service_tier: str | None = None


class TokenizeBody(Struct, kw_only=True):
    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


Body = ChatBody | CompletionBody | EmbeddingsBody | TokenizeBody

_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_BODIES: dict[Kind, type[Body]] = {
    Kind.CHAT: ChatBody,
    Kind.COMPLETION: CompletionBody,
    Kind.EMBEDDINGS: EmbeddingsBody,
    Kind.TOKENIZE: TokenizeBody,
}
_DECODERS = {kind: msgspec.json.Decoder(body) for kind, body in _BODIES.items()}
_HONOURED = {kind: frozenset(body.__struct_encode_fields__) for kind, body in _BODIES.items()}

_NOTHING = frozenset({b"null", b"false", b"[]", b"{}", b'""'})
_DEFAULTS = {
    "best_of": frozenset({b"1"}),
    "modalities": frozenset({b'["text"]'}),
    "parallel_tool_calls": frozenset({b"true"}),
    "response_format": frozenset({b'{"type":"text"}', b'{"type": "text"}'}),
    "tool_choice": frozenset({b'"none"', b'"auto"'}),
    "top_logprobs": frozenset({b"0"}),
}
"""Values of fields that are not understood which ask for nothing beyond plain text."""


def read(prompt: Prompt) -> Body:
    """The checked body. Raises Refused, which names the field."""
    decoder = _DECODERS.get(prompt.kind)
    if decoder is None:
        raise Refused(400, "unsupported_feature", f"the simulated engine does not serve {prompt.kind.value}")
    try:
        fields = _decode_fields(prompt.body)
        for name, raw in fields.items():
            if name not in _HONOURED[prompt.kind] and not _asks_nothing(name, bytes(raw)):
                raise unsupported(name)
        return decoder.decode(prompt.body)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, "invalid_request", f"the body is not valid JSON: {error}") from None


def unsupported(name: str, what: str = "") -> Refused:
    message = what or f"{name!r} is not supported by the simulated engine"
    return Refused(400, "unsupported_feature", message, param=name)


def invalid(name: str, message: str) -> Refused:
    return Refused(400, "invalid_request", f"{name}: {message}", param=name)


def _asks_nothing(name: str, raw: bytes) -> bool:
    return raw in _NOTHING or raw in _DEFAULTS.get(name, ())


def _refusal(text: str) -> Refused:
    """msgspec's complaint as ours: its path is the field."""
    what, _, path = text.partition(" - at `$")
    field = path.rstrip("`").removeprefix(".")
    named = what.split("`")[1] if what.startswith("Object ") else ""
    param = ".".join(part for part in (field, named) if part) or None
    if "unknown field" in what and param is not None:
        return unsupported(param)
    if field == "prompt" and "got `array`" in what:
        return unsupported("prompt", "the simulated engine takes one prompt, as a string")
    message = f"required field {param} is missing" if "missing required" in what else f"{what} at {param or 'the body'}"
    return Refused(400, "invalid_request", message, param=param)


def chat_text(messages: list[Message]) -> str:
    """All messages as one text, in the simulated engine's own template. Raises Refused for what is not text."""
    if not messages:
        raise invalid("messages", "at least one message is needed")
    lines = [f"<{message.role}>{_content(index, message)}\n" for index, message in enumerate(messages)]
    return "".join(lines) + "<assistant>"


def _content(index: int, message: Message) -> str:
    where = f"messages[{index}]"
    for name in ("tool_calls", "function_call"):
        if bytes(getattr(message, name)) not in (b"", b"null", b"[]"):
            raise unsupported(f"{where}.{name}")
    if message.role in ("tool", "function"):
        raise unsupported(f"{where}.role", f"{where}.role: tools are not supported by the simulated engine")
    if message.content is None:
        raise invalid(f"{where}.content", "text is needed")
    if isinstance(message.content, str):
        return message.content
    for number, part in enumerate(message.content):
        if part.type not in ("text", "input_text"):
            raise unsupported(f"{where}.content[{number}]", f"{where}.content[{number}]: only text is supported")
    return "".join(part.text for part in message.content)


def stops(body: Generation) -> tuple[str, ...]:
    """The stop strings. Raises Refused for too many or an empty one."""
    found = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(found) > _MAX_STOPS:
        raise invalid("stop", f"at most {_MAX_STOPS} strings")
    if not all(found):
        raise invalid("stop", "an empty string would stop at once")
    return found
