"""What leaves the process by a thread of its own: the event loop hands over bytes and never waits for whoever takes
them. A receiver that is slow or gone costs what no longer fits in, and nothing else."""

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

Deliver = Callable[[list[bytes]], bool]
"""Takes a batch; false: not now, the same again later. In the outbox's thread; must not take for ever."""

PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Before the nth try in a row of the same batch."""
CLOSE_S = 2.0


class Outbox:
    """At most `most_bytes` wait; what comes on top is dropped and counted. The thread sleeps while there is nothing.

    A piece waits `period_s` for others to go with it, `batch_bytes` at a time (a larger piece goes alone).
    """

    def __init__(self, name: str, deliver: Deliver, period_s: float, most_bytes: int, batch_bytes: int) -> None:
        self.name, self.dropped = name, 0
        self._deliver, self._period_s = deliver, period_s
        self._most_bytes, self._batch_bytes = most_bytes, batch_bytes
        self._pieces: deque[bytes] = deque()
        self._in_bytes = 0  # ever taken in: the loop's alone
        self._out_bytes = 0  # ever delivered or given up: the thread's alone
        self._told = 0  # dropped ones that the log knows of
        self._some = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Outbox {self.name}, {self.waiting_bytes} bytes waiting, {self.dropped} dropped>"

    @property
    def waiting_bytes(self) -> int:
        return self._in_bytes - self._out_bytes

    def offer(self, piece: bytes) -> None:
        """Hand over one piece. Never blocks. From one thread only."""
        size = len(piece)
        if self._in_bytes - self._out_bytes + size > self._most_bytes:
            self.dropped += 1
            return
        self._in_bytes += size
        self._pieces.append(piece)
        if len(self._pieces) == 1:
            self._some.set()

    async def aclose(self) -> None:
        """Deliver what is left, for at most `CLOSE_S`; what takes longer is lost."""
        self._closing.set()
        self._some.set()
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self.waiting_bytes:
            log.warning("%s: %d bytes could not be delivered in time", self.name, self.waiting_bytes)

    def _run(self) -> None:
        while self._some.wait():
            self._some.clear()
            self._closing.wait(self._period_s)
            left = len(self._pieces)
            while left > 0:
                batch = self._batch(left)
                left -= len(batch)
                if not self._send(batch):
                    return
            self._tell()
            if self._pieces:
                self._some.set()
            elif self._closing.is_set():
                return

    def _batch(self, most: int) -> list[bytes]:
        pieces, batch = self._pieces, [self._pieces.popleft()]
        size = len(batch[0])
        while len(batch) < most and size + len(pieces[0]) <= self._batch_bytes:
            batch.append(pieces.popleft())
            size += len(batch[-1])
        return batch

    def _send(self, batch: list[bytes]) -> bool:
        """False when it was given up, because the process ends."""
        for nth in itertools.count():
            try:
                done = self._deliver(batch)
            except Exception:
                log.exception("%s: a batch could not be delivered and is lost", self.name)
                done = True
            if done:
                break
            if self._closing.is_set():
                return False
            self._closing.wait(PAUSES_S[min(nth, len(PAUSES_S) - 1)])
        self._out_bytes += sum(map(len, batch))
        return True

    def _tell(self) -> None:
        dropped = self.dropped
        if dropped > self._told:
            log.warning("%s: %d were dropped, more than its receiver took", self.name, dropped - self._told)
            self._told = dropped
