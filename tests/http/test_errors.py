"""Every reason has a status, and every error a shape that its API's clients understand."""

import json

import pytest

from backends.protocol import Kind, Usage
from gateway.http.errors import STATUS, body_of, error_type, headers_of, terminal_event
from policies.reasons import Reason, Refusal

FULL = Refusal(Reason.QUEUE_FULL, "the queue is full", None, 2.0)
WAITS = {429, 503}


def headers(refusal: Refusal) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers_of(refusal)}


def test_every_reason_has_a_status_and_nothing_else_has() -> None:
    assert STATUS.keys() == set(Reason)


def test_every_status_is_an_error_that_http_knows() -> None:
    assert all(400 <= status < 600 for status in STATUS.values())


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (502, "server_error"),
        (503, "server_error"),
    ],
)
def test_error_types_are_those_of_openai(status: int, name: str) -> None:
    assert error_type(status) == name


@pytest.mark.parametrize("kind", [None, *(kind for kind in Kind if kind is not Kind.MESSAGES)])
def test_an_openai_error_names_message_type_field_and_code(kind: Kind | None) -> None:
    refusal = Refusal(Reason.INVALID_REQUEST, "n: too many", "n")
    fields = {"message": "n: too many", "type": "invalid_request_error", "param": "n", "code": "invalid_request"}
    assert json.loads(body_of(kind, refusal)) == {"error": fields}


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (Reason.INVALID_REQUEST, "invalid_request_error"),
        (Reason.UNAUTHENTICATED, "authentication_error"),
        (Reason.FORBIDDEN, "permission_error"),
        (Reason.UNKNOWN_MODEL, "not_found_error"),
        (Reason.TOO_LARGE, "request_too_large"),
        (Reason.QUEUE_FULL, "rate_limit_error"),
        (Reason.NO_BACKEND, "overloaded_error"),
        (Reason.ENGINE_LOST, "api_error"),
        (Reason.EXPIRED, "api_error"),
    ],
)
def test_an_anthropic_error_has_anthropics_shape(reason: Reason, name: str) -> None:
    body = json.loads(body_of(Kind.MESSAGES, Refusal(reason, "no")))
    assert body == {"type": "error", "error": {"type": name, "message": "no"}}


@pytest.mark.parametrize("reason", Reason)
def test_who_may_come_back_is_told_when_and_nobody_else(reason: Reason) -> None:
    told = headers(Refusal(reason, "no"))
    assert ("retry-after" in told) == ("retry-after-ms" in told) == (STATUS[reason] in WAITS)
    assert told["x-signalbox-reason"] == reason.value
    if STATUS[reason] in WAITS:
        assert told["x-should-retry"] == "true"
    if STATUS[reason] < 500 and STATUS[reason] not in WAITS:
        assert told["x-should-retry"] == "false"


def test_a_deadline_that_passed_is_not_tried_again_but_a_lost_engine_is() -> None:
    assert headers(Refusal(Reason.EXPIRED, "late"))["x-should-retry"] == "false"
    assert headers(Refusal(Reason.ENGINE_LOST, "gone"))["x-should-retry"] == "true"


def test_waiting_times_have_jitter_within_a_quarter_and_seconds_are_rounded_up() -> None:
    told = [headers(FULL) for _ in range(200)]
    waits_ms = [int(one["retry-after-ms"]) for one in told]
    assert 2000 <= min(waits_ms) < max(waits_ms) <= 2500
    assert {one["retry-after"] for one in told} <= {"2", "3"}
    assert all(int(one["retry-after"]) * 1000 >= int(one["retry-after-ms"]) for one in told)


def test_a_wait_that_is_not_known_is_a_second_or_so() -> None:
    told = headers(Refusal(Reason.NO_BACKEND, "none"))
    assert 1000 <= int(told["retry-after-ms"]) <= 1250


def test_an_unknown_key_is_told_the_scheme() -> None:
    assert headers(Refusal(Reason.UNAUTHENTICATED, "who?"))["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.COMPLETION])
def test_the_last_event_of_a_broken_stream_has_the_error_and_the_usage(kind: Kind) -> None:
    event = terminal_event(kind, Refusal(Reason.ENGINE_LOST, "gone"), Usage(7, 3))
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    data = json.loads(event[6:])
    assert data["error"] == {"message": "gone", "type": "server_error", "param": None, "code": "engine_lost"}
    assert data["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def test_the_last_event_is_a_typed_one_where_the_api_has_types() -> None:
    refusal = Refusal(Reason.EXPIRED, "late")
    for kind in (Kind.RESPONSES, Kind.MESSAGES):
        name, data = terminal_event(kind, refusal, Usage(7, 3)).split(b"\n", 1)
        assert name == b"event: error"
        assert json.loads(data.removeprefix(b"data: "))["type"] == "error"
