"""Numbers in memory that the gateway's processes share: each writes a sheet of its own, and anyone reads all of them.

A sheet belongs to a worker's place, not to its process: the memory is the parent's, so a killed worker leaves its
counts behind, and the next one in its place goes on from them. An update is one store of a double; nothing is locked,
and nothing has to be sent or collected while requests are served.

    header    used bytes: int, beat: double (monotonic seconds, 0 before the first)
    entry     cells: int, length of the key: int, key (JSON: name and label values), cells of double

Everything is 8 bytes wide and so aligned. An entry counts once `used` covers it.
"""

import logging
import math
import mmap
import os
import tempfile
from array import array
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import msgspec

from gateway.telemetry.metrics_table import BY_NAME, Family, Kind
from gateway.telemetry.slate import Slate

log = logging.getLogger(__name__)

SIZE = 16 * 1024 * 1024
"""Bytes of one sheet. What is not used takes no memory."""
HEADER = 16
STALE_S = 5.0
"""Without a beat for so long its process is gone, and its gauges with it."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[str]).decode
Cells: TypeAlias = "memoryview[float]"
"""Doubles, written in place."""


class Row(NamedTuple):
    """One series as it was read."""

    name: str
    labels: tuple[str, ...]
    values: list[float]


def new_file(size: int = SIZE) -> int:
    """A descriptor of memory without a name, that lives as long as anybody has it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("signalbox-metrics")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


class Sheet:
    """One process's numbers. The descriptor may be closed afterwards."""

    def __init__(self, fd: int | None = None, size: int = SIZE) -> None:
        memory = mmap.mmap(-1, size) if fd is None else mmap.mmap(fd, 0)
        self._bytes = memoryview(memory)
        self._ints = self._bytes.cast("q")
        self._doubles = self._bytes.cast("d")
        self._where: dict[bytes, int] = {}
        self.unrecorded = 0
        if not self._ints[0]:
            self._ints[0] = HEADER

    def __repr__(self) -> str:
        return f"<Sheet {self._ints[0]} of {len(self._bytes)} bytes>"

    def take_over(self) -> None:
        """Go on where the process before in this place ended: its counts stay, its gauges do not."""
        for key, (name, *_), at, cells in self._entries():
            self._where[key] = at
            if BY_NAME[name].kind is Kind.GAUGE:
                self._doubles[at : at + cells] = array("d", [math.nan] * cells)

    def series(self, family: Family, *labels: str) -> Cells:
        """The cells of one series, made when it is new. Where there is no room it gets cells that nobody reads."""
        if len(labels) != len(family.labels):
            raise ValueError(f"{family.name} has the labels {family.labels}, not {labels}")
        key = _encode((family.name, *labels))
        at = self._where.get(key)
        if at is None:
            at = self._where[key] = self._add(key, family.cells)
        if not at:
            return memoryview(array("d", [0.0] * family.cells))
        return self._doubles[at : at + family.cells]

    def beat(self, at: float) -> None:
        """Its process lives, at `at` (monotonic seconds)."""
        self._doubles[1] = at

    def alive(self, at: float) -> bool:
        return at - self._doubles[1] < STALE_S

    def rows(self) -> Iterator[Row]:
        """Everything in it; a series that comes up meanwhile may be missing."""
        for _, (name, *labels), at, cells in self._entries():
            yield Row(name, tuple(labels), [*self._doubles[at : at + cells]])

    def _add(self, key: bytes, cells: int) -> int:
        """The index of its first cell; 0 where the sheet is full."""
        used, width = self._ints[0], (len(key) + 7) // 8 * 8
        end = used + 16 + width + 8 * cells
        if end > len(self._bytes):
            if not self.unrecorded:
                log.error("the sheet of metrics is full: what is new is not told")
            self.unrecorded += 1
            return 0
        self._ints[used // 8], self._ints[used // 8 + 1] = cells, len(key)
        self._bytes[used + 16 : used + 16 + len(key)] = key
        at = (used + 16 + width) // 8
        self._doubles[at : at + cells] = array("d", [0.0] * cells)
        self._ints[0] = end
        return at

    def _entries(self) -> Iterator[tuple[bytes, list[str], int, int]]:
        """Key, name and labels, first cell and number of cells of each.

        Those that this version does not know are passed over: a worker may have been started from a newer one.
        """
        at, used = HEADER, self._ints[0]
        while at < used:
            cells, length = self._ints[at // 8], self._ints[at // 8 + 1]
            width = (length + 7) // 8 * 8
            key = bytes(self._bytes[at + 16 : at + 16 + length])
            words = _decode(key)
            family = BY_NAME.get(words[0])
            if family is not None and family.cells == cells:
                yield key, words, (at + 16 + width) // 8, cells
            at += 16 + width + 8 * cells


class Board:
    """All sheets of one gateway; `own` is this process's, the one at `place`. `slate` is behind another descriptor."""

    def __init__(self, fds: tuple[int, ...] = (), place: int = 0, slate: int | None = None) -> None:
        self.sheets = [Sheet(fd) for fd in fds] or [Sheet()]
        self.slate = Slate(slate, place, len(self.sheets))
        for fd in (*fds, *(() if slate is None else (slate,))):
            os.close(fd)
        self.place = place
        self.own = self.sheets[place]
        self.own.take_over()

    def __repr__(self) -> str:
        return f"<Board {self.place} of {len(self.sheets)}>"

    def rows(self, at: float) -> Iterator[Row]:
        """What all processes tell at `at` (monotonic seconds); of dead ones their counts."""
        for sheet in self.sheets:
            lives = sheet.alive(at)
            for row in sheet.rows():
                is_gauge = BY_NAME[row.name].kind is Kind.GAUGE
                if not is_gauge or (lives and not math.isnan(row.values[0])):
                    yield row

    def alive(self, at: float) -> int:
        """How many processes gave a sign of life within the last seconds."""
        return sum(sheet.alive(at) for sheet in self.sheets)
