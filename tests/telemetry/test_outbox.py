"""What leaves by a thread of its own: nothing is lost without need, nothing waits for a receiver."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest

from gateway.telemetry import outbox
from gateway.telemetry.outbox import Outbox


class Receiver:
    """Takes batches. `open` decides when, `good` what it answers."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.tries = 0
        self.good = True
        self.open = threading.Event()
        self.open.set()

    def __call__(self, batch: list[bytes]) -> bool:
        self.tries += 1
        self.open.wait(20)
        if self.good:
            self.batches.append(batch)
        return self.good

    @property
    def pieces(self) -> list[bytes]:
        return [piece for batch in self.batches for piece in batch]


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_all_of_it_arrives_in_order_and_in_batches() -> None:
    receiver = Receiver()
    box = Outbox("test", receiver, period_s=0.01, most_bytes=100_000, batch_bytes=100)
    sent = [b"%04d" % nth for nth in range(500)]
    for nth, piece in enumerate(sent):
        box.offer(piece)
        if nth % 100 == 0:
            await asyncio.sleep(0.02)
    await until(lambda: len(receiver.pieces) == 500)
    await box.aclose()
    assert receiver.pieces == sent
    assert 2 <= max(len(batch) for batch in receiver.batches) <= 25
    assert (box.waiting_bytes, box.dropped) == (0, 0)


async def test_a_piece_larger_than_a_batch_goes_alone() -> None:
    receiver = Receiver()
    box = Outbox("test", receiver, period_s=0.01, most_bytes=1_000, batch_bytes=10)
    for piece in (b"a", b"b" * 50, b"c"):
        box.offer(piece)
    await box.aclose()
    assert receiver.pieces == [b"a", b"b" * 50, b"c"]
    assert [b"b" * 50] in receiver.batches


async def test_what_does_not_fit_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver()
    receiver.open.clear()
    box = Outbox("test", receiver, period_s=0.0, most_bytes=100, batch_bytes=10)
    for _ in range(50):
        box.offer(b"1234567890")
    assert (box.waiting_bytes, box.dropped) == (100, 40)
    receiver.open.set()
    await until(lambda: len(receiver.pieces) == 10 and box.waiting_bytes == 0)
    box.offer(b"1234567890")  # there is room again
    await box.aclose()
    assert len(receiver.pieces) == 11
    assert [record.getMessage() for record in caplog.records] == ["test: 40 were dropped, more than its receiver took"]


async def test_what_is_not_taken_is_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "PAUSES_S", (0.01,))
    receiver = Receiver()
    receiver.good = False
    box = Outbox("test", receiver, period_s=0.01, most_bytes=100, batch_bytes=10)
    box.offer(b"one")
    await until(lambda: receiver.tries > 3)
    receiver.good = True
    await until(lambda: receiver.pieces == [b"one"])
    await box.aclose()


async def test_a_receiver_that_raises_loses_its_batch_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    took: list[bytes] = []

    def receive(batch: list[bytes]) -> bool:
        if batch[0] == b"bad":
            raise RuntimeError("broken")
        took.extend(batch)
        return True

    box = Outbox("test", receive, period_s=0.01, most_bytes=100, batch_bytes=1)
    box.offer(b"bad")
    box.offer(b"good")
    await until(lambda: took == [b"good"])
    await box.aclose()
    assert "could not be delivered" in caplog.text


async def test_closing_delivers_what_waits_at_once() -> None:
    receiver = Receiver()
    box = Outbox("test", receiver, period_s=1_000.0, most_bytes=100, batch_bytes=10)
    box.offer(b"last words")
    await box.aclose()
    assert receiver.pieces == [b"last words"]


async def test_closing_waits_for_a_stuck_receiver_a_short_time_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outbox, "CLOSE_S", 0.2)
    receiver = Receiver()
    receiver.open.clear()
    box = Outbox("test", receiver, period_s=0.0, most_bytes=100, batch_bytes=10)
    box.offer(b"stuck")
    await until(lambda: receiver.tries == 1)
    began = time.monotonic()
    await box.aclose()
    assert 0.19 <= time.monotonic() - began < 10
    assert "5 bytes could not be delivered in time" in caplog.text
    receiver.open.set()


async def test_closing_gives_a_receiver_that_is_away_one_more_try(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    receiver = Receiver()
    receiver.good = False
    box = Outbox("test", receiver, period_s=0.0, most_bytes=100, batch_bytes=10)
    box.offer(b"lost")
    await until(lambda: receiver.tries >= 1)
    await box.aclose()
    assert receiver.tries >= 2
    assert "4 bytes could not be delivered in time" in caplog.text
