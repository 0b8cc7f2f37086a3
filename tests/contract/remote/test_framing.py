"""Bytes to answers, without a network: every split, every cut, every kind of body."""

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import http1_wire
from backends.http1_errors import Broken, HttpError, Nonsense, Stale, TooLate
from tests.contract.remote.wire import Bare
from tests.support.fault_server import chunked, closing, sized

BODY = b'{"a":"b\r\n\r\n0\r\n"}'
RICH = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: \r\n\r\n"
    b'5;ext=1;e="x"\r\n{"a":\r\n0a\r\n"b\r\n\r\n0\r\n"\r\n1\r\n}\r\n0\r\nx-trailer: 1\r\n\r\n'
)
WHOLE = {
    "sized": (sized(BODY), BODY),
    "chunked": (RICH, BODY),
    "one chunk each": (chunked(*(bytes([c]) for c in BODY)), BODY),
    "empty": (sized(b""), b""),
    "no content": (b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n", b""),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 99\r\n\r\n", b""),
    "interim": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nx: interim\r\n\r\n" + sized(BODY), BODY),
    "closed after": (sized(BODY, more=b"connection: close\r\n"), BODY),
}


@pytest.mark.parametrize("name", WHOLE)
async def test_split_at_every_byte(name: str) -> None:
    data, body = WHOLE[name]
    for at in range(len(data) + 1):
        bare = Bare()
        bare.feed(data[:at], data[at:]) if 0 < at < len(data) else bare.feed(data)
        assert (await bare.result())[1] == body, at
        assert bare.kept is (name != "closed after"), at
    bare = Bare()
    bare.feed(*(bytes([byte]) for byte in data))
    assert (await bare.result())[1] == body


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("error", [None, ConnectionResetError("reset")])
async def test_cut_at_every_byte(name: str, error: Exception | None) -> None:
    data, _ = WHOLE[name]
    for at in range(len(data)):
        bare = Bare()
        if at:
            bare.feed(data[:at])
        bare.close(error)
        with pytest.raises(Broken):
            await bare.result()
        assert not bare.kept


@pytest.mark.parametrize("name", WHOLE)
async def test_the_same_on_a_kept_connection(name: str) -> None:
    data, _ = WHOLE[name]
    bare = Bare(reused=True)
    bare.close()
    with pytest.raises(Stale):
        await bare.result()
    for at in range(1, len(data)):
        bare = Bare(reused=True)
        bare.feed(data[:at])
        bare.close()
        with pytest.raises(Broken):
            await bare.result()


async def test_a_kept_connection_that_closes_late_is_not_taken_for_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1_wire, "STALE_S", 0.0)
    bare = Bare(reused=True)
    bare.close()
    with pytest.raises(Broken, match="before any answer"):
        await bare.result()


async def test_until_close_ends_with_an_orderly_close_only() -> None:
    data = closing(BODY)
    head = data.index(b"\r\n\r\n") + 4
    for at in range(head, len(data) + 1):
        bare = Bare()
        bare.feed(data[:at])
        bare.close()
        assert await bare.result() == (200, data[head:at])
        assert bare.answer.until_close
        assert not bare.kept
        bare = Bare()
        bare.feed(data[:at])
        bare.close(ConnectionResetError())
        with pytest.raises(Broken):
            await bare.result()


async def test_a_head_request_has_no_body() -> None:
    bare = Bare(bodiless=True)
    bare.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n")
    assert await bare.result() == (200, b"")
    assert bare.kept


