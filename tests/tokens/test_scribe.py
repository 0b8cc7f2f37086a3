"""Requests read for an engine that takes tokens: every field honoured, or refused by name."""

from typing import Any

import msgspec
import pytest

from backends.ask import Ask
from backends.generation import SAMPLING, Able, Guide
from backends.protocol import Kind, Plan, Prompt, Refused
from backends.scribe import THREAD_BYTES, Scribe, ready_stream
from backends.words import Words

EVERYTHING = Able(
    what="the test engine",
    choices=4,
    logprobs=True,
    guides=frozenset({"json", "json_schema", "regex", "ebnf_grammar"}),
    stop_ids=True,
)
TEXT_ONLY = Able(what="the text engine", fields=frozenset({"temperature", "top_p"}))


def prompt(kind: Kind = Kind.CHAT, **fields: Any) -> Prompt:
    body: dict[str, Any] = {"model": "m", **fields}
    if kind is Kind.CHAT:
        body.setdefault("messages", [{"role": "user", "content": "The train waits."}])
    elif kind is Kind.COMPLETION:
        body.setdefault("prompt", "The train waits.")
    return Prompt(kind=kind, model="m", body=msgspec.json.encode(body), stream=bool(fields.get("stream")))


def scribe(words: Words | None, able: Able = EVERYTHING, context: int = 512, **more: Any) -> Scribe:
    return Scribe("engine", able, words, context, **more)


async def ask(words: Words | None, kind: Kind = Kind.CHAT, able: Able = EVERYTHING, **fields: Any) -> Ask:
    plan = await scribe(words, able).plan(prompt(kind, **fields))
    work: Ask = plan.work
    plan.close()
    assert plan.work is None
    return work


async def refusal(words: Words | None, kind: Kind = Kind.CHAT, able: Able = EVERYTHING, **fields: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        await scribe(words, able).plan(prompt(kind, **fields))
    assert caught.value.status == 400
    return caught.value


async def test_a_chat_is_templated_and_tokenized(plain: Words) -> None:
    plan = await scribe(plain).plan(prompt(max_tokens=9, n=2))
    assert isinstance(plan, Plan)
    work: Ask = plan.work
    assert work.text == "<s><|im_start|>user\nThe train waits.<|im_end|>\n<|im_start|>assistant\n"
    assert work.ids == plain.encode(work.text, special=False)
    assert work.ids[:2] == [0, 2]
    assert (plan.prompt_tokens, plan.exact, plan.output_limit, plan.maker) == (len(work.ids), True, 18, "engine")
    assert work.end_ids == (1,)


async def test_tools_and_calls_reach_the_template(plain: Words) -> None:
    able = msgspec.structs.replace(EVERYTHING, tool_format="hermes")
    tools = [{"type": "function", "function": {"name": "dial", "parameters": {"type": "object"}}}]
    called = {"id": "1", "type": "function", "function": {"name": "dial", "arguments": '{"to": 5}'}}
    said = [
        {"role": "user", "content": [{"type": "text", "text": "Dial"}, {"type": "text", "text": "five"}]},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "done"},
    ]
    work = await ask(plain, able=able, tools=tools, messages=said)
    assert 'Tools: [{"type": "function", "function": {"name": "dial", "parameters": {"type": "object"}}}]' in work.text
    assert "user\nDial\nfive<|im_end|>" in work.text
    assert 'assistant\n<tool_call>{"name": "dial", "arguments": {"to": 5}}</tool_call>' in work.text
    assert "tool\ndone" in work.text


async def test_settings_of_the_template(plain: Words) -> None:
    work = await ask(plain, add_generation_prompt=False, chat_template_kwargs={"bos_token": "BEGIN"})
    assert work.text == "BEGIN<|im_start|>user\nThe train waits.<|im_end|>\n"


async def test_prompts_as_text_and_as_ids(plain: Words) -> None:
    ids = plain.encode("The train waits.")
    for given in ("The train waits.", ["The train waits."], ids):
        work = await ask(plain, Kind.COMPLETION, prompt=given)
        assert (work.ids, work.max_tokens, work.exact) == (ids, 16, True)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (["a", "b"], "unsupported_feature"),
        ([1, "b"], "invalid_request"),
        ([99_999], "invalid_request"),
        ([-1], "invalid_request"),
        ([], "unsupported_feature"),
        ("", "invalid_request"),
        ([[1]], "invalid_request"),
        (7, "invalid_request"),
    ],
)
async def test_prompts_that_are_none(plain: Words, given: Any, code: str) -> None:
    refused = await refusal(plain, Kind.COMPLETION, prompt=given)
    assert refused.code == code
    assert (refused.param or "").startswith("prompt")


