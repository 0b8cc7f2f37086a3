"""Tool calls: found in what a model writes, or held to a schema."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import words
from backends.generation import Able
from backends.protocol import Refused
from backends.scribe import Scribe
from backends.toolcalls import Hermes, Named, Required
from backends.words import Words
from tests.contract.bench import Answer as Read
from tests.support.tokenizers import byte_level, save
from tests.tokens.test_answer import drain
from tests.tokens.test_scribe import EVERYTHING, prompt

ABLE = msgspec.structs.replace(EVERYTHING, tool_format="hermes")
DIAL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "dial", "parameters": {"type": "object", "properties": {"to": {"type": "integer"}}}},
}
RING: dict[str, Any] = {"type": "function", "function": {"name": "ring"}}
CALL = '<tool_call>\n{"name": "dial", "arguments": {"to": 5}}\n</tool_call>'


async def begin(words: Words, able: Able = ABLE, **fields: Any) -> Any:
    scribe = Scribe("engine", able, words, 512)
    plan = await scribe.plan(prompt(max_tokens=200, **{"tools": [DIAL, RING], **fields}))
    return plan, scribe.answer(plan, "id")


async def written(words: Words, text: str, size: int = 1, **fields: Any) -> Read:
    """The answer of a model that wrote this text."""
    plan, answer = await begin(words, **fields)
    ids, chunks = words.encode(text, special=False), []
    for at in range(0, len(ids), size):
        answer.ids(0, ids[at : at + size])
        chunks += drain(answer)
    answer.end(0)
    return Read(plan, chunks + drain(answer), bool(fields.get("stream")))


def calls(read: Read) -> list[tuple[str, str]]:
    """Name and arguments of each, as a client joins them."""
    found: dict[int, list[str]] = {}
    for frame in read.frames:
        for choice in frame["choices"]:
            said = choice.get("message") or choice["delta"]
            for at, one in enumerate(said.get("tool_calls") or []):
                joined = found.setdefault(one.get("index", at), ["", ""])
                joined[0] += one["function"].get("name", "")
                joined[1] += one["function"]["arguments"]
    return [(name, arguments) for name, arguments in found.values()]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("size", [1, 3, 100])
async def test_calls_between_text(plain: Words, stream: bool, size: int) -> None:
    text = f"Let me see. {CALL}\n{CALL.replace('dial', 'ring')}"
    read = await written(plain, text, size, stream=stream)
    assert read.text() == "Let me see. "
    assert calls(read) == [("dial", '{"to":5}'), ("ring", '{"to":5}')]
    assert read.finish_reasons() == ["tool_calls"]
    if not stream:
        message = read.frames[0]["choices"][0]["message"]
        assert message["tool_calls"][0]["id"].startswith("call_")
        assert message["tool_calls"][0]["type"] == "function"


async def test_a_call_alone_has_no_content(plain: Words) -> None:
    message = (await written(plain, CALL)).frames[0]["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


async def test_one_call_at_a_time_where_asked(plain: Words) -> None:
    read = await written(plain, CALL + CALL, parallel_tool_calls=False)
    assert len(calls(read)) == 1


async def test_none_means_text(plain: Words) -> None:
    read = await written(plain, CALL, tool_choice="none")
    assert (read.text(), calls(read), read.finish_reasons()) == (CALL, [], ["stop"])


async def test_what_is_no_call_is_shown(plain: Words) -> None:
    for text in ("<tool_call>{oops}</tool_call> then", "a <tool_cal b", "<tool_call>[1]</tool_call>", "x <tool_call>{"):
        for stream in (True, False):
            read = await written(plain, text, stream=stream)
            assert (read.text(), calls(read), read.finish_reasons()) == (text, [], ["stop"])


async def test_a_call_that_lacks_only_its_end_counts(plain: Words) -> None:
    assert calls(await written(plain, CALL.removesuffix("</tool_call>"))) == [("dial", '{"to":5}')]


@pytest.fixture
def marked(tmp_path: Path) -> Words:
    """Words in which the notation's marks are special tokens."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    return words.load(str(save(tokenizer, tmp_path)))


async def test_the_notation_may_be_special_tokens(marked: Words) -> None:
    assert calls(await written(marked, CALL)) == [("dial", '{"to":5}')]


