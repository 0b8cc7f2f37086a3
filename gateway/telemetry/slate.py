"""Memory in which the gateway's processes tell each other what is live in them, while somebody watches one of them.

    slot    watched until: double, written: double (monotonic seconds), length: int, CRC-32: int, the text

A process writes only its own slot, the one at its place. A text that is read while it is written fails its checksum.
"""

import mmap
import zlib

SLOT = 64 * 1024
"""Bytes of one process's part. What is not used takes no memory."""
ROOM = SLOT - 32
STALE_S = 5.0
"""What was written longer ago is by a process that is gone."""
TRIES = 4


class Slate:
    """All slots of one gateway, `places` of them. The descriptor may be closed afterwards."""

    def __init__(self, fd: int | None = None, place: int = 0, places: int = 1) -> None:
        self._bytes = memoryview(mmap.mmap(-1 if fd is None else fd, SLOT * places))
        self._doubles = self._bytes.cast("d")
        self._ints = self._bytes.cast("q")
        self._place, self._places = place, places
        self._doubles[self._first(place)] = 0.0

    def __repr__(self) -> str:
        return f"<Slate {self._place} of {self._places}>"

    def watch(self, until: float) -> None:
        """Somebody watches here, until then at least."""
        self._doubles[self._first(self._place)] = until

    def watched(self, at: float) -> bool:
        """Whether somebody does, here or elsewhere."""
        return any(self._doubles[self._first(place)] > at for place in range(self._places))

    def write(self, text: bytes, at: float) -> None:
        """In place of the text before. Raises ValueError where it is longer than ROOM."""
        if len(text) > ROOM:
            raise ValueError(f"{len(text)} bytes do not go into {ROOM}")
        first = self._first(self._place)
        begin = first * 8 + 32
        self._bytes[begin : begin + len(text)] = text
        self._ints[first + 2], self._ints[first + 3] = len(text), zlib.crc32(text)
        self._doubles[first + 1] = at

    def read(self, at: float) -> list[bytes]:
        """What each process wrote within the last seconds."""
        texts = (self._text(place, at) for place in range(self._places))
        return [text for text in texts if text is not None]

    def _text(self, place: int, at: float) -> bytes | None:
        first = self._first(place)
        for _ in range(TRIES):
            if self._doubles[first + 1] < at - STALE_S or not self._doubles[first + 1]:
                return None
            length, checksum = self._ints[first + 2], self._ints[first + 3]
            text = bytes(self._bytes[first * 8 + 32 : first * 8 + 32 + length])
            if zlib.crc32(text) == checksum:
                return text
        return None

    def _first(self, place: int) -> int:
        return place * SLOT // 8
