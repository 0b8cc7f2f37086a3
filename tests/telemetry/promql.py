"""Just enough of PromQL to say which series an expression asks for, and by which labels."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_KEYWORDS = frozenset(
    {
        *("sum", "min", "max", "topk", "rate", "increase", "histogram_quantile", "label_replace"),
        *("by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless"),
    }
)
_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"")
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_MATCHER = re.compile(r"(\w+)\s*(=~|!~|!=|=)\s*\"((?:[^\"\\]|\\.)*)\"")
_RANGE = re.compile(r"\[[^\]]*\]")


class Selector(NamedTuple):
    """A metric's name, and its matchers: label, operator, value."""

    name: str
    matchers: list[tuple[str, str, str]]


def selectors(expression: str) -> Iterator[Selector]:
    """Everything that is asked for, in order."""
    text = _RANGE.sub("", _GROUPING.sub(" ", expression))
    held: list[str] = []

    def hold(found: re.Match[str]) -> str:
        held.append(found[0])
        return f"{{{len(held) - 1}}}"

    text = re.sub(r"\{[^}]*\}", hold, text)
    text = _STRING.sub(" ", text)
    for found in _SELECTOR.finditer(text):
        name, at = found[1], found[2]
        if name not in _KEYWORDS:
            yield Selector(name, _MATCHER.findall(held[int(at)]) if at is not None else [])
