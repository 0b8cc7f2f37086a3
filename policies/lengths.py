"""How many tokens an answer will have, given those it already has.

Lengths come from the last completions of the same kind. An end that was not the model's own (the client left, a limit
cut it) is censored: the answer would have been at least that long. The survival function is Kaplan and Meier's (1958),
in Efron's form: the weight of a censored answer goes in equal parts to all longer ones (1967). What is left to no one,
because the longest were censored, lies at 1.5 times the longest seen.

The level of the upper quantile follows its own misses (adaptive conformal inference, Gibbs and Candès 2021), so that
it covers 90 % of what comes, also while lengths drift.
"""

import math
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from itertools import accumulate
from typing import NamedTuple

from msgspec import Struct

WINDOW = 512  # completions kept per kind
ENOUGH = 30  # completions that make a window worth reading
UNKNOWN = 512  # tokens: what an answer of an unknown kind is taken for
BEYOND = 1.5  # an answer longer than all history ends at this multiple of what it has

TARGET = 0.9
STEP_UP = 0.01  # of the level, on a miss
STEP_DOWN = STEP_UP * (1 - TARGET) / TARGET  # on a hit: the two balance at TARGET
LEVELS = (0.8, 0.999)  # where lengths are so few and equal that the level could fall without end
LOW = 0.1


class Kind(NamedTuple):
    """Whose answers resemble each other. `route` is any finer mark, such as "chat:stream:tools"."""

    tenant: str
    model: str
    route: str = ""


class Outlook(Struct, frozen=True):
    """The length O of one answer in tokens, given that it is longer than what exists. Never above the cap.

    `mean` and `variance` (tokens squared) are for sums over many; `q90` is for one request's end; `q10` is for saying
    that something cannot be. `samples` says how much history it stands on, 0 for none.
    """

    mean: float
    variance: float
    q10: int
    q90: int
    samples: int


class Coverage(Struct, frozen=True):
    """Completions judged since the start, and how many of them stayed within the upper quantile.

    A censored end below the quantile counts with the probability that it would have stayed below.
    """

    judged: int
    covered: float

    @property
    def ratio(self) -> float:
        """Covered by judged; 1.0 before the first."""
        return self.covered / self.judged if self.judged else 1.0


class Survival:
    """A discrete distribution of lengths: where its mass lies, and prefix sums of mass, mean and square."""

    __slots__ = ("_mass", "_points", "_second", "_sum")

    def __init__(self, samples: list[int]) -> None:
        """`samples` are ordered codes, 2·tokens for an end of its own, 2·tokens + 1 for a censored one."""
        points, masses = _efron(samples)
        self._points = array("q", points)
        self._mass = array("d", accumulate(masses, initial=0.0))
        firsts = [mass * point for mass, point in zip(masses, points, strict=True)]
        self._sum = array("d", accumulate(firsts, initial=0.0))
        seconds = [first * point for first, point in zip(firsts, points, strict=True)]
        self._second = array("d", accumulate(seconds, initial=0.0))

    def beyond(self, generated: int) -> bool:
        """No answer in history was longer than `generated` tokens."""
        return generated >= self._points[-1]

    def moments(self, generated: int, cap: int) -> tuple[float, float]:
        """Mean and variance of min(O, cap) given O > generated. Not for a `generated` beyond history."""
        low, high = bisect_right(self._points, generated), bisect_right(self._points, cap)
        alive = self._mass[-1] - self._mass[low]
        capped = self._mass[-1] - self._mass[high]
        mean = (self._sum[high] - self._sum[low] + capped * cap) / alive
        second = (self._second[high] - self._second[low] + capped * cap * cap) / alive
        return mean, max(0.0, second - mean * mean)

    def quantile(self, generated: int, level: float) -> int:
        """The smallest length v with P(O <= v | O > generated) >= level. Not for a `generated` beyond history."""
        low = bisect_right(self._points, generated)
        alive = self._mass[-1] - self._mass[low]
        target = self._mass[low] + level * alive - 1e-9
        found = bisect_left(self._mass, target, low + 1)
        return self._points[min(found, len(self._points)) - 1]

    def exceeds(self, length: int, given: int) -> float:
        """P(O > length | O > given), for length >= given; 0 beyond history."""
        alive = self._mass[-1] - self._mass[bisect_right(self._points, given)]
        if alive <= 0.0:
            return 0.0
        return (self._mass[-1] - self._mass[bisect_right(self._points, length)]) / alive


def _efron(samples: list[int]) -> tuple[list[int], list[float]]:
    """The lengths that carry mass and the mass of each; at one length own ends come before censored ones."""
    left = len(samples)
    weight = 1.0 / left
    points, masses = [], []
    for code in samples:
        left -= 1
        if not code & 1:
            points.append(code >> 1)
            masses.append(weight)
        elif left:
            weight *= (left + 1) / left
        else:
            points.append(max((code >> 1) + 1, math.ceil(BEYOND * (code >> 1))))
            masses.append(weight)
    return points, masses


