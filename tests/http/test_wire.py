"""What is read from a request, and which field is named when it can't be."""

import pytest

from backends.features import Feature
from backends.protocol import Kind
from gateway.http import wire
from gateway.http.wire import Malformed
from policies.reasons import Reason
from policies.types import Objective, ServiceClass

FAST = ServiceClass(name="interactive", rank=0, ttft_ms=1_000, total_ms=60_000)
USUAL = ServiceClass(name="standard", rank=1, ttft_ms=10_000, tpot_ms=50, total_ms=60_000)
CLASSES = {one.name: one for one in (FAST, USUAL)}


def peek(text: str) -> wire.Peek:
    return wire.peek(text.encode())


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{}", "model"),
        (b'{"model": 3}', "model"),
        (b'{"model": null}', "model"),
        (b'{"model": "m", "stream": "yes"}', "stream"),
        (b'{"model": "m", "service_tier": 7}', "service_tier"),
        (b"[]", None),
        (b'"text"', None),
        (b"", None),
        (b"{", None),
        (b'{"model": "m"} x', None),
        (b'{"model": "\xff"}', None),
        (b'{"model": "m", "\xff": 1}', None),
        (b'{"model": "m", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    ],
)
def test_a_body_that_cant_be_read_is_refused_with_its_field(body: bytes, field: str | None) -> None:
    with pytest.raises(Malformed) as caught:
        wire.features(body) if wire.peek(body) else None
    assert caught.value.refusal.reason is Reason.INVALID_REQUEST
    assert caught.value.refusal.param == field
    assert caught.value.refusal.message


def test_what_is_not_routed_on_is_not_looked_at() -> None:
    seen = peek('{"model": "m", "messages": "not a list", "temperature": "hot", "stream": true}')
    assert (seen.model, seen.stream) == ("m", True)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ("", 0),
        (', "max_tokens": 7', 7),
        (', "max_tokens": 7, "max_completion_tokens": 5', 5),
        (', "max_output_tokens": 9', 9),
        (', "max_tokens": null', 0),
        (', "max_tokens": -1', 0),
        (', "max_tokens": 1.5', 0),
        (', "max_tokens": "8"', 0),
        (', "max_tokens": 99999999999999999999', 0),
    ],
)
def test_the_output_limit_is_whole_or_unknown(fields: str, limit: int) -> None:
    assert wire.output_limit(peek('{"model": "m"' + fields + "}")) == limit


@pytest.mark.parametrize(
    ("options", "wanted"),
    [("null", False), ("{}", False), ('{"include_usage": true}', True), ('{"include_usage": false, "x": 1}', False)],
)
def test_usage_is_wanted_where_it_is_asked_for(options: str, wanted: bool) -> None:
    assert wire.wants_usage(peek('{"model": "m", "stream_options": ' + options + "}")) is wanted


@pytest.mark.parametrize("options", ["3", "[]", '{"include_usage": "yes"}'])
def test_stream_options_of_another_type_are_named(options: str) -> None:
    with pytest.raises(Malformed) as caught:
        wire.wants_usage(peek('{"model": "m", "stream_options": ' + options + "}"))
    assert caught.value.refusal.param == "stream_options"


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ("", {}),
        (', "n": 1, "tools": [], "logprobs": false, "response_format": {"type": "text"}, "tool_choice": "none"', {}),
        (', "top_logprobs": 0, "logit_bias": {}, "suffix": null', {}),
        (', "n": 2', {Feature.CHOICES: "n"}),
        (', "best_of": 2, "n": 2', {Feature.CHOICES: "best_of"}),
        (', "tool_choice": "auto"', {Feature.TOOLS: "tool_choice"}),
        (', "response_format": {"type": "json_object"}', {Feature.STRUCTURED_OUTPUT: "response_format"}),
        (', "response_format": 3', {Feature.STRUCTURED_OUTPUT: "response_format"}),
        (', "messages": [{"content": [{"type": "image_url", "image_url": {}}]}]', {Feature.IMAGES: "messages"}),
        (', "messages": [{"content": [{"type": "input_audio"}]}]', {Feature.AUDIO: "messages"}),
        (', "prompt": ["a", "b"]', {Feature.PROMPTS: "prompt"}),
        (', "prompt": [[1, 2], [3]]', {Feature.PROMPTS: "prompt"}),
        (', "prompt": [ 1, 2]', {Feature.TOKEN_IDS: "prompt"}),
        (', "prompt": "[a"', {}),
    ],
)
def test_features_are_found_with_the_field_that_asks(fields: str, asked: dict[Feature, str]) -> None:
    assert wire.features(('{"model": "m"' + fields + "}").encode()) == asked


