"""Server-sent events on the wire: cut into whole events, never rewritten."""

import re
from collections.abc import Iterator

HELD_BYTES = 16 * 1024 * 1024  # of one event that has not ended yet

_EVENT = re.compile(rb".*?\n\r?\n", re.DOTALL)


class Framer:
    """Holds back what is not a whole event yet. Lines end with LF or CRLF.

    A read that ends with an event costs nothing; an event in many pieces is joined once.
    """

    __slots__ = ("_held", "_held_bytes", "_seam")

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._seam = b""  # the last three bytes held: an end may lie across two reads

    def feed(self, data: bytes) -> bytes:
        """The whole events that there are now, none or several. Raises ValueError when one grows without end."""
        if not self._held:
            if data.endswith(b"\n\n"):
                return data
            joined = data
        elif _last_end(self._seam + data):
            self._held.append(data)
            joined = b"".join(self._held)
        else:
            return self._hold(data)
        end = _last_end(joined)
        self._held.clear()
        self._held_bytes = 0
        if end < len(joined):
            self._hold(joined[end:])
        return joined[:end]

    def rest(self) -> bytes:
        """What never became a whole event."""
        return b"".join(self._held)

    def _hold(self, data: bytes) -> bytes:
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > HELD_BYTES:
            raise ValueError(f"an event of more than {HELD_BYTES} bytes")
        self._seam = data[-3:] if len(data) >= 3 else (self._seam + data)[-3:]
        return b""


def split(events: bytes) -> list[bytes]:
    """Whole events, each with its empty line."""
    return list(each(events))


def each(events: bytes, begins: int = 0) -> Iterator[bytes]:
    """Whole events from `begins` on, one by one as they are asked for."""
    if b"\r" in events:
        for found in _EVENT.finditer(events, begins):
            yield found.group()
        return
    while (end := events.find(b"\n\n", begins)) >= 0:
        yield events[begins : end + 2]
        begins = end + 2


def payload(event: bytes) -> bytes:
    """The data of one event, its lines joined; empty for a comment."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return lines[0] if len(lines) == 1 else b"\n".join(lines)


def _last_end(data: bytes) -> int:
    """Where the last whole event ends, 0 if none does."""
    lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\n\r\n")
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)