class _Completions:
    """The last completions of one kind. The survival function is worked out again after each 1/32 of the window."""

    __slots__ = ("_changes", "_newest", "_ordered", "_survival", "level")

    def __init__(self) -> None:
        self._newest: deque[int] = deque()
        self._ordered: list[int] = []
        self._survival: Survival | None = None
        self._changes = 0
        self.level = TARGET

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, code: int) -> None:
        insort(self._ordered, code)
        self._newest.append(code)
        if len(self._newest) > WINDOW:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]
        self._changes += 1

    def survival(self) -> Survival:
        if self._survival is None or self._changes > len(self._ordered) >> 5:
            self._survival = Survival(self._ordered)
            self._changes = 0
        return self._survival

    def judge(self, tokens: int, censored: bool) -> float:
        """The probability that this end was within the quantile, which then moves by it."""
        survival = self.survival()
        quantile = survival.quantile(0, self.level) if not survival.beyond(0) else 1
        hit = float(tokens <= quantile)
        if hit and censored:
            hit -= survival.exceeds(quantile, tokens)
        level = self.level + STEP_UP * (1.0 - hit) - STEP_DOWN * hit
        self.level = min(max(level, LEVELS[0]), LEVELS[1])
        return hit


class Lengths:
    """Output lengths by kind, with back-off: (tenant, model, route), (tenant, model), (model), then UNKNOWN.

    Keeps `max_windows` windows of about 40 kB when full; the one not used for longest goes first.
    """

    __slots__ = ("_covered", "_judged", "_windows", "max_windows")

    def __init__(self, max_windows: int = 1024) -> None:
        if max_windows < 3:
            raise ValueError(f"max_windows must be at least 3, one per step of the back-off, not {max_windows}")
        self.max_windows = max_windows
        self._windows: OrderedDict[tuple[str, ...], _Completions] = OrderedDict()
        self._judged, self._covered = 0, 0.0

    def __repr__(self) -> str:
        return f"<Lengths {len(self._windows)} windows, {self._judged} judged, {self.coverage.ratio:.1%} covered>"

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def coverage(self) -> Coverage:
        return Coverage(self._judged, self._covered)

    def add(self, kind: Kind, tokens: int, censored: bool = False) -> None:
        """Learn that an answer ended at `tokens`; `censored` if not by the model's own will. Judges, then learns."""
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, not {tokens}")
        if censored and tokens == 0:
            return  # at least nothing: no news
        used = self._best(kind)
        if used is not None:
            self._judged += 1
            self._covered += used.judge(tokens, censored)
        code = 2 * tokens + censored
        for key in _steps(kind):
            window = self._windows.get(key)
            if window is None:
                window = self._windows[key] = _Completions()
            window.add(code)
            self._windows.move_to_end(key)
        while len(self._windows) > self.max_windows:
            self._windows.popitem(last=False)

    def outlook(self, kind: Kind, generated: int, cap: int) -> Outlook:
        """The length of an answer that has `generated` tokens so far and may have `cap`.

        `cap` is the smaller of max_tokens and what the context leaves, at least 1. At the cap the answer ends there.
        """
        if generated < 0:
            raise ValueError(f"generated must not be negative, not {generated}")
        if cap < 1:
            raise ValueError(f"cap must be at least 1 token, not {cap}")
        window = self._best(kind)
        if generated >= cap:
            return Outlook(float(generated), 0.0, generated, generated, 0 if window is None else len(window))
        if window is None:
            return _guess(max(UNKNOWN, math.ceil(BEYOND * generated)), generated, cap, 0)
        survival = window.survival()
        if survival.beyond(generated):
            return _guess(max(generated + 1, math.ceil(BEYOND * generated)), generated, cap, len(window))
        mean, variance = survival.moments(generated, cap)
        low, high = survival.quantile(generated, LOW), survival.quantile(generated, window.level)
        return Outlook(min(max(mean, generated + 1.0), cap), variance, min(low, cap), min(high, cap), len(window))

    def _best(self, kind: Kind) -> _Completions | None:
        """The finest window with enough in it."""
        for key in _steps(kind):
            window = self._windows.get(key)
            if window is not None and len(window) >= ENOUGH:
                self._windows.move_to_end(key)
                return window
        return None


def _steps(kind: Kind) -> tuple[tuple[str, ...], ...]:
    return (tuple(kind), (kind.tenant, kind.model), (kind.model,))


def _guess(tokens: int, generated: int, cap: int, samples: int) -> Outlook:
    """What is assumed without history: the cautious length for everything, and one more token for the shortest."""
    tokens = min(tokens, cap)
    spread = (tokens - generated) / 2
    return Outlook(float(tokens), spread * spread, generated + 1, tokens, samples)