@pytest.mark.parametrize(
    ("tier", "name"),
    [("priority", "interactive"), ("fast", "interactive"), ("default", "standard"), ("auto", "standard")],
)
def test_a_service_tier_is_a_class(tier: str, name: str) -> None:
    seen = peek('{"model": "m", "service_tier": "' + tier + '"}')
    assert wire.service_class(seen, None, CLASSES, FAST).name == name


def test_a_tier_whose_class_is_not_configured_gets_the_default() -> None:
    assert wire.service_class(peek('{"model": "m", "service_tier": "flex"}'), None, CLASSES, USUAL) is USUAL


def test_the_header_wins_over_the_tier() -> None:
    seen = peek('{"model": "m", "service_tier": "priority"}')
    assert wire.service_class(seen, b" standard ", CLASSES, FAST) is USUAL


def test_an_unknown_class_or_tier_is_named_with_those_that_there_are() -> None:
    with pytest.raises(Malformed, match="interactive, standard") as caught:
        wire.service_class(peek('{"model": "m"}'), b"\xfcber", CLASSES, USUAL)
    assert caught.value.refusal.param == "x-priority-class"
    with pytest.raises(Malformed, match="priority") as caught:
        wire.service_class(peek('{"model": "m", "service_tier": "gold"}'), None, CLASSES, USUAL)
    assert caught.value.refusal.param == "service_tier"


def test_without_headers_the_objective_is_the_classes() -> None:
    assert wire.objective(USUAL, {}) == Objective(10_000, 50, 60_000)


def test_headers_take_the_place_of_the_classes_objective() -> None:
    given = {b"x-slo-ttft-ms": b"250", b"x-slo-tpot-ms": b"20.7", b"x-deadline-ms": b"1e3"}
    assert wire.objective(USUAL, given) == Objective(250, 20, 1_000)


@pytest.mark.parametrize(
    ("timeout", "total_ms"),
    [(b"5", 5_000), (b"600", 60_000), (b"0.0001", 60_000), (b"soon", 60_000), (b"nan", 60_000), (b"inf", 60_000)],
)
def test_the_sdks_own_time_out_bounds_the_total(timeout: bytes, total_ms: int) -> None:
    assert wire.objective(USUAL, {b"x-stainless-read-timeout": timeout}).total_ms == total_ms


@pytest.mark.parametrize("name", [b"x-slo-ttft-ms", b"x-slo-tpot-ms", b"x-deadline-ms"])
@pytest.mark.parametrize("value", [b"", b"0", b"-5", b"nan", b"inf", b"soon", b"\xff", b"1\x00"])
def test_an_objective_that_is_no_positive_number_is_named(name: bytes, value: bytes) -> None:
    with pytest.raises(Malformed) as caught:
        wire.objective(USUAL, {name: value})
    assert caught.value.refusal.param == name.decode()


def test_an_objective_is_at_most_a_day_and_at_least_a_millisecond() -> None:
    assert wire.objective(USUAL, {b"x-deadline-ms": b"1e15", b"x-slo-ttft-ms": b"0.001"}) == Objective(
        1, 50, 86_400_000
    )


def test_only_generations_stream() -> None:
    assert set(Kind) - wire.KINDS_THAT_STREAM == {Kind.EMBEDDINGS, Kind.TOKENIZE}
