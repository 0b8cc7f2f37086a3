"""What a request asks of the simulated engine: the body read and checked, every field honoured or refused by name."""

from typing import Annotated, Literal

from msgspec import Meta, Raw, Struct

from backends.bodies import Generation, Part, Reader, Tokens, invalid
from backends.protocol import Kind, Prompt


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: Raw = Raw()
    function_call: Raw = Raw()


class ChatBody(Generation, kw_only=True):
    """Temperature, penalties and the like change nothing: the text is not sampled."""

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

_READER = Reader(
    "the simulated engine",
    {
        Kind.CHAT: ChatBody,
        Kind.COMPLETION: CompletionBody,
        Kind.EMBEDDINGS: EmbeddingsBody,
        Kind.TOKENIZE: TokenizeBody,
    },
)


def read(prompt: Prompt) -> Body:
    """The checked body. Raises Refused, which names the field."""
    body: Body = _READER.read(prompt)
    return body


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
            raise _READER.unsupported(f"{where}.{name}")
    if message.role in ("tool", "function"):
        raise _READER.unsupported(f"{where}.role", f"{where}.role: tools are not supported by the simulated engine")
    if message.content is None:
        raise invalid(f"{where}.content", "text is needed")
    if isinstance(message.content, str):
        return message.content
    for number, part in enumerate(message.content):
        if part.type not in ("text", "input_text"):
            place = f"{where}.content[{number}]"
            raise _READER.unsupported(place, f"{place}: only text is supported")
    return "".join(part.text for part in message.content)
