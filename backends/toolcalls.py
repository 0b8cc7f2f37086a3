"""Tool calls in what a model writes: in its own notation where it may call, held to a schema where it must."""

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from backends.bodies import invalid
from backends.frames import ToolCall
from backends.generation import Able, ChatBody, Choice, Guide, Tool
from backends.protocol import Refused
from backends.stops import Stops

FORMATS = ("hermes",)
BEGIN, END = "<tool_call>", "</tool_call>"
NOTATION = frozenset({BEGIN, END})
"""Said as text also where a tokenizer calls them special."""


class Calling(Struct, frozen=True):
    """How an answer's calls are written: in `hermes` notation between text, as a JSON list (`required`), or as the
    arguments of the one function `name`. `many`: more than one call counts.
    """

    form: str
    name: str = ""
    many: bool = True


class Calls(Protocol):
    """Finds the calls of one choice in its text. What it gives back is text to be shown."""

    @property
    def made(self) -> Sequence[ToolCall]: ...
    def push(self, text: str) -> str: ...
    def end(self) -> str: ...
    def deltas(self) -> list[dict[str, object]]:
        """What is new, in the form of `delta.tool_calls`."""
        ...

    @property
    def reason(self) -> str:
        """What `stop` becomes."""
        ...


def calling(body: ChatBody, able: Able) -> tuple[Calling | None, Guide | None]:
    """How this request's calls will be written, and what the engine has to be held to for it. Raises Refused."""
    choice, tools = body.tool_choice, body.tools or []
    if not tools:
        if choice in (None, "none", "auto"):
            return None, None
        raise invalid("tool_choice", "there are no tools to choose from")
    many = body.parallel_tool_calls is not False
    if choice == "none":
        return None, None
    if choice in (None, "auto"):
        return Calling(able.tool_format, many=many), None
    if "json_schema" not in able.guides:
        message = f"tool_choice: {able.what} is not guided by a schema, so that it can't be made to call; use auto"
        raise Refused(400, "unsupported_feature", message, "tool_choice")
    if isinstance(choice, Choice):
        return _named(choice.function.name, tools)
    return Calling("required", many=many), Guide("json_schema", _schema(tools, many))


def _named(name: str, tools: Sequence[Tool]) -> tuple[Calling, Guide]:
    tool = next((one for one in tools if one.function.name == name), None)
    if tool is None:
        raise invalid("tool_choice", f"there is no tool {name!r}")
    return Calling("named", name, many=False), Guide("json_schema", _json(_parameters(tool)))


def _schema(tools: Sequence[Tool], many: bool) -> str:
    """A list of calls to any of the tools. What their schemas define by name moves to the top, where it is sought."""
    defined: dict[str, Any] = {}
    items = []
    for tool in tools:
        schema = dict(_parameters(tool))
        for name, value in schema.pop("$defs", {}).items():
            if defined.setdefault(name, value) != value:
                raise invalid("tools", f"two tools define {name!r} differently")
        name_of = {"type": "string", "enum": [tool.function.name]}
        items.append(
            {
                "type": "object",
                "properties": {"name": name_of, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    made: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    if not many:
        made["maxItems"] = 1
    if defined:
        made["$defs"] = defined
    return _json(made)


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def finder(how: Calling) -> Calls:
    """For one choice."""
    if how.form == "named":
        return Named(how.name)
    return Required(how.many) if how.form == "required" else Hermes(how.many)


class _Whole:
    """Calls that are told in one piece each."""

    reason = "tool_calls"

    def __init__(self, many: bool) -> None:
        self._many = many
        self._told = 0
        self.made: list[ToolCall] = []

    def deltas(self) -> list[dict[str, object]]:
        """See `Calls`."""
        new, at = self.made[self._told :], self._told
        self._told = len(self.made)
        return [_delta(at + nth, one.id, one.name, one.arguments) for nth, one in enumerate(new)]

    def make(self, value: Any, arguments: str) -> bool:
        """A call out of a decoded object; False where it is none. One too many is dropped."""
        if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
            return False
        given = value.get(arguments, {})
        if self._many or not self.made:
            self.made.append(ToolCall(_new_id(), name, given if isinstance(given, str) else _json(given)))
        return True


class Hermes(_Whole):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` between text, as Hermes and Qwen models write it.

    What looks like a call and is none is shown as the text that it is.
    """

    def __init__(self, many: bool) -> None:
        super().__init__(many)
        self._before = Stops((BEGIN,))
        self._inside: Stops | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """See `Calls`."""
        shown = ""
        while text:
            if self._inside is None:
                shown += self._text(self._before.push(text))
                text = self._before.after
                if self._before.stopped:
                    self._before, self._inside = Stops((BEGIN,)), Stops((END,))
            else:
                self._held += self._inside.push(text)
                text = self._inside.after
                if self._inside.stopped:
                    shown += self._close(END)
        return shown

    def end(self) -> str:
        """See `Calls`. A call that was cut off is one if its JSON is whole."""
        if self._inside is None:
            return self._text(self._before.rest())
        self._held += self._inside.rest()
        return self._close("")

    def _close(self, mark: str) -> str:
        held, self._held, self._inside = self._held, "", None
        try:
            if self.make(msgspec.json.decode(held), "arguments"):
                return ""
        except (msgspec.DecodeError, UnicodeError):
            pass
        return BEGIN + held + mark

    def _text(self, said: str) -> str:
        """Line breaks between calls are of the notation, not of the answer."""
        return "" if self.made and not said.strip() else said


class Required(_Whole):
    """A list of `{"name": ..., "parameters": {...}}`, which the engine is held to."""

    def __init__(self, many: bool) -> None:
        super().__init__(many)
        self._parts: list[str] = []

    def push(self, text: str) -> str:
        """See `Calls`."""
        self._parts.append(text)
        return ""

    def end(self) -> str:
        """See `Calls`. A list that was cut off is shown as it is."""
        text = "".join(self._parts)
        try:
            found = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError):
            return text
        if not isinstance(found, list) or not all([self.make(one, "parameters") for one in found]):
            self.made = []
            return text
        return ""


class Named:
    """The whole text is the arguments of one function, which the engine is held to. They stream as they come."""

    reason = "stop"

    def __init__(self, name: str) -> None:
        self._id, self._name = _new_id(), name
        self._text, self._told, self._new = "", False, ""

    @property
    def made(self) -> list[ToolCall]:
        return [ToolCall(self._id, self._name, self._text)]

    def push(self, text: str) -> str:
        """See `Calls`."""
        self._text += text
        self._new += text
        return ""

    def end(self) -> str:
        """See `Calls`."""
        return ""

    def deltas(self) -> list[dict[str, object]]:
        """See `Calls`."""
        new, self._new = self._new, ""
        if not self._told and self._text:
            self._told = True
            return [_delta(0, self._id, self._name, new)]
        return [{"index": 0, "function": {"arguments": new}}] if new else []


def _delta(index: int, call_id: str, name: str, arguments: str) -> dict[str, object]:
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
