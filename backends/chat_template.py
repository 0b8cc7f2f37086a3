"""A model's own chat template: the prompt as text, from messages and tools, as transformers renders it.

Follows `transformers.utils.chat_template_utils` (Apache 2.0): the same sandbox, filters and globals, so that a template
made for it renders to the same text.
"""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from backends.protocol import Refused

Message = dict[str, Any]


class Generation(Extension):
    """`{% generation %}` marks what the model said, for training; here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One or two templates of a model: `default`, and `tool_use` for requests with tools where there is one.

    `marks` are the names of special tokens that templates use (`bos_token`, ...). Thread-safe.
    """

    def __init__(self, sources: dict[str, str], marks: dict[str, str]) -> None:
        environment = _environment()
        self._marks = marks
        self._templates = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except TemplateError as error:
                raise ValueError(f"the chat template {name!r} is wrong: {error}") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        settings: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt. `settings` are further names for the template. Raises Refused for what the template refuses."""
        template = self._templates.get("tool_use" if tools else "default") or self._templates["default"]
        names = {**self._marks, **(settings or {})}
        names |= {"messages": messages, "tools": tools or None, "documents": None}
        names["add_generation_prompt"] = add_generation_prompt
        try:
            return template.render(names)
        except SecurityError as error:
            raise Refused(400, "invalid_request", f"the chat template may not do this: {error}", "messages") from None
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise Refused(400, "invalid_request", f"the chat template refuses: {error}", "messages") from None


def read_template(folder: Path, config: dict[str, Any], marks: dict[str, str]) -> ChatTemplate | None:
    """The template of a model's folder, None where it has none. Raises ValueError for one that is wrong.

    A file of its own wins over `chat_template` in tokenizer_config.json, as in transformers.
    """
    sources = (
        {"default": file.read_text(encoding="utf-8")} if (file := folder / "chat_template.jinja").is_file() else {}
    )
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources.setdefault(file.stem, file.read_text(encoding="utf-8"))
    if not sources and (file := folder / "chat_template.json").is_file():
        sources = _sources(_json(file).get("chat_template"))
    sources = sources or _sources(config.get("chat_template"))
    if not sources:
        return None
    if "default" not in sources:
        raise ValueError(f"{folder}: its chat templates are {', '.join(sources)}, and none is called default")
    return ChatTemplate(sources, marks)


def _sources(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {str(one["name"]): str(one["template"]) for one in value if "name" in one and "template" in one}
    return {}


def _json(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: {error}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)  # noqa: TID251 - a date for the model to read
