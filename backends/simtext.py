"""The language of the simulated engine: a tokenizer without a vocabulary, and text that follows from a key alone."""

import hashlib
import math
import re
import statistics
import struct
import zlib

MAX_TOKEN_CHARS = 8
TOKEN_IDS = 50_000

_PIECES = re.compile(r" ?\w{1,6}|[^\w\s]|\s{1,8}")
# At most six letters each, so that each is one token.
_WORDS = """
signal block token line train track lever relay clear route river water stone light quiet green slow long near
over under after before again always never seldom often runs waits turns holds keeps gives takes finds brings
makes the a one each every some many few this that its our small wide old new bright north south early late past
first last next other same whole and then while until so yet where there here when which box bell arm lamp wire
post yard house field valley hill road bridge tunnel corner
"""
_VOCABULARY = tuple(_WORDS.split())
_MULTIPLIER, _INCREMENT, _MASK = 6364136223846793005, 1442695040888963407, (1 << 64) - 1


def pieces(text: str) -> list[str]:
    """The tokens of a text: words in parts of at most six letters, each with the blank before it, and single signs."""
    return _PIECES.findall(text)


def count(text: str) -> int:
    return len(pieces(text))


def least_tokens(text: str) -> int:
    """A lower bound of `count`, without looking at the text."""
    return len(text) // MAX_TOKEN_CHARS


def token_ids(parts: list[str]) -> list[int]:
    """A number for each token; two different tokens may share one."""
    return [zlib.crc32(part.encode()) % TOKEN_IDS for part in parts]


def prefix_names(ids: list[int], block: int) -> tuple[int, ...]:
    """A name for each full block of tokens together with all before it."""
    names, name = [], 0
    for start in range(0, len(ids) - block + 1, block):
        name = hash((name, *ids[start : start + block]))
        names.append(name)
    return tuple(names)


def key(seed: int, text: str, choice: int = 0) -> int:
    """What an answer follows from: 64 bits of the seed, the prompt and the number of the choice."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, salt=struct.pack("<qq", _signed(seed), choice))
    return int.from_bytes(digest.digest(), "little")


def _signed(seed: int) -> int:
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def natural_tokens(number: int, mean: float, sigma: float) -> int:
    """How many tokens the answer with this key has: lognormal with that mean, at least 1."""
    share = (number % 999_983 + 0.5) / 999_983
    return max(1, round(mean * math.exp(_NORMAL.inv_cdf(share) * sigma - sigma * sigma / 2)))


_NORMAL = statistics.NormalDist()


class Writer:
    """Writes the text of one answer, token by token; each word it makes is one token for `pieces` as well."""

    __slots__ = ("_capital", "_first", "_since_stop", "_state")

    def __init__(self, number: int) -> None:
        self._state = number
        self._first = True
        self._capital = True
        self._since_stop = 0

    def write(self, tokens: int) -> str:
        """The next so many tokens."""
        return "".join([self._token() for _ in range(tokens)])

    def _token(self) -> str:
        self._state = state = (self._state * _MULTIPLIER + _INCREMENT) & _MASK
        draw = state >> 33
        if self._since_stop > 3 and draw % 11 == 0:
            self._since_stop, self._capital = 0, True
            return "."
        self._since_stop += 1
        word = _VOCABULARY[(draw >> 4) % len(_VOCABULARY)]
        if self._capital:
            word, self._capital = word.capitalize(), False
        if self._first:
            self._first = False
            return word
        return " " + word


def unit_vector(number: int, dims: int) -> list[float]:
    """A vector of length 1 that follows from the key."""
    draws = hashlib.shake_128(number.to_bytes(8, "little")).digest(dims * 4)
    values = [one / 2**31 - 1.0 for one in struct.unpack(f"<{dims}I", draws)]
    length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
    return [value / length for value in values]