@given(
    parts=st.lists(st.sampled_from(["text ", "<", "<tool", CALL, "é🙂", "\n", "</tool_call>"]), max_size=6),
    at=st.lists(st.integers(0, 300), max_size=8),
)
def test_any_split_finds_the_same(parts: list[str], at: list[int]) -> None:
    text = "".join(parts)
    whole, pieces = Hermes(True), Hermes(True)
    expected = whole.push(text) + whole.end()
    marks = sorted({min(one, len(text)) for one in at} | {0, len(text)})
    shown = "".join([pieces.push(text[begin:end]) for begin, end in itertools.pairwise(marks)]) + pieces.end()
    assert [(one.name, one.arguments) for one in pieces.made] == [(one.name, one.arguments) for one in whole.made]
    assert shown.split() == expected.split()
    assert len(pieces.made) == parts.count(CALL)


async def test_required_is_a_list_held_to_the_tools(plain: Words) -> None:
    plan, _ = await begin(plain, tool_choice="required")
    assert plan.work.guide.type == "json_schema"
    schema = msgspec.json.decode(plan.work.guide.text)
    assert schema["minItems"] == 1
    names = [one["properties"]["name"]["enum"] for one in schema["items"]["anyOf"]]
    assert names == [["dial"], ["ring"]]
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == DIAL["function"]["parameters"]
    text = '[{"name": "dial", "parameters": {"to": 5}}, {"name": "ring", "parameters": {}}]'
    for stream in (True, False):
        read = await written(plain, text, tool_choice="required", stream=stream)
        assert calls(read) == [("dial", '{"to":5}'), ("ring", "{}")]
        assert (read.text(), read.finish_reasons()) == ("", ["tool_calls"])


async def test_a_list_that_was_cut_off_is_shown(plain: Words) -> None:
    for text in ('[{"name": "dial", "para', '{"name": 1}', "[5]"):
        read = await written(plain, text, tool_choice="required")
        assert (read.text(), calls(read), read.finish_reasons()) == (text, [], ["stop"])


async def test_a_named_function_streams_its_arguments(plain: Words) -> None:
    choice = {"type": "function", "function": {"name": "dial"}}
    plan, _ = await begin(plain, tool_choice=choice)
    assert msgspec.json.decode(plan.work.guide.text) == DIAL["function"]["parameters"]
    for stream in (True, False):
        read = await written(plain, '{"to": 51}', tool_choice=choice, stream=stream)
        assert calls(read) == [("dial", '{"to": 51}')]
        assert (read.text(), read.finish_reasons()) == ("", ["stop"])
    assert len([frame for frame in (await written(plain, '{"to": 51}', stream=True, tool_choice=choice)).frames]) > 3


async def test_definitions_move_to_where_they_are_sought(plain: Words) -> None:
    shared = {"$defs": {"No": {"type": "integer"}}, "type": "object", "properties": {"n": {"$ref": "#/$defs/No"}}}
    one = {"type": "function", "function": {"name": "a", "parameters": shared}}
    plan, _ = await begin(plain, tools=[one], tool_choice="required", parallel_tool_calls=False)
    schema = msgspec.json.decode(plan.work.guide.text)
    assert schema["$defs"] == shared["$defs"]
    assert schema["maxItems"] == 1
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]
    other = {"type": "function", "function": {"name": "b", "parameters": {"$defs": {"No": {"type": "string"}}}}}
    with pytest.raises(Refused, match="'No' differently"):
        await begin(plain, tools=[one, other], tool_choice="required")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "invalid_request"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "invalid_request"),
        ({"tool_choice": "sometimes"}, "tool_choice", "invalid_request"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "invalid_request"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "invalid_request",
        ),
    ],
)
async def test_choices_that_make_no_sense(plain: Words, fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(Refused) as caught:
        await begin(plain, **fields)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, param)


async def test_an_engine_without_guides_cannot_be_made_to_call(plain: Words) -> None:
    able = msgspec.structs.replace(ABLE, guides=frozenset())
    assert calls(await written(plain, CALL, able=able)) == [("dial", '{"to":5}')]
    with pytest.raises(Refused) as caught:
        await begin(plain, able, tool_choice="required")
    assert (caught.value.code, caught.value.param) == ("unsupported_feature", "tool_choice")


async def test_without_a_notation_tools_are_refused(plain: Words) -> None:
    with pytest.raises(Refused) as caught:
        await begin(plain, EVERYTHING)
    assert (caught.value.code, caught.value.param) == ("unsupported_feature", "tools")


def test_a_notation_that_is_not_known(plain: Words) -> None:
    with pytest.raises(ValueError, match="tools: 'morse' is no notation known here; known: hermes"):
        Scribe("engine", msgspec.structs.replace(ABLE, tool_format="morse"), plain, 512)


def test_nothing_said_is_no_call() -> None:
    for one in (Hermes(True), Required(True), Named("x")):
        assert (one.push(""), one.deltas(), one.end()) == ("", [], "")
