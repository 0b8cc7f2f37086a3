"""Every field of a request to the simulated engine: honoured, or refused by name."""

from typing import Any

import pytest

from backends.protocol import Kind, Prompt
from tests.contract.sim import ask, backend, refusal
from tests.support import virtual

UNSUPPORTED: list[tuple[str, Any]] = [
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}),
    ("logprobs", True),
    ("top_logprobs", 2),
    ("logit_bias", {"5": 1}),
    ("best_of", 2),
    ("modalities", ["text", "audio"]),
    ("reasoning_effort", "high"),
    ("structured_outputs", {"json": {}}),
    ("never_heard_of", 1),
]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED, ids=lambda one: one if isinstance(one, str) else "")
def test_a_field_it_cannot_honour_is_refused_by_name(name: str, value: Any) -> None:
    refused = refusal(ask(**{name: value}))
    assert (refused.code, refused.param) == ("unsupported_feature", name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", []),
        ("tools", None),
        ("tool_choice", "none"),
        ("logprobs", False),
        ("top_logprobs", 0),
        ("response_format", {"type": "text"}),
        ("best_of", 1),
        ("n", 1),
        ("logit_bias", {}),
        ("store", False),
        ("stop", None),
        ("never_heard_of", None),
    ],
)
def test_a_field_that_asks_for_nothing_is_fine(name: str, value: Any) -> None:
    assert virtual.run(backend().plan(ask(**{name: value}))).prompt_tokens > 0


INVALID: list[tuple[str, Any]] = [
    ("max_tokens", "8"),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_completion_tokens", -1),
    ("min_tokens", -1),
    ("n", 0),
    ("n", 129),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("presence_penalty", -2.5),
    ("frequency_penalty", 3),
    ("seed", "x"),
    ("seed", 1 << 64),
    ("stop", 5),
    ("stop", ["a", 5]),
    ("stop", ["a"] * 5),
    ("stop", ["a", ""]),
    ("stream", "yes"),
    ("user", 5),
    ("messages", "Hello"),
    ("messages", []),
    ("messages", ...),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    refused = refusal(ask(**{name: value}))
    assert refused.code == "invalid_request"
    assert (refused.param or "").split("[")[0] == name
    assert name in refused.message


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ({"role": "robot", "content": "x"}, "invalid_request", "messages[0].role"),
        ({"role": "user"}, "invalid_request", "messages[0].content"),
        ({"content": "x"}, "invalid_request", "messages[0].role"),
        ({"role": "user", "content": [{"text": "x"}]}, "invalid_request", "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "unsupported_feature", "messages[0].content[0]"),
        ({"role": "tool", "content": "x"}, "unsupported_feature", "messages[0].role"),
        ({"role": "assistant", "tool_calls": [{}]}, "unsupported_feature", "messages[0].tool_calls"),
    ],
)
def test_a_message_at_fault_is_named(message: dict[str, Any], code: str, param: str) -> None:
    refused = refusal(ask(messages=[message]))
    assert (refused.code, refused.param) == (code, param)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    engine = backend()
    joined = virtual.run(engine.plan(ask(messages=[{"role": "user", "content": parts}])))
    assert joined.prompt_tokens == virtual.run(engine.plan(ask())).prompt_tokens


@pytest.mark.parametrize("prompt", [["a", "b"], [1, 2, 3], [[1], [2]]])
def test_several_prompts_and_token_ids_are_refused(prompt: Any) -> None:
    refused = refusal(ask(Kind.COMPLETION, prompt=prompt))
    assert (refused.code, refused.param) == ("unsupported_feature", "prompt")


@pytest.mark.parametrize("data", [b"", b"{", b'"x"', b"[]", b"\xff", b'{"messages":' + b"[" * 100_000])
def test_what_is_not_json_is_refused(data: bytes) -> None:
    assert refusal(Prompt(kind=Kind.CHAT, model="m", body=data)).code == "invalid_request"


def test_context_overflows_are_told_apart() -> None:
    long = [{"role": "user", "content": "word " * 100}]
    huge = [{"role": "user", "content": "word " * 100_000}]
    found = [
        refusal(ask(messages=long), context_tokens=64),
        refusal(ask(messages=huge), context_tokens=64),
        refusal(ask(Kind.COMPLETION, prompt="word " * 100), context_tokens=64),
        refusal(ask(max_tokens=64), context_tokens=64),
        refusal(ask(max_completion_tokens=64), context_tokens=64),
    ]
    assert {refused.code for refused in found} == {"context_length_exceeded"}
    assert [refused.param for refused in found] == [
        "messages",
        "messages",
        "prompt",
        "max_tokens",
        "max_completion_tokens",
    ]


def test_kinds_it_does_not_serve_are_refused() -> None:
    prompt = Prompt(kind=Kind.RESPONSES, model="m", body=b"{}")
    assert refusal(prompt).code == "unsupported_feature"
    assert Kind.RESPONSES.value not in backend().bundle.kinds


def test_stream_options_need_a_stream() -> None:
    refused = refusal(ask(stream=False, stream_options={"include_usage": True}))
    assert (refused.code, refused.param) == ("invalid_request", "stream_options")
    refused = refusal(ask(stream_options={"include_usage": True, "every_frame": True}))
    assert (refused.code, refused.param) == ("unsupported_feature", "stream_options.every_frame")