async def test_long_prompts_are_read_in_a_thread(plain: Words) -> None:
    text = "The train waits. " * (THREAD_BYTES // 17 + 1)
    work: Ask = (await scribe(plain, context=1 << 20).plan(prompt(messages=[{"role": "user", "content": text}]))).work
    assert plain.decode(work.ids).count("train") == text.count("train")


async def test_prompt_and_answer_must_fit(plain: Words) -> None:
    size = len((await ask(plain)).ids)
    assert (await ask(plain)).max_tokens == 512 - size
    assert (await ask(plain, max_tokens=512 - size)).max_tokens == 512 - size
    for name in ("max_tokens", "max_completion_tokens"):
        refused = await refusal(plain, **{name: 513 - size})
        assert (refused.code, refused.param) == ("context_length_exceeded", name)
        assert f"513 tokens ({size} in the messages, {513 - size} in the completion)" in refused.message
    for words in ("token " * 600, "x" * 1_000_000):
        refused = await refusal(plain, Kind.COMPLETION, prompt=words)
        assert (refused.code, refused.param) == ("context_length_exceeded", "prompt")
        assert "maximum context length is 512 tokens" in refused.message


async def test_a_prompt_longer_than_the_engine_was_built_for(plain: Words) -> None:
    with pytest.raises(Refused, match="at most 5 tokens of prompt") as caught:
        await scribe(plain, input_tokens=5).plan(prompt())
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


async def test_without_a_context_there_is_a_default_limit(plain: Words) -> None:
    assert (await scribe(plain, context=0).plan(prompt())).output_limit == 1024
    assert (await scribe(plain, context=0, default_output=70).plan(prompt())).output_limit == 70


async def test_without_a_tokenizer_prompts_are_estimated() -> None:
    blind = scribe(None, TEXT_ONLY, 0)
    assert blind.kinds == {"completion"}
    plan = await blind.plan(prompt(Kind.COMPLETION, prompt="x" * 400))
    assert (plan.prompt_tokens, plan.exact, plan.work.ids) == (100, False, [])
    for _ in range(400):
        blind.answer(plan, "r").count(prompt_tokens=200)
    assert blind.bytes_per_token == pytest.approx(2.0, rel=0.01)
    assert (await blind.plan(prompt(Kind.COMPLETION, prompt="x" * 400))).prompt_tokens == pytest.approx(200, abs=2)
    with pytest.raises(Refused) as caught:
        await blind.plan(prompt())
    assert (caught.value.code, caught.value.param) == ("unsupported_feature", "model")


async def test_sampling_is_passed_on_as_it_was_said(plain: Words) -> None:
    said = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -5,
        "min_tokens": 2,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "repetition_penalty": 1.2,
        "length_penalty": 0.5,
        "ignore_eos": True,
        "bad_words": ["x"],
        "logit_bias": {"5": -100},
    }
    work = await ask(plain, **said)
    told = msgspec.structs.asdict(work.sampling)
    assert told == said | {"bad_words": ("x",), "logit_bias": {5: -100.0}}
    assert set(said) == SAMPLING
    assert work.end_ids == ()
    silent = msgspec.structs.asdict((await ask(plain)).sampling)
    assert [name for name, value in silent.items() if value] == []


async def test_what_ends_an_answer(plain: Words) -> None:
    work = await ask(plain, stop=["a", "b"], stop_token_ids=[7, 1], include_stop_str_in_output=True)
    assert (work.stops, work.end_ids, work.include_stop) == (("a", "b"), (1, 7), True)
    assert (await ask(plain, stop="a", ignore_eos=True, stop_token_ids=[7])).end_ids == (7,)


