"""Answers on the wire, made of tokens or text as an engine gives them."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.answer import QUIET_TOKENS
from backends.protocol import Chunk, Kind, Usage
from backends.scribe import Scribe
from backends.words import Words
from tests.contract.bench import Answer as Read
from tests.tokens.test_scribe import EVERYTHING, TEXT_ONLY, prompt

TEXT = "The signal box stands by the river. café 日本語 🙂🚂 end"


async def begin(words: Words | None, kind: Kind = Kind.CHAT, usage: bool = False, **fields: Any) -> Any:
    """A plan and its answer, yet without a word."""
    scribe = Scribe("engine", EVERYTHING if words else TEXT_ONLY, words, 512)
    asked = prompt(kind, **fields)
    asked.want_usage = usage
    plan = await scribe.plan(asked)
    return plan, scribe.answer(plan, "id-1", "print")


def drain(answer: Any) -> list[Chunk]:
    chunks = []
    while (chunk := answer.take()) is not None:
        chunks.append(chunk)
    return chunks


def feed(answer: Any, ids: Sequence[int], sizes: Sequence[int] = (1,)) -> list[Chunk]:
    """The ids of choice 0 in messages of these sizes, over and over, taking after each."""
    chunks, at, turn = [], 0, 0
    while at < len(ids) and not answer.done:
        size = sizes[turn % len(sizes)]
        answer.ids(0, ids[at : at + size])
        at, turn = at + size, turn + 1
        chunks += drain(answer)
    answer.end(0)
    return chunks + drain(answer)


@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.COMPLETION])
@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_become_an_answer(plain: Words, kind: Kind, stream: bool) -> None:
    plan, answer = await begin(plain, kind, stream=stream, max_tokens=200)
    ids = [*plain.encode(TEXT, special=False), 1]
    read = Read(plan, feed(answer, ids), stream)
    assert read.text() == TEXT
    assert read.finish_reasons() == ["stop"]
    assert read.usage == Usage(plan.prompt_tokens, len(ids), 0)
    assert read.tokens == len(ids)
    assert read.chunks[-1].last
    assert {frame["system_fingerprint"] for frame in read.frames} == {"print"}
    assert {frame["id"] for frame in read.frames} == {"chatcmpl-id-1" if kind is Kind.CHAT else "cmpl-id-1"}
    assert answer.take() is None
    if not stream:
        assert next(chunk.tokens for chunk in read.chunks) == 1


async def test_usage_in_the_stream(plain: Words) -> None:
    plan, answer = await begin(plain, usage=True, stream=True, stream_options={"include_usage": True})
    read = Read(plan, feed(answer, plain.encode("The train", special=False)), True)
    assert read.frames[-1]["choices"] == []
    assert read.frames[-1]["usage"]["completion_tokens"] == read.usage.completion_tokens
    assert all(frame["usage"] is None for frame in read.frames[:-1])


@pytest.mark.parametrize(("limit", "reason"), [(5, "length"), (6, "stop")])
async def test_why_it_ended_is_derived(plain: Words, limit: int, reason: str) -> None:
    plan, answer = await begin(plain, stream=True, max_tokens=limit)
    read = Read(plan, feed(answer, plain.encode("abcdefgh", special=False)[:5]), True)
    assert read.finish_reasons() == [reason]


async def test_the_engines_reason_wins(plain: Words) -> None:
    plan, answer = await begin(plain, stream=True, max_tokens=50)
    answer.ids(0, [5])
    answer.end(0, "length")
    assert Read(plan, drain(answer), True).finish_reasons() == ["length"]


@pytest.mark.parametrize("include", [False, True])
async def test_an_end_token_ends_it_and_is_counted(plain: Words, include: bool) -> None:
    named = plain.encode("x", special=False)[0]
    plan, answer = await begin(plain, stream=True, stop_token_ids=[named], include_stop_str_in_output=include)
    answer.ids(0, [*plain.encode("ab", special=False), named, named, named])
    assert answer.done
    assert answer.over(0)
    answer.ids(0, [named])
    answer.end(0, "length")
    read = Read(plan, drain(answer), True)
    assert (read.text(), read.finish_reasons()) == ("abx" if include else "ab", ["stop"])
    assert read.usage.completion_tokens == len(plain.encode("ab", special=False)) + 1


async def test_end_tokens_before_the_least_are_only_tokens(plain: Words) -> None:
    plan, answer = await begin(plain, stream=True, min_tokens=3)
    answer.ids(0, [1, *plain.encode("a", special=False), 1])
    assert not answer.done
    answer.ids(0, [1])
    assert answer.done
    assert Read(plan, drain(answer), True).usage.completion_tokens == 4


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60)
@given(
    text=st.text(alphabet="ab 🙂日é\n", max_size=30),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    stops=st.lists(st.text(alphabet="ab 🙂日\n", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    stream=st.booleans(),
)
async def test_any_text_any_split_any_stop(
    each: Words, text: str, sizes: list[int], stops: list[str], include: bool, stream: bool
) -> None:
    """The joined answer is the whole decoded text, cut at the first stop string; tokens count up to there."""
    plan, answer = await begin(
        each, Kind.COMPLETION, stream=stream, stop=stops, include_stop_str_in_output=include, max_tokens=200
    )
    ids = each.encode(text, special=False)
    read = Read(plan, feed(answer, ids, sizes), stream)
    prompt_text, whole = each.decode(plan.work.ids), each.decode([*plan.work.ids, *ids])
    assert whole.startswith(prompt_text)
    whole = whole[len(prompt_text) :]
    ends = [end for end in range(1, len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops)]
    if ends:
        found = max(len(stop) for stop in stops if whole[: ends[0]].endswith(stop))
        whole = whole[: ends[0] if include else ends[0] - found]
        assert read.finish_reasons() == ["stop"]
    else:
        assert read.usage.completion_tokens == len(ids)
    assert read.text() == whole


async def test_choices_are_told_apart(plain: Words) -> None:
    for stream in (True, False):
        plan, answer = await begin(plain, stream=stream, n=3, max_tokens=100)
        texts = ["The train", "waits 🙂", "by the river"]
        chunks = []
        for index, text in enumerate(texts):
            answer.ids(index, plain.encode(text, special=False))
            chunks += drain(answer)
            answer.end(index)
            assert answer.over(index)
            assert answer.done == (index == 2)
        read = Read(plan, chunks + drain(answer), stream)
        assert [read.text(index) for index in range(3)] == texts
        assert [read.finish_reasons(index) for index in range(3)] == [["stop"]] * 3
        assert read.usage.completion_tokens == sum(len(plain.encode(text, special=False)) for text in texts)


async def test_chat_logprobs(plain: Words) -> None:
    for stream in (True, False):
        plan, answer = await begin(plain, stream=stream, logprobs=True, stop="zz", max_tokens=100)
        ids = plain.encode("The é🙂", special=False)
        chunks = []
        for nth, token in enumerate(ids):
            answer.ids(0, [token], [-0.5 * nth])
            chunks += drain(answer)
        answer.end(0)
        read = Read(plan, chunks + drain(answer), stream)
        entries = [
            entry
            for frame in read.frames
            for choice in frame["choices"]
            for entry in (choice["logprobs"] or {"content": []})["content"]
        ]
        assert [entry["logprob"] for entry in entries] == [-0.5 * nth for nth in range(len(ids))]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "The é🙂" == read.text()
        assert all(entry["top_logprobs"] == [] for entry in entries)


async def test_completion_logprobs(plain: Words) -> None:
    for stream in (True, False):
        plan, answer = await begin(plain, Kind.COMPLETION, stream=stream, logprobs=0, max_tokens=100)
        ids = plain.encode("The train", special=False)
        answer.ids(0, ids[:2], [-1.0, -2.0])
        chunks = drain(answer)
        answer.ids(0, ids[2:], [-3.0] * (len(ids) - 2))
        answer.end(0)
        read = Read(plan, chunks + drain(answer), stream)
        lists = [choice["logprobs"] for frame in read.frames for choice in frame["choices"] if choice["logprobs"]]
        tokens = [token for one in lists for token in one["tokens"]]
        offsets = [offset for one in lists for offset in one["text_offset"]]
        assert "".join(tokens) == "The train"
        assert offsets == [sum(map(len, tokens[:nth])) for nth in range(len(tokens))]
        assert [score for one in lists for score in one["token_logprobs"]][:2] == [-1.0, -2.0]
        assert next(top for one in lists for top in one["top_logprobs"]) == {tokens[0]: -1.0}


async def test_text_from_engines_that_detokenize(plain: Words) -> None:
    plan, answer = await begin(plain, stream=True, stop="STOP", max_tokens=50)
    chunks = []
    for piece in ("The", "", " tra", "in S", "TOP now", "more"):
        answer.text(0, piece)
        chunks += drain(answer)
    read = Read(plan, chunks, True)
    assert (read.text(), read.finish_reasons(), read.usage.completion_tokens) == ("The train ", ["stop"], 5)


async def test_text_of_unknown_size_is_counted_by_the_tokenizer(plain: Words) -> None:
    plan, answer = await begin(plain, stream=False, max_tokens=100)
    answer.text(0, TEXT, 0)
    answer.text(0, "", 0)
    answer.end(0, "stop")
    assert Read(plan, drain(answer), False).usage.completion_tokens == len(plain.encode(TEXT, special=False))
    plan, answer = await begin(None, Kind.COMPLETION, stream=False)
    answer.text(0, "x" * 40, 0)
    answer.end(0)
    assert Read(plan, drain(answer), False).usage.completion_tokens == 10


async def test_the_engines_count_wins(plain: Words) -> None:
    plan, answer = await begin(plain, stream=False, max_tokens=100)
    answer.text(0, "abc")
    answer.count(prompt_tokens=77, completion_tokens=3, cached_tokens=64)
    answer.count()
    answer.end(0)
    assert Read(plan, drain(answer), False).usage == Usage(77, 3, 64)


async def test_silence_is_broken_by_progress(plain: Words) -> None:
    """Tokens that say nothing: the gateway hears of them, but not of each."""
    _, answer = await begin(plain, stream=True, max_tokens=400)
    answer.ids(0, plain.encode("a", special=False))
    assert answer.take() is not None
    chunks = []
    for _ in range(3 * QUIET_TOKENS):
        answer.ids(0, [3])
        chunks += drain(answer)
    assert [(chunk.data, chunk.tokens) for chunk in chunks] == [(b"", QUIET_TOKENS)] * 3


async def test_nothing_to_take_before_the_first_token(plain: Words) -> None:
    _, answer = await begin(plain, stream=True)
    assert answer.take() is None
    answer.ids(0, [])
    assert answer.take() is None


async def test_an_answer_without_a_token(plain: Words) -> None:
    for stream in (True, False):
        plan, answer = await begin(plain, stream=stream)
        answer.end(0)
        read = Read(plan, drain(answer), stream)
        assert (read.text(), read.finish_reasons(), read.usage.completion_tokens) == ("", ["stop"], 0)
