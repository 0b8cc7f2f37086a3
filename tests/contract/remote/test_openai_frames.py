"""What engines' frames, bodies, refusals and metrics mean."""

import json
from typing import Any

import pytest

from backends.openai_frames import Part, Seen, error_text, look, read_usage, usage_in_tail
from backends.openai_probe import DIALECTS, engine_of, kinds_of, kv_tokens, read_gauge, samples, slots
from backends.openai_refusal import WAIT_MOST_S, failure_of, retry_after_s
from backends.protocol import BackendBusy, BackendError, Gauge, Kind, Refused, Usage

U = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


@pytest.mark.parametrize(
    ("event", "seen"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, Seen(Part.OTHER)),
        ({"choices": [{"delta": {"content": "a"}}], "usage": None}, Seen(Part.OUTPUT)),
        ({"choices": [{"delta": {"reasoning_content": "a"}}]}, Seen(Part.OUTPUT)),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, Seen(Part.OUTPUT)),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, Seen(Part.OTHER)),
        ({"choices": [{"text": "a"}], "usage": U}, Seen(Part.OUTPUT, Usage(7, 3))),
        ({"choices": [{"text": ""}]}, Seen(Part.OTHER)),
        ({"choices": [], "usage": U}, Seen(Part.USAGE, Usage(7, 3))),
        ({"choices": []}, Seen(Part.OTHER)),
        ({"choices": [None]}, Seen(Part.OTHER)),
        ({"error": {"message": "bad", "code": 500}}, Seen(Part.ERROR, None, "bad")),
        ({"error": "bad"}, Seen(Part.ERROR, None, "bad")),
        ({"error": None, "choices": [{"delta": {"content": "a"}}]}, Seen(Part.OUTPUT)),
        ({"type": "error", "error": {"type": "overloaded_error"}}, Seen(Part.ERROR, None, "overloaded_error")),
        ({"type": "error", "code": "server_error", "message": "bad"}, Seen(Part.ERROR, None, "bad")),
        ({"type": "response.created", "response": {"usage": None}}, Seen(Part.OTHER)),
        ({"type": "response.output_text.delta", "delta": "a"}, Seen(Part.OUTPUT)),
        (
            {"type": "response.completed", "response": {"usage": {"input_tokens": 7, "output_tokens": 3}}},
            Seen(Part.END, Usage(7, 3)),
        ),
        ({"type": "message_start", "message": {"usage": {"input_tokens": 7}}}, Seen(Part.OTHER, Usage(7))),
        ({"type": "content_block_delta", "delta": {"text": "a"}}, Seen(Part.OUTPUT)),
        ({"type": "message_delta", "usage": {"output_tokens": 3}}, Seen(Part.OTHER, Usage(0, 3))),
        ({"type": "message_stop"}, Seen(Part.END)),
        ({}, Seen(Part.OTHER)),
    ],
)
def test_look(event: dict[str, Any], seen: Seen) -> None:
    assert look(json.dumps(event).encode()) == seen


def test_look_at_what_is_no_object() -> None:
    assert look(b"") == Seen(Part.OTHER)
    assert look(b"[DONE]") == Seen(Part.END)
    for data in (b"Internal Server Error", b'{"choices":', b"[1]"):
        with pytest.raises(ValueError, match="no JSON object"):
            look(data)


@pytest.mark.parametrize(
    ("value", "usage"),
    [
        (U, Usage(7, 3)),
        ({**U, "prompt_tokens_details": {"cached_tokens": 5}}, Usage(7, 3, 5)),
        ({"input_tokens": 7, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 5}}, Usage(7, 3, 5)),
        ({"input_tokens": 2, "output_tokens": 3, "cache_read_input_tokens": 5}, Usage(7, 3, 5)),
        ({"prompt_tokens": True, "completion_tokens": "3"}, None),
        ({"prompt_tokens": -1}, None),
        (None, None),
        ([], None),
    ],
)
def test_usage(value: Any, usage: Usage | None) -> None:
    assert read_usage(value) == usage


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        ({"choices": [{"text": 'the "usage":{"prompt_tokens":99}'}], "usage": U}, Usage(7, 3)),
        ({"usage": U, "choices": [{"text": "usage"}]}, Usage(7, 3)),
        ({"usage": U, "x": {"usage": -0.5}}, Usage(7, 3)),
        (
            {"usage": {**U, "prompt_tokens_details": {"cached_tokens": 5}}, "prompt_logprobs": [{}] * 1000},
            Usage(7, 3, 5),
        ),
        ({"usage": None}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,", " :\n")])
def test_usage_at_the_end_of_a_body(body: dict[str, Any], usage: Usage | None, separators: tuple[str, str]) -> None:
    assert usage_in_tail(json.dumps(body, separators=separators).encode()) == usage


def test_usage_that_is_cut_off() -> None:
    assert usage_in_tail(b'{"usage":{"prompt_tokens":7,') is None
    assert usage_in_tail(b'"usage":') is None


def test_error_texts_are_bounded() -> None:
    assert error_text({"message": "x" * 10_000}) == "x" * 500
    assert error_text({"strange": 1}) == "{'strange': 1}"


def openai(message: str, **more: Any) -> bytes:
    return json.dumps({"error": {"message": message, "type": "t", "param": "p", "code": 400, **more}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (400, openai("bad temperature"), "invalid_request"),
        (400, openai("This model's maximum context length is 8 tokens"), "context_length_exceeded"),
        (400, openai("too long", code="context_length_exceeded"), "context_length_exceeded"),
        (404, openai("The model `x` does not exist."), "unknown_model"),
        (409, openai("no"), "invalid_request"),
        (413, openai("large"), "too_large"),
        (415, openai("media"), "unsupported_media_type"),
        (422, openai("no"), "invalid_request"),
    ],
)
def test_refusals(status: int, body: bytes, code: str) -> None:
    refused = failure_of(status, {}, body)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code, refused.param, refused.body) == (status, code, "p", body)
    assert refused.message == json.loads(body)["error"]["message"]


