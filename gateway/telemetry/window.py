"""Numbers of one instant, and what became of them over the last seconds: rates, and quantiles out of buckets."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

from msgspec import Struct

from gateway.telemetry.metrics_table import BY_NAME

Labels = tuple[str, ...]
Series = dict[str, dict[Labels, list[float]]]


class Numbers:
    """All series of an instant, by the name of their family and their labels."""

    def __init__(self, series: Series) -> None:
        self._series = series

    def __repr__(self) -> str:
        return f"<Numbers of {len(self._series)} families>"

    def each(self, name: str) -> Iterator[tuple[Labels, list[float]]]:
        yield from self._series.get(name, {}).items()

    def one(self, name: str, *labels: str) -> float | None:
        """A counter or gauge; None where it is not told."""
        found = self._series.get(name, {}).get(labels)
        return None if found is None else found[0]

    def total(self, name: str, wanted: Callable[[Labels], bool]) -> list[float]:
        """The cells of all series with such labels, added up."""
        total = [0.0] * BY_NAME[name].cells
        for labels, values in self.each(name):
            if wanted(labels):
                total = [a + b for a, b in zip(total, values, strict=True)]
        return total

    def by(self, name: str, position: int) -> defaultdict[str, float]:
        """Counters added up by one of their labels."""
        totals: defaultdict[str, float] = defaultdict(float)
        for labels, values in self.each(name):
            totals[labels[position]] += values[0]
        return totals


def everything(_: Labels) -> bool:
    return True


class Span(Struct, frozen=True):
    """Two instants, `seconds` apart. The first is None where there is only one as yet."""

    first: Numbers | None
    last: Numbers
    seconds: float

    def rise(self, name: str, wanted: Callable[[Labels], bool] = everything) -> list[float] | None:
        """What came to these cells, all series with such labels together."""
        if self.first is None:
            return None
        pairs = zip(self.last.total(name, wanted), self.first.total(name, wanted), strict=True)
        return [max(0.0, last - first) for last, first in pairs]

    def rate(self, name: str, wanted: Callable[[Labels], bool] = everything) -> float | None:
        """Of a counter, per second."""
        rise = self.rise(name, wanted)
        return None if rise is None else rise[0] / self.seconds

    def rates(self, name: str, position: int) -> dict[str, float]:
        """Of counters, per second, added up by one of their labels; those that are new since are there too."""
        if self.first is None:
            return {}
        first = self.first.by(name, position)
        return {label: (total - first[label]) / self.seconds for label, total in self.last.by(name, position).items()}

    def quantiles(self, name: str, wanted: Callable[[Labels], bool], *parts: float) -> tuple[float, ...] | None:
        """Of a histogram's new values; None where there are none."""
        rise = self.rise(name, wanted)
        if rise is None or not any(rise[:-1]):
            return None
        return tuple(quantile(BY_NAME[name].buckets, rise[:-1], part) for part in parts)


class Window:
    """Remembers the instants of the last `span_s` seconds, and takes the oldest of them for the beginning."""

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self._seen: deque[tuple[float, Numbers]] = deque()

    def __repr__(self) -> str:
        return f"<Window of {self.span_s:g} s, {len(self._seen)} seen>"

    def add(self, at: float, numbers: Numbers) -> Span:
        while self._seen and self._seen[0][0] < at - self.span_s:
            self._seen.popleft()
        self._seen.append((at, numbers))
        began, first = self._seen[0]
        return Span(first, numbers, at - began) if at > began else Span(None, numbers, 0.0)


def quantile(bounds: tuple[float, ...], counts: list[float], part: float) -> float:
    """Linear within its bucket, as Prometheus' `histogram_quantile`; beyond the last bound it is that bound.

    `counts` are those of each bucket alone, one more than there are bounds.
    """
    rank, below = part * math.fsum(counts), 0.0
    for nth, count in enumerate(counts):
        if count and below + count >= rank:
            if nth == len(bounds):
                break
            low = bounds[nth - 1] if nth else 0.0
            return low + (bounds[nth] - low) * (rank - below) / count
        below += count
    return bounds[-1]