@pytest.mark.parametrize(
    ("field", "value", "guide"),
    [
        ("response_format", {"type": "json_object"}, Guide("json")),
        ("response_format", {"type": "text"}, None),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
            Guide("json_schema", '{"type":"object"}'),
        ),
        ("structured_outputs", {"json": '{"a": 1}'}, Guide("json_schema", '{"a": 1}')),
        ("structured_outputs", {"json": {"a": 1}}, Guide("json_schema", '{"a":1}')),
        ("structured_outputs", {"json_object": True}, Guide("json")),
        ("structured_outputs", {"regex": "a+"}, Guide("regex", "a+")),
        ("structured_outputs", {"choice": ["yes", "n.o"]}, Guide("regex", r"(yes)|(n\.o)")),
        ("structured_outputs", {"grammar": "root ::= x"}, Guide("ebnf_grammar", "root ::= x")),
        ("structured_outputs", {}, None),
    ],
)
async def test_guides(plain: Words, field: str, value: Any, guide: Guide | None) -> None:
    assert (await ask(plain, **{field: value})).guide == guide
    if guide is not None:
        refused = await refusal(plain, able=TEXT_ONLY, **{field: value})
        assert (refused.code, refused.param) == ("unsupported_feature", field)
        some = msgspec.structs.replace(EVERYTHING, guides=frozenset({"other"}))
        refused = await refusal(plain, able=some, **{field: value})
        assert (refused.code, refused.param) == ("unsupported_feature", field)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True},
        {"n": 2},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"top_k": 5},
        {"seed": 1},
        {"logit_bias": {"1": 2}},
        {"stop_token_ids": [1]},
        {"ignore_eos": True},
        {"never_heard_of": 1},
        {"audio": {}} | {"modalities": ["audio"]},
        {"reasoning_effort": "low"},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_an_engine_lacks_is_refused_by_name(plain: Words, fields: dict[str, Any]) -> None:
    refused = await refusal(plain, able=TEXT_ONLY, **fields)
    assert refused.code == "unsupported_feature"
    assert refused.param in fields
    assert "the text engine" in refused.message or refused.param == "modalities"


async def test_defaults_ask_for_nothing(plain: Words) -> None:
    silent = {"n": 1, "logprobs": False, "top_k": -1, "min_tokens": 0, "tools": [], "repetition_penalty": 1.0}
    assert (await ask(plain, able=TEXT_ONLY, **silent)).n == 1
    assert (await ask(plain, Kind.COMPLETION, able=TEXT_ONLY, best_of=1)).n == 1


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs", "unsupported_feature"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_request"),
        ({"n": 5}, "n", "unsupported_feature"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_request"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "invalid_request"),
        ({"temperature": -1}, "temperature", "invalid_request"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_request"),
        ({"stop": ["a"] * 5}, "stop", "invalid_request"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_request"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_request"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs", "invalid_request"),
        ({"messages": []}, "messages", "invalid_request"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "invalid_request"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_request"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_request"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "unsupported_feature",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "invalid_request",
        ),
    ],
)
async def test_wrong_values_are_refused_with_the_field(
    plain: Words, fields: dict[str, Any], param: str, code: str
) -> None:
    refused = await refusal(plain, **fields)
    assert (refused.code, refused.param) == (code, param)


async def test_completions_have_logprobs_of_the_chosen_token_only(plain: Words) -> None:
    assert (await ask(plain, Kind.COMPLETION, logprobs=0)).logprobs
    assert (await ask(plain, logprobs=True)).logprobs
    refused = await refusal(plain, Kind.COMPLETION, logprobs=3)
    assert (refused.code, refused.param) == ("unsupported_feature", "logprobs")


async def test_tokenize(plain: Words) -> None:
    plan = await scribe(plain).plan(prompt(Kind.TOKENIZE, prompt="The train", return_token_strs=True))
    assert (plan.prompt_tokens, plan.output_limit) == (0, 0)
    stream = ready_stream(plan.work)
    chunk = await stream.next()
    assert chunk is not None
    answer = msgspec.json.decode(chunk.data)
    assert answer["tokens"] == plain.encode("The train")
    assert answer["max_model_len"] == 512
    assert len(answer["token_strs"]) == answer["count"]
    assert chunk.last
    assert await stream.next() is None
    chat = await ask(plain, Kind.TOKENIZE, messages=[{"role": "user", "content": "The train waits."}])
    assert chat.ready is not None
    assert msgspec.json.decode(chat.ready)["tokens"] == (await ask(plain)).ids
    assert (await refusal(plain, Kind.TOKENIZE)).param == "prompt"


def test_what_a_bundle_says() -> None:
    assert TEXT_ONLY.features() == frozenset()
    assert EVERYTHING.features() == {"structured_output", "logprobs", "logit_bias", "choices", "token_ids"}
