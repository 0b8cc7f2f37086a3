"""Bytes to whole events, whatever the reads are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import sse
from backends.sse import Framer, payload, split

EVENTS = [b'data: {"a":1}\n\n', b": comment\n\n", b"event: x\r\ndata: one\r\ndata: two\r\n\r\n", b"data:[DONE]\n\n"]


@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.lists(st.integers(0, 300), max_size=12))
def test_events_come_out_as_they_went_in(events: list[bytes], cuts: list[int]) -> None:
    data = b"".join(events)
    at = sorted({min(cut, len(data)) for cut in cuts})
    framer, out = Framer(), []
    for start, end in zip([0, *at], [*at, len(data)], strict=True):
        if end > start:
            whole = framer.feed(data[start:end])
            assert b"".join(split(whole)) == whole
            out += split(whole)
    assert out == events
    assert framer.rest() == b""


def test_at_every_byte() -> None:
    data = b"".join(EVENTS)
    for at in range(1, len(data)):
        framer = Framer()
        assert framer.feed(data[:at]) + framer.feed(data[at:]) == data
    framer = Framer()
    assert b"".join(framer.feed(bytes([byte])) for byte in data) == data


def test_what_is_not_whole_is_held() -> None:
    framer = Framer()
    assert framer.feed(b"data: 1\n\ndata: 2\n") == b"data: 1\n\n"
    assert framer.rest() == b"data: 2\n"
    assert framer.feed(b"\nda") == b"data: 2\n\n"
    assert framer.rest() == b"da"


def test_an_event_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "HELD_BYTES", 1000)
    framer = Framer()
    for _ in range(10):
        assert framer.feed(b"x" * 100) == b""
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        framer.feed(b"x")


def test_an_event_in_many_pieces_is_joined_once() -> None:
    framer = Framer()
    for _ in range(4096):
        assert framer.feed(b"x" * 4000) == b""  # 16 MB: takes minutes if it is joined at each
    assert len(framer.feed(b"\n\n")) == 4096 * 4000 + 2


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\n\n", b"x"),
        (b"data:  x\n\n", b" x"),
        (b"event: e\r\ndata: x\r\nid: 1\r\n\r\n", b"x"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b": ping\n\n", b""),
        (b"\n\n", b""),
    ],
)
def test_payload(event: bytes, data: bytes) -> None:
    assert payload(event) == data
