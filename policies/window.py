"""The last so many numbers, kept in order, so that any quantile of them is a look-up."""

import math
from bisect import bisect_left, insort
from collections import deque


class Window:
    """The newest `size` numbers. Adding is O(size) memory moves (microseconds), a quantile is O(1)."""

    __slots__ = ("_newest", "_ordered", "size")

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, not {size}")
        self.size = size
        self._newest: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def __repr__(self) -> str:
        return f"<Window {len(self)}/{self.size}>"

    def add(self, value: float) -> None:
        """Take `value` in and let the oldest go. Raises ValueError for one that cannot be ordered."""
        if math.isnan(value):
            raise ValueError("value must be a number, not nan")
        insort(self._ordered, value)
        self._newest.append(value)
        if len(self._newest) > self.size:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]

    def quantile(self, level: float) -> float:
        """The smallest number that at least `level` of the window do not exceed. Raises ValueError when empty."""
        if not self._ordered:
            raise ValueError("an empty window has no quantile")
        rank = math.ceil(level * len(self._ordered) - 1e-9)
        return self._ordered[min(max(rank, 1), len(self._ordered)) - 1]
