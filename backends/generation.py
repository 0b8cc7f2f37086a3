"""What a request asks of an engine that takes tokens: the body read, checked, and put in the terms of engines."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from backends.bodies import Generation, Reader, Tokens, invalid
from backends.features import Feature
from backends.protocol import Kind, Prompt, Refused

GUIDES = ("json", "json_schema", "regex", "ebnf_grammar")
_TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Sampling(Struct, frozen=True, kw_only=True):
    """How tokens are drawn. None is what the client did not say: the engine's own default. Its names are the body's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    logit_bias: dict[int, float] = {}


SAMPLING = frozenset(Sampling.__struct_fields__)


class Guide(Struct, frozen=True):
    """What the answer's form is held to; `type` is one of `GUIDES`, `text` the schema or expression."""

    type: str
    text: str = ""


class Able(Struct, frozen=True, kw_only=True):
    """What an engine can do with a request; its refusals call it `what`.

    `fields` are those of `Sampling` that it honours. `tool_format` is how its model writes tool calls, empty where it
    doesn't. With `stop_ids` an answer can be ended by any token.
    """

    what: str
    fields: frozenset[str] = SAMPLING
    choices: int = 1
    logprobs: bool = False
    guides: frozenset[str] = frozenset()
    tool_format: str = ""
    stop_ids: bool = False

    def features(self) -> frozenset[str]:
        """For a bundle."""
        has = {
            Feature.TOOLS: bool(self.tool_format),
            Feature.STRUCTURED_OUTPUT: bool(self.guides),
            Feature.LOGPROBS: self.logprobs,
            Feature.LOGIT_BIAS: "logit_bias" in self.fields,
            Feature.CHOICES: self.choices > 1,
            Feature.TOKEN_IDS: self.stop_ids,
        }
        return frozenset(feature.value for feature, there in has.items() if there)

    @property
    def lacks(self) -> frozenset[str]:
        """The body fields that are refused where they ask for anything."""
        return (
            (SAMPLING - self.fields)
            | (frozenset() if self.stop_ids else {"stop_token_ids"})
            | (frozenset() if self.logprobs else {"logprobs", "top_logprobs"})
            | (frozenset() if self.guides else {"response_format", "structured_outputs"})
            | (frozenset() if self.tool_format else _TOOL_FIELDS)
        )


class _Schema(Struct):
    name: str = ""
    schema_: dict[str, Any] | bool | None = msgspec.field(name="schema", default=None)
    strict: bool | None = None
    description: str | None = None


class _Format(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None


class _Structured(Struct, forbid_unknown_fields=True):
    """vLLM's field of that name, as far as guides go."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class _Function(Struct):
    name: Annotated[str, Meta(min_length=1)]
    description: str | UnsetType | None = UNSET
    parameters: dict[str, Any] | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class Tool(Struct, kw_only=True):
    """In the order of its fields, which is how models were shown them."""

    type: Literal["function"] = "function"
    function: _Function


class _Named(Struct):
    name: str


class Choice(Struct):
    """A `tool_choice` that names the function."""

    function: _Named
    type: Literal["function"] = "function"


class Body(Generation, kw_only=True):
    """What chat and completion have in common beyond `Generation`."""

    length_penalty: float | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop_token_ids: list[_TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: _Structured | None = None
    response_format: _Format | None = None
    add_special_tokens: bool | None = None


class ChatBody(Body, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: Tokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(Body, kw_only=True):
    prompt: str | list[str | _TokenId]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class TokenizeBody(Struct, kw_only=True):
    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def reader(able: Able, kinds: frozenset[str]) -> Reader:
    """Reads the bodies of an engine that serves `kinds`."""
    bodies: dict[Kind, type[Struct]] = {
        Kind.CHAT: ChatBody,
        Kind.COMPLETION: CompletionBody,
        Kind.TOKENIZE: TokenizeBody,
    }
    return Reader(able.what, {kind: body for kind, body in bodies.items() if kind.value in kinds}, able.lacks)


def check(prompt: Prompt, body: ChatBody | CompletionBody, able: Able) -> None:
    """What no type says. Raises Refused, naming the field."""
    if body.stream_options is not None and not prompt.stream:
        raise invalid("stream_options", "only allowed when stream is true")
    if (body.n or 1) > able.choices:
        raise Refused(400, "unsupported_feature", f"n: {able.what} gives at most {able.choices} choices", "n")
    if isinstance(body, ChatBody):
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", "needs logprobs: true")
        if body.top_logprobs:
            raise _only_chosen("top_logprobs", able)
    elif body.logprobs:
        raise _only_chosen("logprobs", able)


def _only_chosen(field: str, able: Able) -> Refused:
    message = f"{field}: {able.what} gives the log probability of the chosen token only, which is {field}: 0"
    return Refused(400, "unsupported_feature", message, field)


def sampling(body: Body) -> Sampling:
    """The part of a body that the engine draws tokens by. Raises Refused."""
    try:
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    except ValueError:
        raise invalid("logit_bias", "its names are token ids") from None
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k if body.top_k is not None and body.top_k > 0 else None,
        min_p=body.min_p,
        seed=body.seed,
        min_tokens=body.min_tokens,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        length_penalty=body.length_penalty,
        ignore_eos=bool(body.ignore_eos),
        bad_words=tuple(body.bad_words or ()),
        logit_bias=bias,
    )


def guide(body: Body, able: Able) -> Guide | None:
    """What the answer is held to. Raises Refused where the engine cannot do it."""
    found, field = _response_format(body.response_format), "response_format"
    if body.structured_outputs is not None and (said := _structured(body.structured_outputs)) is not None:
        if found is not None:
            raise invalid("structured_outputs", "response_format says another form")
        found, field = said, "structured_outputs"
    if found is not None and found.type not in able.guides:
        message = f"{field}: {able.what} is not guided by {found.type}"
        raise Refused(400, "unsupported_feature", message, field)
    return found


def _response_format(form: _Format | None) -> Guide | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Guide("json")
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise invalid("response_format.json_schema", "a schema is needed")
    return Guide("json_schema", _json(form.json_schema.schema_))


def _structured(asked: _Structured) -> Guide | None:
    found = []
    if asked.json is not None:
        found.append(Guide("json_schema", asked.json if isinstance(asked.json, str) else _json(asked.json)))
    if asked.json_object:
        found.append(Guide("json"))
    if asked.regex is not None:
        found.append(Guide("regex", asked.regex))
    if asked.choice:
        found.append(Guide("regex", "|".join(f"({re.escape(one)})" for one in asked.choice)))
    if asked.grammar is not None:
        found.append(Guide("ebnf_grammar", asked.grammar))
    if len(found) > 1:
        raise invalid("structured_outputs", "one form at a time")
    return found[0] if found else None


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