NONSENSE = {
    "not http": b"SSH-2.0-OpenSSH_9\r\n",
    "http 0.9": b"<html>",
    "bad status": b"HTTP/1.1 abc OK\r\n\r\n",
    "bad length": b"HTTP/1.1 200 OK\r\ncontent-length: ten\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    "length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "gzip coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
    "gzip encoding": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc",
    "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    "huge header": b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000 + b"\r\n\r\n",
    "huge header, no end": b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000,
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 40_000 + b"\r\n",
    "interim for ever": b"HTTP/1.1 102 Processing\r\nx: y\r\n\r\n" * 40_000,
    "trailers for ever": chunked(b"a", end=b"0\r\n") + b"x: y\r\n" * 40_000,
    "trailer without end": chunked(b"a", end=b"0\r\nx: ") + b"a" * 200_000,
    "extension for ever": chunked(b"a", end=b"1;") + b"e=" * 40_000,
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_nonsense_is_told_and_the_connection_dropped(name: str) -> None:
    for size in (1 << 15, 4096):
        data = NONSENSE[name]
        bare = Bare()
        bare.feed(*(data[at : at + size] for at in range(0, len(data), size)))
        with pytest.raises(Nonsense):
            await bare.result()
        assert bare.pipe.aborted
        assert not bare.kept


@pytest.mark.parametrize("garbage", [b"X", b"HTTP/1.1 200 OK\r\n\r\n", sized(b"{}"), b"\x00" * 5])
@pytest.mark.parametrize("apart", [False, True])
async def test_bytes_after_the_end_spoil_the_connection_not_the_answer(garbage: bytes, apart: bool) -> None:
    bare = Bare()
    bare.feed(*([sized(BODY), garbage] if apart else [sized(BODY) + garbage]))
    assert await bare.result() == (200, BODY)
    assert not bare.kept


async def test_bytes_while_idle_close_the_connection() -> None:
    bare = Bare()
    bare.feed(sized(BODY))
    await bare.result()
    assert bare.kept
    bare.connection.data_received(b"x")
    assert bare.pipe.aborted


async def test_what_came_before_a_failure_is_read_first() -> None:
    bare = Bare()
    bare.feed(chunked(b"one", b"two", end=b""))
    bare.close(ConnectionResetError())
    await bare.answer.head()
    assert await bare.answer.read() == b"onetwo"
    for _ in range(2):
        with pytest.raises(Broken):
            await bare.answer.read()
    bare.answer.release()


async def test_reading_pauses_above_the_bound_and_the_deadline_with_it() -> None:
    bare = Bare()
    bare.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    bare.feed(b"x" * (http1_wire.HIGH_BYTES + 1))
    assert bare.pipe.paused
    assert bare.answer.deadline == http1_wire.NEVER
    assert len(await bare.answer.read()) == http1_wire.HIGH_BYTES + 1
    assert not bare.pipe.paused
    assert bare.answer.deadline < http1_wire.NEVER
    bare.answer.release()


async def test_a_connection_goes_back_unpaused() -> None:
    bare = Bare()
    size = http1_wire.HIGH_BYTES * 2
    bare.feed(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size, b"x" * (size - 1))
    assert bare.pipe.paused
    bare.feed(b"x")
    bare.answer.release()
    assert bare.kept
    assert not bare.pipe.paused


async def test_giving_up_aborts_and_wakes_the_reader() -> None:
    bare = Bare()
    bare.feed(chunked(b"one", end=b""))
    await bare.answer.head()
    await bare.answer.read()
    reader = asyncio.ensure_future(bare.answer.read())
    await asyncio.sleep(0)
    bare.answer.release()
    bare.answer.release()
    assert bare.pipe.aborted
    with pytest.raises(Broken, match="given up"):
        await reader


async def test_lingering_keeps_the_connection_when_the_end_comes() -> None:
    bare = Bare()
    bare.feed(chunked(b"last", end=b""))
    await bare.answer.head()
    await bare.answer.read()
    bare.answer.release(linger=True)
    bare.answer.release()
    assert not bare.pipe.aborted
    bare.feed(b"0\r\n")
    assert not bare.kept
    bare.feed(b"\r\n")
    assert bare.kept


@pytest.mark.parametrize("what", ["late", "closed", "nonsense", "body"])
async def test_lingering_ends_badly_without_a_trace(what: str) -> None:
    bare = Bare()
    bare.feed(chunked(b"last", end=b""))
    await bare.answer.head()
    await bare.answer.read()
    bare.answer.release(linger=True)
    if what == "late":
        assert bare.answer.deadline <= asyncio.get_running_loop().time() + http1_wire.LINGER_S
        bare.answer.expire()
    elif what == "closed":
        bare.close()
    elif what == "nonsense":
        bare.feed(b"zz\r\n")
    else:
        bare.feed(b"2000\r\n" + b"x" * 0x2000)
    assert not bare.kept
    assert bare.connection.answer is None


async def test_the_status_lines() -> None:
    bare = Bare()
    assert repr(bare.connection) == "<Connection busy, 1 requests>"
    assert repr(bare.answer) == "<Answer without head, open, 0 bytes unread>"
    bare.feed(sized(BODY))
    assert repr(bare.answer) == f"<Answer 200, ended, {len(BODY)} bytes unread>"
    bare.answer.release()
    assert repr(bare.connection) == "<Connection idle, 1 requests>"
    bare = Bare()
    bare.answer.expire()
    assert repr(bare.answer) == "<Answer without head, failed: no answer within 60.0 s, 0 bytes unread>"
    assert repr(bare.connection) == "<Connection closed, 1 requests>"
    bare.answer.release()


PIECES = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([b"HTTP/1.1 200 OK\r\n", b"content-length: 5\r\n", b"\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n"]),
        st.sampled_from(
            [b"transfer-encoding: chunked\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"connection: close\r\n"]
        ),
        st.sampled_from(list(data for data, _ in WHOLE.values())),
    ),
    max_size=12,
)


@settings(max_examples=300)
@given(PIECES, st.booleans(), st.booleans())
async def test_whatever_comes_there_is_an_end(pieces: list[bytes], reused: bool, rude: bool) -> None:
    bare = Bare(reused)
    bare.feed(*(piece for piece in pieces if piece))
    bare.close(ConnectionResetError() if rude else None)
    with contextlib.suppress(HttpError):
        await bare.result()
    assert bare.connection.answer is None
    assert bare.keeper.forgotten


async def test_a_deadline_in_the_middle_is_told_from_one_at_the_start() -> None:
    bare = Bare()
    bare.feed(chunked(b"a", end=b""))
    bare.answer.expire()
    with pytest.raises(TooLate, match="middle"):
        await bare.result()
