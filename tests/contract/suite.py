"""What every backend must do, as one list of cases. A case takes a Bench; `needs` names what it relies on.

Importable by tests elsewhere: `for case in CASES: await play(make_bench, case)`.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest

from backends.protocol import BackendLost, Kind, Refused, Stream
from tests.contract.bench import Bench, to_end, until

Case = Callable[[Bench], Awaitable[None]]
MakeBench = Callable[[], AbstractAsyncContextManager[Bench]]

CASES: list[Case] = []
NEEDS: dict[str, frozenset[str]] = {}


def case(*needs: str) -> Callable[[Case], Case]:
    def note(one: Case) -> Case:
        CASES.append(one)
        NEEDS[one.__name__] = frozenset(needs)
        return one

    return note


async def play(make_bench: MakeBench, one: Case) -> None:
    """One case on a bench of its own. Fails when it leaves a request in the engine, or a task after the backend."""
    before = asyncio.all_tasks()
    async with make_bench() as bench:
        if missing := NEEDS[one.__name__] - bench.can:
            pytest.skip(f"this backend has no {', '.join(sorted(missing))}")
        await one(bench)
        if "kill" not in NEEDS[one.__name__]:
            await bench.idle()

    async def nothing_left() -> bool:
        return asyncio.all_tasks() <= before

    await until(nothing_left, 1.0)


@case()
async def planning_leaves_the_engine_alone(bench: Bench) -> None:
    plan = await bench.backend.plan(bench.prompt(max_tokens=7))
    assert await bench.busy() == 0
    assert plan.maker == bench.backend.name
    assert plan.prompt_tokens > 0
    assert plan.output_limit == 7
    plan.close()
    plan.close()


@case("exact")
async def planned_prompt_tokens_are_those_of_the_usage(bench: Bench) -> None:
    for kind in (Kind.CHAT, Kind.COMPLETION):
        for text in (
            "Hi",
            "one two  three\n\nfour, five-six",
            "unfortunately extraordinarily",
            "héllo wörld 日本語 🙂",
        ):
            answer = await bench.answer(kind=kind, text=text, max_tokens=2)
            assert answer.plan.exact
            assert answer.plan.prompt_tokens == answer.usage.prompt_tokens


@case()
async def a_chat_streams_role_text_end_and_done(bench: Bench) -> None:
    answer = await bench.answer(max_tokens=6)
    first, last = answer.frames[0], answer.frames[-1]
    assert answer.events[-1] == "[DONE]"
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert {frame["id"] for frame in answer.frames} == {first["id"]}
    assert {frame["model"] for frame in answer.frames} == {bench.model}
    assert len(answer.finish_reasons()) == 1
    assert last["choices"][0]["finish_reason"] in ("stop", "length")
    assert answer.text()
    assert 1 <= answer.usage.completion_tokens <= 6


@case()
async def a_completion_streams_text_end_and_done(bench: Bench) -> None:
    answer = await bench.answer(kind=Kind.COMPLETION, max_tokens=6)
    assert answer.events[-1] == "[DONE]"
    assert {frame["object"] for frame in answer.frames} == {"text_completion"}
    assert len(answer.finish_reasons()) == 1
    assert answer.text()


@case()
async def whole_answers_are_one_json_body(bench: Bench) -> None:
    for kind, name in ((Kind.CHAT, "chat.completion"), (Kind.COMPLETION, "text_completion")):
        answer = await bench.answer(kind=kind, stream=False)
        assert len(answer.frames) == 1
        body = answer.frames[0]
        assert body["object"] == name
        assert len(answer.finish_reasons()) == 1
        assert answer.text()
        assert body["usage"]["completion_tokens"] == answer.usage.completion_tokens
        assert body["usage"]["prompt_tokens"] == answer.usage.prompt_tokens
        assert body["usage"]["total_tokens"] == answer.usage.prompt_tokens + answer.usage.completion_tokens


@case("repeats")
async def streamed_and_whole_say_the_same(bench: Bench) -> None:
    for kind in (Kind.CHAT, Kind.COMPLETION):
        streamed = await bench.answer(kind=kind, max_tokens=12)
        whole = await bench.answer(kind=kind, max_tokens=12, stream=False)
        assert streamed.text() == whole.text()
        assert streamed.usage == whole.usage
        assert streamed.finish_reasons() == whole.finish_reasons()


@case()
async def usage_is_shown_only_to_who_asked(bench: Bench) -> None:
    for kind in (Kind.CHAT, Kind.COMPLETION):
        hidden = await bench.answer(kind=kind)
        assert not any(frame.get("usage") for frame in hidden.frames)
        shown = await bench.answer(kind=kind, usage=True)
        *others, last = shown.frames
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == shown.usage.completion_tokens
        assert last["usage"]["prompt_tokens"] == shown.usage.prompt_tokens
        assert all(frame["choices"] for frame in others)
        assert hidden.usage.completion_tokens == shown.usage.completion_tokens


@case()
async def the_first_chunk_carries_a_token(bench: Bench) -> None:
    """It is when the prefill part of a lease goes back, and the point of no return."""
    for streamed in (True, False):
        answer = await bench.answer(stream=streamed, max_tokens=20)
        counted = [chunk.tokens for chunk in answer.chunks]
        assert next(index for index, tokens in enumerate(counted) if tokens) <= 1
        assert 1 <= answer.tokens <= answer.usage.completion_tokens


@case()
async def max_tokens_bounds_the_answer(bench: Bench) -> None:
    for limit in (1, 2, 9):
        answer = await bench.answer(max_tokens=limit, ignore_eos=True)
        assert answer.usage.completion_tokens == limit
        assert answer.finish_reasons() == ["length"]


@case()
async def max_completion_tokens_bounds_the_answer(bench: Bench) -> None:
    prompt = bench.prompt(max_tokens=None, max_completion_tokens=3, ignore_eos=True)
    prompt.max_tokens = 3
    stream = await bench.backend.open(await bench.backend.plan(prompt))
    chunks = await to_end(stream)
    await stream.aclose()
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


@case("stop", "repeats")
async def a_stop_string_ends_the_answer_before_it(bench: Bench) -> None:
    text = (await bench.answer(max_tokens=24, ignore_eos=True)).text()
    stop = text[len(text) // 2 : len(text) // 2 + 7]  # across tokens
    expected = text[: text.index(stop)]
    for fields in ({"stop": stop}, {"stop": ["\u2603 never", stop]}):
        for streamed in (True, False):
            answer = await bench.answer(max_tokens=24, ignore_eos=True, stream=streamed, **fields)
            assert answer.text() == expected
            assert answer.finish_reasons() == ["stop"]
            assert answer.usage.completion_tokens < 24


@case("choices")
async def several_choices_are_told_apart(bench: Bench) -> None:
    for streamed in (True, False):
        answer = await bench.answer(n=3, seed=7, max_tokens=6, temperature=1.0, stream=streamed, ignore_eos=True)
        assert answer.plan.output_limit == 18
        assert answer.usage.completion_tokens == 18
        assert [answer.finish_reasons(index) for index in range(3)] == [["length"]] * 3
        assert all(answer.text(index) for index in range(3))


@case("checks")
async def wrong_values_are_refused_with_the_field(bench: Bench) -> None:
    for name, value in (("max_tokens", "many"), ("max_tokens", -3), ("temperature", -1.5), ("top_p", 7), ("n", 0)):
        refused = await bench.refusal(**{name: value})
        assert refused.status in (400, 422)
        assert name in (refused.param or "") or name in refused.message
        assert await bench.busy() == 0


@case("checks")
async def a_prompt_too_long_is_refused(bench: Bench) -> None:
    words = "token " * (bench.backend.bundle.context_tokens + 10)
    for kind in (Kind.CHAT, Kind.COMPLETION):
        refused = await bench.refusal(kind=kind, text=words)
        assert refused.status == 400
        assert refused.code == "context_length_exceeded"
        assert await bench.busy() == 0


@case()
async def what_the_bundle_lacks_is_refused_by_name(bench: Bench) -> None:
    for name, value in bench.unsupported.items():
        with pytest.raises(Refused) as caught:
            await bench.backend.plan(bench.prompt(**{name: value}))
        assert (caught.value.status, caught.value.code) == (400, "unsupported_feature")
        assert (caught.value.param or "").startswith(name)


@case("repeats")
async def many_at_once_do_not_mix(bench: Bench) -> None:
    texts = [f"Say number {number}." for number in range(12)]
    alone = [(await bench.answer(text=text, max_tokens=10)).text() for text in texts]
    together = await asyncio.gather(*(bench.answer(text=text, max_tokens=10) for text in texts))
    assert [answer.text() for answer in together] == alone


@case()
async def a_stream_never_read_can_be_closed(bench: Bench) -> None:
    stream = await bench.open(max_tokens=bench.long_tokens, ignore_eos=True)
    await stream.aclose()
    await bench.idle()
    assert await stream.next() is None


@case()
async def closing_before_the_first_token_frees_the_engine(bench: Bench) -> None:
    for streamed in (True, False):
        stream = await bench.open(max_tokens=bench.long_tokens, ignore_eos=True, stream=streamed)
        reader = asyncio.ensure_future(stream.next())
        await asyncio.sleep(0)
        await stream.aclose()
        await bench.idle()
        await asyncio.wait_for(asyncio.wait([reader]), bench.idle_s)
        reader.exception()


@case()
async def closing_between_tokens_frees_the_engine(bench: Bench) -> None:
    stream = await bench.open(max_tokens=bench.long_tokens, ignore_eos=True)
    for _ in range(3):
        assert await stream.next() is not None
    await stream.aclose()
    await bench.idle()
    assert await stream.next() is None


@case()
async def closing_an_unstreamed_answer_frees_the_engine(bench: Bench) -> None:
    stream = await bench.open(max_tokens=bench.long_tokens, ignore_eos=True, stream=False)
    reader = asyncio.ensure_future(to_end(stream))
    await asyncio.sleep(0.02)
    await stream.aclose()
    await bench.idle()
    await asyncio.wait_for(asyncio.wait([reader]), bench.idle_s)
    reader.exception()


@case()
async def another_task_can_close_and_the_reader_ends(bench: Bench) -> None:
    stream = await bench.open(max_tokens=bench.long_tokens, ignore_eos=True)
    assert await stream.next() is not None
    reader = asyncio.ensure_future(to_end(stream))
    await asyncio.sleep(0.01)
    await asyncio.gather(stream.aclose(), stream.aclose())
    await asyncio.wait_for(reader, bench.idle_s)
    await bench.idle()


@case()
async def a_cancelled_reader_can_close(bench: Bench) -> None:
    stream = await bench.open(max_tokens=bench.long_tokens, ignore_eos=True)
    reader = asyncio.ensure_future(to_end(stream))
    await asyncio.sleep(0.01)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await stream.aclose()
    await bench.idle()


@case()
async def closing_is_idempotent_and_harmless_at_the_end(bench: Bench) -> None:
    stream = await bench.open(max_tokens=3)
    await to_end(stream)
    assert await stream.next() is None
    for _ in range(3):
        await stream.aclose()
    assert await stream.next() is None


@case()
async def random_leavers_leave_nothing(bench: Bench) -> None:
    dice = random.Random(1)

    async def leave(number: int) -> None:
        stream = await bench.open(text=f"Request {number}.", max_tokens=24, ignore_eos=True, stream=dice.random() < 0.7)
        reader = asyncio.ensure_future(_some(stream, dice.randrange(8)))
        await asyncio.wait([reader], timeout=dice.random() * 0.2)
        reader.cancel()
        await asyncio.wait([reader])
        await stream.aclose()

    for _ in range(5):
        await asyncio.gather(*(leave(number) for number in range(12)))
    await bench.idle()


async def _some(stream: Stream, chunks: int) -> None:
    for _ in range(chunks):
        if await stream.next() is None:
            return


@case()
async def a_late_reader_gets_everything(bench: Bench) -> None:
    """The engine may run ahead of a slow reader; what it said waits, and nothing is lost."""
    stream = await bench.open(max_tokens=bench.long_tokens, ignore_eos=True)
    chunks = [await stream.next()]
    await asyncio.sleep(0.5)
    chunks += await to_end(stream)
    await stream.aclose()
    usages = [chunk.usage for chunk in chunks if chunk is not None and chunk.usage is not None]
    assert [usage.completion_tokens for usage in usages] == [bench.long_tokens]


@case("busy-gauge")
async def the_gauge_counts_requests(bench: Bench) -> None:
    streams = [await bench.open(text=f"{n}", max_tokens=bench.long_tokens, ignore_eos=True) for n in range(3)]
    for stream in streams:
        assert await stream.next() is not None

    async def counted(expected: int) -> bool:
        gauge = await bench.backend.gauge()
        return (gauge.running or 0) + (gauge.waiting or 0) == expected

    await until(lambda: counted(3), 2.0)
    for stream in streams:
        await stream.aclose()
    await until(lambda: counted(0), 2.0)


@case("kill")
async def a_dead_engine_is_lost_to_everyone(bench: Bench) -> None:
    unread = await bench.open(text="unread", max_tokens=bench.long_tokens, ignore_eos=True)
    midway = await bench.open(text="midway", max_tokens=bench.long_tokens, ignore_eos=True)
    whole = await bench.open(text="whole", max_tokens=bench.long_tokens, ignore_eos=True, stream=False)
    assert await midway.next() is not None
    readers = [asyncio.ensure_future(to_end(stream)) for stream in (midway, whole)]
    await asyncio.sleep(0.01)
    await bench.kill()
    for reader in readers:
        with pytest.raises(BackendLost):
            await asyncio.wait_for(reader, 1.0)
    with pytest.raises(BackendLost):
        await asyncio.wait_for(to_end(unread), 1.0)
    with pytest.raises(BackendLost):
        await bench.backend.gauge()
    with pytest.raises(BackendLost):
        await _first(await bench.open())
    for stream in (unread, midway, whole):
        await stream.aclose()


async def _first(stream: Stream) -> None:
    try:
        await stream.next()
    finally:
        await stream.aclose()


@case("kill")
async def closing_the_backend_loses_its_streams(bench: Bench) -> None:
    stream = await bench.open(max_tokens=bench.long_tokens, ignore_eos=True)
    assert await stream.next() is not None
    reader = asyncio.ensure_future(to_end(stream))
    await asyncio.sleep(0.01)
    await bench.backend.aclose()
    with pytest.raises(BackendLost):
        await asyncio.wait_for(reader, 1.0)
    await stream.aclose()
    await bench.backend.aclose()
