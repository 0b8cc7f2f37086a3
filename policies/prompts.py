"""How many tokens a prompt has and how many of them must be computed, where no tokenizer and no engine has said.

Both are smoothed means with a smoothed absolute deviation (the shape of TCP's retransmission timer, RFC 6298), because
being wrong costs more on one side. A sample's gain grows with its size: short prompts are mostly template.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable

from msgspec import Struct

LEAST, MOST = 1 / 16, 1.0  # tokens per byte: no tokenizer of today leaves these
START, START_SPREAD = 0.25, 0.05  # tokens per byte of English, and some room
FULL_BYTES = 2048  # a prompt of this size has the full gain
GAIN, SPREAD_GAIN = 1 / 16, 1 / 8
ROOM = 2.0  # deviations between the likely value and the cautious one
HITS_ENOUGH = 8  # prompts before a hit ratio is believed


class PromptTokens(Struct, frozen=True):
    """Tokens of one prompt. `least` is safe to refuse with, `likely` is the mean, `most` is safe to plan with."""

    least: int
    likely: int
    most: int


class _Smoothed:
    """A mean and a mean absolute deviation, exponentially smoothed."""

    __slots__ = ("mean", "spread")

    def __init__(self, mean: float, spread: float) -> None:
        self.mean, self.spread = mean, spread

    def add(self, value: float, size: float) -> None:
        """`size` from 0 to 1 scales the gain."""
        off = value - self.mean
        self.spread += SPREAD_GAIN * size * (abs(off) - self.spread)
        self.mean += GAIN * size * off


class PromptRatio:
    """Tokens per byte of one pool's prompts, learned from `usage`."""

    __slots__ = ("_ratio", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self._ratio = _Smoothed(START, START_SPREAD)

    def __repr__(self) -> str:
        return (
            f"<PromptRatio {self._ratio.mean:.3f} ± {self._ratio.spread:.3f} tokens per byte, {self.samples} samples>"
        )

    def add(self, prompt_bytes: int, prompt_tokens: int) -> None:
        """Learn that a prompt of `prompt_bytes` had `prompt_tokens`, cached ones included. An empty one is no news."""
        if prompt_bytes < 0 or prompt_tokens < 0:
            raise ValueError(f"prompt_bytes and prompt_tokens must not be negative: {prompt_bytes}, {prompt_tokens}")
        if prompt_bytes == 0 or prompt_tokens == 0:
            return
        self.samples += 1
        value = min(max(prompt_tokens / prompt_bytes, LEAST), MOST)
        self._ratio.add(value, min(1.0, prompt_bytes / FULL_BYTES))

    def tokens(self, prompt_bytes: int) -> PromptTokens:
        """What a prompt of `prompt_bytes` will have, at least 1."""
        if prompt_bytes < 0:
            raise ValueError(f"prompt_bytes must not be negative: {prompt_bytes}")
        room = ROOM * self._ratio.spread
        least = max(self._ratio.mean - room, LEAST)
        most = min(self._ratio.mean + room, MOST)
        return PromptTokens(
            max(1, math.floor(least * prompt_bytes)),
            max(1, round(self._ratio.mean * prompt_bytes)),
            max(1, math.ceil(most * prompt_bytes)),
        )


class _Hits:
    __slots__ = ("ratio", "samples")

    def __init__(self, first: float) -> None:
        self.samples = 1
        self.ratio = _Smoothed(first, first / 2)


class PrefixHits:
    """The part of a prompt found in an engine's prefix cache, by (tenant, route, backend). Unknown is none.

    Keeps `max_keys` ratios of about 300 bytes; the one not used for longest goes first.
    """

    __slots__ = ("_hits", "max_keys")

    def __init__(self, max_keys: int = 4096) -> None:
        if max_keys < 1:
            raise ValueError(f"max_keys must be at least 1, not {max_keys}")
        self.max_keys = max_keys
        self._hits: OrderedDict[Hashable, _Hits] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hits)

    def __repr__(self) -> str:
        return f"<PrefixHits {len(self)}/{self.max_keys} keys>"

    def add(self, key: Hashable, prompt_tokens: int, cached_tokens: int) -> None:
        """Learn that the engine had `cached_tokens` of `prompt_tokens`. Raises ValueError where that cannot be."""
        if not 0 <= cached_tokens <= prompt_tokens:
            raise ValueError(f"cached_tokens must be 0 to prompt_tokens ({prompt_tokens}), not {cached_tokens}")
        if prompt_tokens == 0:
            return
        ratio = cached_tokens / prompt_tokens
        hits = self._hits.get(key)
        if hits is not None:
            hits.samples += 1
            hits.ratio.add(ratio, 1.0)
            self._hits.move_to_end(key)
            return
        self._hits[key] = _Hits(ratio)
        if len(self._hits) > self.max_keys:
            self._hits.popitem(last=False)

    def forget(self, key: Hashable) -> None:
        """A backend that came back has an empty cache. Harmless for a key that is not known."""
        self._hits.pop(key, None)

    def uncached(self, key: Hashable, prompt_tokens: int) -> int:
        """Prompt tokens that must be computed: on the cautious side, at least 1, at most all."""
        hits = self._hits.get(key)
        if hits is None or hits.samples < HITS_ENOUGH:
            return max(1, prompt_tokens)
        self._hits.move_to_end(key)
        ratio = max(0.0, hits.ratio.mean - hits.ratio.spread)
        return max(1, math.ceil(prompt_tokens * (1.0 - ratio)))
