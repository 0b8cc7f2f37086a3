"""Bodies change only where they must, and then in nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.openai_body import choices, fit
from backends.protocol import Kind, Prompt


def prompt(body: bytes, **more: Any) -> Prompt:
    return Prompt(**{"kind": Kind.CHAT, "model": "m", "body": body, "stream": b'"stream":true' in body, **more})


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (b'{"model":"m"}', {}),
        (b' { "model" : "m" , "x": "\\u4e00\\u00e9 \\"model\\": " } \n', {}),
        (b'{"model":"m","stream":true,"stream_options":{"include_usage":true}}', {"want_usage": True}),
        (b'{"model":"m","stream":true,"input":"x"}', {"kind": Kind.RESPONSES}),
        (b'{"model":"m","stream":true}', {"kind": Kind.MESSAGES}),
    ],
)
def test_what_needs_no_change_is_the_same_object(body: bytes, more: dict[str, Any]) -> None:
    assert fit(prompt(body, **more), "m") is body


def test_usage_is_asked_for_without_decoding() -> None:
    body = b'{"model": "m",  "stream":true,"x":1e400 }\n'
    assert (
        fit(prompt(body), "m") == b'{"model": "m",  "stream":true,"x":1e400 ,"stream_options":{"include_usage":true}}'
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("null", {"include_usage": True}),
        ("{}", {"include_usage": True}),
        ('{"include_usage":false,"x":[1]}', {"include_usage": True, "x": [1]}),
        ('{"continuous_usage_stats":true}', {"include_usage": True, "continuous_usage_stats": True}),
        ('"nonsense"', "nonsense"),
    ],
)
@pytest.mark.parametrize("flag", [True, False])
def test_stream_options_of_the_client_are_kept(options: str, expected: Any, flag: bool) -> None:
    body = f'{{"model":"m","stream":true,"stream_options":{options},"z":1}}'.encode()
    sent = fit(prompt(body, has_stream_options=flag), "m")
    assert json.loads(sent) == {"model": "m", "stream": True, "stream_options": expected, "z": 1}
    assert sent.count(b'"stream_options"') == 1


def test_the_model_is_named_as_the_engine_does() -> None:
    sent = fit(prompt(b'{"model":"m","seed":12345678901234567890,"messages":[{"content":"the \\"model\\""}]}'), "up/m")
    assert sent == b'{"model":"up/m","seed":12345678901234567890,"messages":[{"content":"the \\"model\\""}]}'


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"other","model":"m","stream":true}',
        b'{"model":"other","stream":true,"mod\\u0065l":"m"}',
        b'{"\\u006dodel":"m","stream":true}',
        b'{"model":"m","stream":false,"stream":true}',
        b'{"model":"m","stream":true,"stream_\\u006fptions":{"include_usage":false}}',
        b'{"model":"m","stream":true,"stream\\u005foptions":{"include_usage":false}}',
    ],
)
def test_a_name_said_twice_cannot_mean_two_things(body: bytes) -> None:
    sent = fit(prompt(body, stream=True), "m")
    pairs = json.loads(sent, object_pairs_hook=list)
    assert sorted(name for name, _ in pairs) == ["model", "stream", "stream_options"]
    assert json.loads(sent) == {"model": "m", "stream": True, "stream_options": {"include_usage": True}}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(max_size=8) | st.sampled_from(["messages", "stream_options", "n", "stream"])


@given(
    st.dictionaries(NAMES, VALUES, max_size=6),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["m", "up"]),
)
def test_nothing_else_changes(
    fields: dict[str, Any], stream: bool, usage: bool, ascii_only: bool, upstream: str
) -> None:
    fields = {**fields, "model": "m"}
    fields.pop("stream", None)
    if stream:
        fields["stream"] = True
    options = fields.pop("stream_options", None)
    if isinstance(options, dict) and stream:
        fields["stream_options"] = options
    body = json.dumps(fields, ensure_ascii=ascii_only).encode()
    sent = fit(
        Prompt(
            kind=Kind.CHAT,
            model="m",
            body=body,
            stream=stream,
            want_usage=usage,
            has_stream_options="stream_options" in fields,
        ),
        upstream,
    )
    expected = {**fields, "model": upstream}
    if stream and not usage:
        expected["stream_options"] = {**fields.get("stream_options", {}), "include_usage": True}
    assert json.loads(sent) == expected


def test_no_object_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a JSON object"):
        fit(prompt(b'["model"]', stream=True), "m")
    with pytest.raises(ValueError, match="not a JSON object"):
        fit(prompt(b'["model"]', stream=True), "up")


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b"{}", 1),
        (b'{"n":3}', 3),
        (b'{"n":null}', 1),
        (b'{"n":"x"}', 1),
        (b'{"n":2,"best_of":5}', 5),
        (b'{"messages":[{"n":4}]}', 1),
        (b'{"n":-1}', 1),
    ],
)
def test_choices(body: bytes, count: int) -> None:
    assert choices(body) == count
