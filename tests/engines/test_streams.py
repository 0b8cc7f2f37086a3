"""Plain text in our own frames, and what a stream promises besides its bytes."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from backends.features import Feature
from backends.protocol import BackendBusy, Kind, Refused
from tests.engines.asking import (
    CHAT,
    LONG,
    MESSAGES,
    SCHEMA,
    TEXT,
    USAGE,
    answer,
    events,
    joined,
    prompt,
    read,
    server_answer,
    shaped,
    start,
)
from tests.engines.conftest import CHUNK

if TYPE_CHECKING:
    from backends.vllm_engine import InProcess
    from tests.engines.conftest import Server

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

PLAIN: dict[str, tuple[Kind, dict[str, Any]]] = {
    "chat": (Kind.CHAT, CHAT),
    "chat with usage": (Kind.CHAT, CHAT | {"stream_options": USAGE}),
    "chat that stops": (Kind.CHAT, CHAT | {"stop": ["e", "a"]}),
    "chat of one token": (Kind.CHAT, CHAT | {"max_tokens": 1}),
    "completion": (Kind.COMPLETION, TEXT),
    "completion with usage": (Kind.COMPLETION, TEXT | {"stream_options": USAGE}),
}

NOT_PLAIN: dict[str, tuple[Kind, dict[str, Any]]] = {
    "echo": (Kind.COMPLETION, TEXT | {"echo": True}),
    "token ids": (Kind.CHAT, CHAT | {"return_token_ids": True}),
    "continuous usage": (Kind.CHAT, CHAT | {"stream_options": USAGE | {"continuous_usage_stats": True}}),
    "logprobs": (Kind.CHAT, CHAT | {"logprobs": True}),
    "two choices": (Kind.CHAT, CHAT | {"n": 2, "temperature": 1, "seed": 1}),
    "no generation prompt": (Kind.CHAT, CHAT | {"add_generation_prompt": False}),
}


@pytest.mark.parametrize("case", PLAIN)
async def test_our_frames_are_vllms_frames(case: str, plain: InProcess, server: Server) -> None:
    kind, body = PLAIN[case]
    body = body | {"stream": True}
    _, stream = await start(plain, kind, body)
    assert type(stream).__name__ == "Plain"
    ours = b"".join(chunk.data for chunk in await read(stream))
    status, theirs = await server_answer(server, kind, body)
    assert status == 200
    assert joined(events(ours)) == joined(theirs)


@pytest.mark.parametrize("case", NOT_PLAIN)
async def test_other_forms_go_through_vllms_generators(case: str, plain: InProcess, server: Server) -> None:
    kind, body = NOT_PLAIN[case]
    body = body | {"stream": True}
    _, stream = await start(plain, kind, body)
    assert type(stream).__name__ == "Events"
    ours = b"".join(chunk.data for chunk in await read(stream))
    assert joined(events(ours)).rest == joined((await server_answer(server, kind, body))[1]).rest


async def test_frames_are_whole_events_in_vllms_field_order(plain: InProcess, server: Server) -> None:
    body = CHAT | {"stream": True, "max_tokens": 3, "stream_options": USAGE}
    chunks = await read((await start(plain, Kind.CHAT, body, request_id="abc"))[1])
    assert all(chunk.data.endswith(b"\n\n") for chunk in chunks)
    ours = [json.loads(line[6:]) for chunk in chunks for line in chunk.data.decode().splitlines() if "{" in line]
    _, data = await asyncio.to_thread(server.post, "/v1/chat/completions", json.dumps(body).encode())
    theirs = [json.loads(line[6:]) for line in data.decode().splitlines() if "{" in line]
    for place in (0, 1, -2, -1):
        assert list(ours[place]) == list(theirs[place])
        assert list(ours[place]["choices"][:1]) == list(theirs[place]["choices"][:1]) or place != 0
    assert {one["id"] for one in ours} == {"chatcmpl-abc"}
    assert len({one["created"] for one in ours}) == 1


async def test_a_slow_reader_gets_merged_chunks(plain: InProcess) -> None:
    body = CHAT | {"stream": True, "max_tokens": 200, "ignore_eos": True}
    _, stream = await start(plain, Kind.CHAT, body)
    first = await stream.next()
    while (await plain.gauge()).running:  # the engine finishes while nobody reads
        await asyncio.sleep(0.01)
    rest = await read(stream)
    assert first is not None
    assert len(rest) <= 2
    assert first.tokens + sum(chunk.tokens for chunk in rest) == 200
    assert rest[-1].last


async def test_a_whole_answer_tells_of_its_first_token(plain: InProcess) -> None:
    _, stream = await start(plain, Kind.CHAT, CHAT | {"max_tokens": 300, "ignore_eos": True})
    first = await stream.next()
    assert first is not None
    assert (first.data, first.tokens) == (b"", 1)
    assert (await plain.gauge()).running in {0, 1}
    (last,) = await read(stream)
    assert last.usage is not None
    assert last.usage.completion_tokens == 300 == first.tokens + last.tokens


async def test_planning_leaves_the_engine_alone(plain: InProcess) -> None:
    await plain.gauge()
    plans = [await plain.plan(prompt(Kind.CHAT, CHAT | {"stream": stream})) for stream in (True, False)]
    assert plain._llm.get_num_unfinished_requests() == 0
    assert (await plain.gauge()).steps == ()
    for plan in plans:
        assert (plan.prompt_tokens, plan.output_limit, plan.exact) == (21, 24, True)
        plan.close()
        plan.close()
        with pytest.raises(ValueError, match="used up"):
            await plain.open(plan)


async def test_what_the_engine_refuses_has_a_name(plain: InProcess) -> None:
    cases: list[tuple[Kind, dict[str, Any], int, str, str | None]] = [
        (Kind.CHAT, CHAT | {"max_tokens": "many"}, 400, "invalid_request", "max_tokens"),
        (Kind.CHAT, CHAT | {"messages": 3}, 400, "invalid_request", None),
        (Kind.CHAT, CHAT | {"temperature": -1}, 400, "invalid_request", "temperature"),
        (
            Kind.CHAT,
            CHAT | {"messages": [{"role": "user", "content": "a " * 9000}]},
            400,
            "context_length_exceeded",
            "input_tokens",
        ),
        (Kind.CHAT, CHAT | {"model": "nope"}, 404, "unknown_model", "model"),
        (Kind.COMPLETION, TEXT | {"suffix": "x"}, 400, "invalid_request", None),
        (Kind.EMBEDDINGS, {"model": "tiny", "input": "x"}, 400, "unsupported_feature", "model"),
    ]
    for kind, body, status, code, param in cases:
        with pytest.raises(Refused) as refused:
            await start(plain, kind, body)
        assert (refused.value.status, refused.value.code) == (status, code), body
        assert param is None or refused.value.param == param, body


async def test_vllms_own_limit_is_busy_and_only_when_opened(plain: InProcess) -> None:
    scheduler = plain._llm.scheduler_config
    _, running = await start(plain, Kind.CHAT, LONG)
    scheduler.max_num_queued_reqs = 1
    try:
        plan = await plain.plan(prompt(Kind.CHAT, CHAT))
        with pytest.raises(BackendBusy):
            await plain.open(plan)
    finally:
        scheduler.max_num_queued_reqs = None
        await running.aclose()


async def test_lower_rank_goes_first(plain: InProcess) -> None:
    running = [(await start(plain, Kind.CHAT, LONG))[1] for _ in range(4)]
    order: list[str] = []

    async def first(name: str, rank: int) -> None:
        _, stream = await start(plain, Kind.CHAT, CHAT | {"max_tokens": 2, "stream": True}, rank=rank)
        await stream.next()
        order.append(name)
        await stream.aclose()

    later = [asyncio.ensure_future(first("batch", 2))]
    while (await plain.gauge()).waiting != 1:
        await asyncio.sleep(0.005)
    later.append(asyncio.ensure_future(first("interactive", 0)))
    while (await plain.gauge()).waiting != 2:
        await asyncio.sleep(0.005)
    await running[0].aclose()
    await asyncio.gather(*later)
    for stream in running[1:]:
        await stream.aclose()
    assert order == ["interactive", "batch"]


async def test_gauge_and_bundle_tell_what_runs(plain: InProcess) -> None:
    await plain.gauge()
    await answer(plain, Kind.CHAT, CHAT | {"messages": [{"role": "user", "content": "word " * 600}], "max_tokens": 8})
    gauge = await plain.gauge()
    assert (gauge.running, gauge.waiting, gauge.preemptions) == (0, 0, 0)
    assert sum(prefill for prefill, _, _, _ in gauge.steps) > 600
    assert max(prefill for prefill, _, _, _ in gauge.steps) <= CHUNK
    assert all(seconds > 0 for _, _, _, seconds in gauge.steps)
    bundle = plain.bundle
    assert (bundle.engine, bundle.context_tokens, bundle.max_running, bundle.precision) == ("vllm", 2048, 4, "bfloat16")
    assert bundle.revision.startswith("sha256:")
    assert bundle.kv_tokens > 10_000
    assert bundle.kinds == {"chat", "completion", "responses", "messages", "tokenize"}
    assert bundle.lacks(frozenset({Feature.IMAGES, Feature.TOOLS})) == {Feature.IMAGES}


async def test_messages_errors_have_their_own_form(plain: InProcess) -> None:
    with pytest.raises(Refused) as refused:
        await start(plain, Kind.MESSAGES, {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "temperature": -1})
    assert refused.value.body is not None
    assert json.loads(refused.value.body)["type"] == "error"


async def test_twenty_of_twenty_answers_fit_the_schema(plain: InProcess) -> None:
    for seed in range(20):
        body = CHAT | {"temperature": 1, "seed": seed, "max_tokens": 200, "stream": seed % 2 == 0} | shaped(SCHEMA)
        _, found, _, _ = await answer(plain, Kind.CHAT, body)
        text = joined(found).text["0 choices[].delta.content"] if body["stream"] else _content(found)
        value = json.loads(text)
        assert set(value) == {"n", "ok"}
        assert type(value["n"]) is int
        assert 0 <= value["n"] <= 99
        assert type(value["ok"]) is bool


def _content(answer: Any) -> str:
    content = answer["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content
