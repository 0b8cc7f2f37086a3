"""The messages of a chat request, checked and put as chat templates want them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from backends.bodies import Reader, invalid

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def messages(given: Sequence[dict[str, Any]], reader: Reader) -> list[dict[str, Any]]:
    """Messages as templates want them: content as one text, arguments of tool calls as objects. Raises Refused."""
    if not given:
        raise invalid("messages", "at least one message is needed")
    return [_message(f"messages[{index}]", message, reader) for index, message in enumerate(given)]


def _message(where: str, message: dict[str, Any], reader: Reader) -> dict[str, Any]:
    if message.get("role") not in _ROLES:
        raise invalid(f"{where}.role", f"one of {', '.join(sorted(_ROLES))}")
    made = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        made["content"] = "\n".join(_part(f"{where}.content[{nth}]", part, reader) for nth, part in enumerate(content))
    elif content is None:
        if not (message["role"] == "assistant" and message.get("tool_calls")):
            raise invalid(f"{where}.content", "text is needed")
        made["content"] = ""
    elif not isinstance(content, str):
        raise invalid(f"{where}.content", "a text, or a list of parts")
    if message.get("tool_calls"):
        made["tool_calls"] = [
            _call(f"{where}.tool_calls[{nth}]", call) for nth, call in enumerate(message["tool_calls"])
        ]
    return made


def _part(where: str, part: Any, reader: Reader) -> str:
    if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "refusal"):
        raise reader.unsupported(where, f"{where}: {reader.what} takes text only")
    text = part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        raise invalid(where, "text is needed")
    return text


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(where, "a function with a name is needed")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except msgspec.DecodeError as error:
            raise invalid(f"{where}.function.arguments", f"not JSON: {error}") from None
    return {**call, "function": {**function, "arguments": arguments}}