def test_a_refusal_in_fastapis_words() -> None:
    body = b'{"detail":[{"loc":["body","n"],"msg":"bad"}]}'
    refused = failure_of(422, {}, body)
    assert isinstance(refused, Refused)
    assert refused.body == body
    assert "bad" in refused.message


def test_a_refusal_that_is_no_json_is_not_passed_on() -> None:
    refused = failure_of(400, {}, b"<html>")
    assert isinstance(refused, Refused)
    assert (refused.message, refused.body) == ("the engine answered 400", None)


def test_what_it_cannot_do_is_the_requests_fault() -> None:
    refused = failure_of(501, {}, openai("no suffix"))
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code, refused.body) == (400, "unsupported_feature", None)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (500, openai("boom"), "500: boom"),
        (502, b"<html>", "answered 502"),
        (401, openai("bad key"), "api_key_env"),
        (403, b"", "api_key_env"),
        (404, b"", "url right"),
        (404, b'{"detail":"Not Found"}', "url right"),
        (302, b"", "answered 302"),
        (204, b"", "answered 204"),
        (408, b"", "answered 408"),
    ],
)
def test_failures(status: int, body: bytes, says: str) -> None:
    failure = failure_of(status, {}, body)
    assert isinstance(failure, BackendError)
    assert says in str(failure)


@pytest.mark.parametrize("status", [429, 503, 529])
def test_busy(status: int) -> None:
    busy = failure_of(status, {b"retry-after": b"2"}, openai("full"))
    assert isinstance(busy, BackendBusy)
    assert (str(busy), busy.retry_after_s) == ("full", 2.0)


DATE = b"Tue, 01 Dec 2026 11:00:00 GMT"


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, 0.0),
        ({b"retry-after": b"1.5"}, 1.5),
        ({b"retry-after": b"9", b"retry-after-ms": b"250"}, 0.25),
        ({b"retry-after-ms": b"x", b"retry-after": b"3"}, 3.0),
        ({b"retry-after": b"Tue, 01 Dec 2026 11:00:30 GMT", b"date": DATE}, 30.0),
        ({b"retry-after": b"Tue, 01 Dec 2026 10:00:30 GMT", b"date": DATE}, 0.0),
        ({b"retry-after": b"Tue, 01 Dec 2026 11:00:30 GMT"}, 0.0),
        ({b"retry-after": b"-5"}, 0.0),
        ({b"retry-after": b"nan"}, 0.0),
        ({b"retry-after": b"1e99"}, WAIT_MOST_S),
        ({b"retry-after": b"\xff"}, 0.0),
    ],
)
def test_retry_after(headers: dict[bytes, bytes], wait_s: float) -> None:
    assert retry_after_s(headers) == wait_s


VLLM = b"""# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b}"} 3.0
vllm:num_requests_running{engine="1",model_name="a b}"} 2.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 50.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 5e-1
vllm:num_preemptions_total{engine="0"} 4.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{engine="1",num_gpu_blocks="100",block_size="16"} 1.0
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m"} 3.0
sglang:num_queue_reqs{model_name="m"} 1.0
sglang:token_usage{} 0.5
"""
LLAMA = b"# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 2\nllamacpp:requests_deferred 0\n"


TRTLLM = b"""# HELP trtllm_num_requests_running Number of active requests
# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 5.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 3.0
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.6
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m"} 1000.0
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="m"} 64.0
trtllm_max_batch_size_static{engine_type="trtllm",model_name="m"} 64.0
trtllm_num_requests_completed_total{engine_type="trtllm",model_name="m"} 2.0
"""


@pytest.mark.parametrize(
    ("text", "engine", "gauge"),
    [
        (TRTLLM, "trtllm", Gauge(running=5, waiting=3, kv_used=0.6)),
        (VLLM, "vllm", Gauge(running=5, waiting=1, kv_used=0.5, preemptions=4)),
        (SGLANG, "sglang", Gauge(running=3, waiting=1, kv_used=0.5)),
        (LLAMA, "llama.cpp", Gauge(running=2, waiting=0)),
        (b"", "vllm", Gauge()),
        (b"vllm:num_requests_running NaN-ish\n", "vllm", Gauge()),
    ],
)
def test_gauges(text: bytes, engine: str, gauge: Gauge) -> None:
    assert read_gauge(text, DIALECTS[engine]) == gauge


def test_samples_with_timestamps_and_none() -> None:
    assert samples(b'a 1 1700000000\na{x="y"} 2\nab 3\n', "a") == [1.0, 2.0]
    assert samples(b"a 1\n", "") == []


def test_the_size_of_the_cache() -> None:
    assert kv_tokens(VLLM) == 3200
    assert kv_tokens(SGLANG) == 0
    assert (kv_tokens(TRTLLM), slots(TRTLLM), slots(VLLM)) == (64_000, 64, 0)


def test_engines_and_kinds() -> None:
    assert [engine_of(owner) for owner in ("vllm", "SGLang", "llamacpp", "tensorrt_llm", "me")] == [
        "vllm",
        "sglang",
        "llama.cpp",
        "trtllm",
        "unknown",
    ]
    assert kinds_of(frozenset()).keys() == {Kind.CHAT, Kind.COMPLETION}
    paths = frozenset({"/v1/chat/completions", "/v1/responses", "/tokenize", "/metrics"})
    assert kinds_of(paths) == {
        Kind.CHAT: "/v1/chat/completions",
        Kind.RESPONSES: "/v1/responses",
        Kind.TOKENIZE: "/tokenize",
    }
