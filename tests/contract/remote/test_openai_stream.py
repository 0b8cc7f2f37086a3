"""Streams of a remote server: what passes, what is cut out, what is counted, and how they end."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.openai_stream import EventStream
from backends.protocol import BackendError, BackendLost, Chunk, Usage
from tests.contract.remote.wire import Bare


def event(**fields: object) -> bytes:
    return b"data: %b\n\n" % json.dumps({"id": "x", **fields}, separators=(",", ":")).encode()


def delta(text: str, reason: str | None = None, **more: object) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": reason}], **more)


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 4})
DONE = b"data: [DONE]\n\n"
TEXT = [delta(word) for word in ("one", ' "usage":{ ', "data: [DONE]\n\n", '"error"')]
STREAM = [ROLE, *TEXT, delta("", "stop"), USAGE, DONE]


class Feed:
    """A stream that is fed by hand: chunks of an HTTP answer in, chunks of the backend out."""

    def __init__(self, hides_usage: bool = True, typed: bool = False, until_close: bool = False) -> None:
        self.bare = Bare()
        self.learned: list[Usage] = []
        self.until_close = until_close
        framing = b"connection: close" if until_close else b"transfer-encoding: chunked"
        self.bare.feed(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % framing)
        self.stream = EventStream(self.bare.answer, hides_usage, typed, self.learned.append)

    def give(self, data: bytes) -> None:
        self.bare.feed(data if self.until_close else b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.bare.close() if self.until_close else self.bare.feed(b"0\r\n\r\n")

    async def rest(self) -> list[Chunk]:
        chunks = []
        async with asyncio.timeout(2):
            while (chunk := await self.stream.next()) is not None:
                chunks.append(chunk)
        await self.stream.aclose()
        return chunks

    async def piece(self, data: bytes) -> Chunk | None:
        """Give one piece and read what it makes, None where that is nothing yet."""
        self.give(data)
        reader = asyncio.ensure_future(self.stream.next())
        for _ in range(5):
            await asyncio.sleep(0)
        if reader.done():
            return reader.result()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        return None


async def test_one_read() -> None:
    feed = Feed()
    feed.give(b"".join(STREAM))
    feed.end()
    (chunk,) = await feed.rest()
    assert chunk == Chunk(b"".join([ROLE, *TEXT, delta("", "stop"), DONE]), 4, Usage(7, 4), last=True)
    assert feed.learned == [Usage(7, 4)]
    assert feed.bare.kept


async def test_one_event_a_read() -> None:
    feed = Feed(hides_usage=False)
    chunks = [await feed.piece(one) for one in STREAM]
    assert [chunk and (chunk.data, chunk.tokens, chunk.last) for chunk in chunks] == [
        *((one, int(one in TEXT), False) for one in STREAM[:-1]),
        (DONE, 0, True),
    ]
    assert chunks[-1] is not None
    assert chunks[-1].usage == Usage(7, 4)
    assert await feed.stream.next() is None
    await feed.stream.aclose()
    assert not feed.bare.pipe.aborted
    feed.end()
    assert feed.bare.kept


async def test_the_hidden_usage_frame_alone_in_a_read_makes_no_chunk() -> None:
    feed = Feed()
    for one in STREAM[:-2]:
        await feed.piece(one)
    assert await feed.piece(USAGE) is None
    assert await feed.piece(DONE) == Chunk(DONE, 0, Usage(7, 4), last=True)
    await feed.stream.aclose()


VARIANTS = {
    "plain": STREAM,
    "spaced": [
        b"data: %b\n\n" % (one[6:-2] if one == DONE else json.dumps(json.loads(one[6:])).encode()) for one in STREAM
    ],
    "crlf": [one.replace(b"\n\n", b"\r\n\r\n") for one in STREAM],
    "comments": [b": ping\n\n", *STREAM[:3], b": ping\n\n", *STREAM[3:]],
    "no space": [one.replace(b"data: ", b"data:") for one in STREAM],
}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(VARIANTS)),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 1000), max_size=12),
)
async def test_however_it_is_cut(name: str, hides: bool, until_close: bool, cuts: list[int]) -> None:
    events = VARIANTS[name]
    data = b"".join(events)
    feed = Feed(hides, until_close=until_close)
    at = sorted({min(cut, len(data)) for cut in cuts} - {0, len(data)})
    chunks = []
    for start, end in zip([0, *at], [*at, len(data)], strict=True):
        if (chunk := await feed.piece(data[start:end])) is not None:
            chunks.append(chunk)
    feed.end()
    chunks += await feed.rest()
    usage = next(one for one in events if b'"prompt_tokens"' in one)
    assert b"".join(chunk.data for chunk in chunks) == b"".join(one for one in events if not (hides and one is usage))
    assert sum(chunk.tokens for chunk in chunks) == len(TEXT)
    assert [chunk.usage for chunk in chunks if chunk.usage] == [Usage(7, 4)]
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk.data.endswith(b"\n") for chunk in chunks)


async def test_usage_in_every_frame_is_the_last_one() -> None:
    feed = Feed(hides_usage=False)
    for count in (1, 2, 3):
        feed.give(delta("x", usage={"prompt_tokens": 7, "completion_tokens": count}))
    feed.give(DONE)
    feed.end()
    chunks = await feed.rest()
    assert [chunk.usage for chunk in chunks if chunk.usage] == [Usage(7, 3)]


async def test_an_error_in_the_stream_comes_after_what_was_good() -> None:
    feed = Feed()
    feed.give(ROLE + TEXT[0] + event(error={"message": "out of memory", "code": 500}) + DONE)
    assert await feed.stream.next() == Chunk(ROLE + TEXT[0], 1)
    for _ in range(2):
        with pytest.raises(BackendError, match="out of memory"):
            await feed.stream.next()
    await feed.stream.aclose()
    assert feed.bare.pipe.aborted


async def test_an_error_as_the_first_thing() -> None:
    feed = Feed()
    feed.give(b"event: error\n" + event(type="error", error={"type": "overloaded_error", "message": "busy"}))
    with pytest.raises(BackendError, match="busy"):
        await feed.stream.next()
    await feed.stream.aclose()


async def test_an_error_after_the_start() -> None:
    feed = Feed()
    await feed.piece(ROLE + TEXT[0])
    feed.give(b"data: " + json.dumps({"error": {"message": "boom"}}).encode() + b"\n\n")
    with pytest.raises(BackendError, match="boom"):
        await feed.stream.next()
    await feed.stream.aclose()


async def test_words_that_look_like_marks_do_not_end_it() -> None:
    feed = Feed()
    for word in ('{"error": {"message": "x"}}', "[DONE]", '"finish_reason":"stop"', '"usage":{"prompt_tokens":9}'):
        assert await feed.piece(delta(word)) == Chunk(delta(word), 1)
    await feed.stream.aclose()


async def test_what_is_no_json_is_an_error() -> None:
    feed = Feed()
    feed.give(b"data: Internal Server Error\n\n")
    with pytest.raises(BackendError, match="no JSON object"):
        await feed.stream.next()
    await feed.stream.aclose()


async def test_a_proper_end_without_done_is_an_end() -> None:
    feed = Feed()
    feed.give(b"".join(STREAM[:-1]))
    feed.end()
    first, last = await feed.rest()
    assert (first.tokens, first.usage, first.last) == (4, None, False)
    assert last == Chunk(b"", 0, Usage(7, 4), last=True)
    assert feed.bare.kept


async def test_a_last_event_without_its_empty_line() -> None:
    for tail, data in ((b"data: [DONE]", DONE), (b"data: [DONE]\n", DONE), (TEXT[0].rstrip(), TEXT[0])):
        feed = Feed()
        feed.give(ROLE + tail)
        feed.end()
        assert b"".join(chunk.data for chunk in await feed.rest()) == ROLE + data


@pytest.mark.parametrize("tail", [b"", b"data: {", TEXT[0][:-1]])
async def test_a_stream_that_just_stops_is_lost(tail: bytes) -> None:
    feed = Feed(until_close=True)
    feed.give(ROLE + TEXT[0] + tail)
    feed.end()
    assert await feed.stream.next() == Chunk(ROLE + TEXT[0], 1)
    with pytest.raises(BackendLost, match="closed before"):
        await feed.stream.next()
    await feed.stream.aclose()


async def test_a_proper_end_inside_an_event_is_an_error() -> None:
    feed = Feed()
    feed.give(ROLE + b'data: {"choices":')
    feed.end()
    assert await feed.stream.next() == Chunk(ROLE)
    with pytest.raises(BackendError):
        await feed.stream.next()
    await feed.stream.aclose()


async def test_a_broken_body_is_lost() -> None:
    feed = Feed()
    feed.give(ROLE + TEXT[0])
    feed.bare.close(ConnectionResetError("reset"))
    assert await feed.stream.next() == Chunk(ROLE + TEXT[0], 1)
    with pytest.raises(BackendLost, match="reset"):
        await feed.stream.next()
    await feed.stream.aclose()


async def test_broken_framing_is_an_error() -> None:
    feed = Feed()
    feed.bare.feed(b"zz\r\n")
    with pytest.raises(BackendError, match="not HTTP"):
        await feed.stream.next()
    await feed.stream.aclose()


async def test_an_event_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.sse.HELD_BYTES", 1000)
    feed = Feed()
    feed.give(b"data: " + b"x" * 1000)
    with pytest.raises(BackendError, match="more than 1000 bytes"):
        await feed.stream.next()
    await feed.stream.aclose()


def typed(kind: str, **fields: object) -> bytes:
    return b"event: %b\n%b" % (kind.encode(), event(type=kind, **fields))


RESPONSES = [
    typed("response.created", response={"usage": None}),
    typed("response.output_text.delta", delta="a"),
    typed("response.output_text.delta", delta="b"),
    typed("response.completed", response={"usage": {"input_tokens": 7, "output_tokens": 2}}),
]
MESSAGES = [
    typed("message_start", message={"usage": {"input_tokens": 7, "output_tokens": 1}}),
    typed("content_block_delta", delta={"text": "a"}),
    typed("ping"),
    typed("content_block_delta", delta={"text": "b"}),
    typed("message_delta", usage={"output_tokens": 2}),
    typed("message_stop"),
]


@pytest.mark.parametrize(
    "events", [RESPONSES, MESSAGES, [*RESPONSES, DONE]], ids=["responses", "messages", "with done"]
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_typed_events_pass_untouched(events: list[bytes], at_once: bool) -> None:
    feed = Feed(hides_usage=False, typed=True)
    for one in [b"".join(events)] if at_once else events:
        feed.give(one)
    feed.end()
    chunks = await feed.rest()
    assert b"".join(chunk.data for chunk in chunks) == b"".join(events)
    assert sum(chunk.tokens for chunk in chunks) == 2
    assert chunks[-1].usage == Usage(7, 2)
    assert chunks[-1].last


async def test_closing_ends_it_for_every_reader() -> None:
    feed = Feed()
    await feed.piece(ROLE)
    reader = asyncio.ensure_future(feed.stream.next())
    await asyncio.sleep(0)
    await feed.stream.aclose()
    await feed.stream.aclose()
    assert await reader is None
    assert await feed.stream.next() is None
    assert feed.bare.pipe.aborted
    assert "over" not in repr(feed.stream)
