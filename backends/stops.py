"""Stop strings, matched in text that comes in pieces of any size.

The automaton of Aho and Corasick (1975): one step per character, whatever the number of strings. What is held back is
the longest end of the text that may still become a stop string, and nothing else.
"""

import re
from functools import lru_cache

from msgspec import Struct


class _Node(Struct, gc=False):
    """`depth` characters of some stop string; `found` is the length of the longest string that ends here, or 0."""

    depth: int
    next: dict[str, "_Node"]
    fail: "_Node | None" = None
    found: int = 0


class Automaton:
    """A set of stop strings. Immutable once made; shared between requests."""

    __slots__ = ("begins", "root")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.root = _Node(0, {})
        for string in strings:
            node = self.root
            for char in string:
                if char not in node.next:
                    node.next[char] = _Node(node.depth + 1, {})
                node = node.next[char]
            node.found = len(string)
        self._link()
        self.begins = re.compile("[" + re.escape("".join({string[0] for string in strings})) + "]").search

    def _link(self) -> None:
        line = list(self.root.next.values())
        for node in line:
            node.fail = self.root
        for node in line:  # grows: breadth first
            for char, after in node.next.items():
                after.fail = self.step(node.fail, char) if node.fail is not None else self.root
                after.found = after.found or after.fail.found
                line.append(after)

    def step(self, node: _Node | None, char: str) -> _Node:
        """Where `char` leads to."""
        while node is not None:
            if (after := node.next.get(char)) is not None:
                return after
            node = node.fail
        return self.root


automaton = lru_cache(maxsize=256)(Automaton)


class Stops:
    """The stop strings of one answer. Of several, the one that ends first counts; of those, the longest.

    `include`: the text keeps the string that stopped it.
    """

    __slots__ = ("_automaton", "_held", "_include", "_node", "after", "stopped")

    def __init__(self, strings: tuple[str, ...], include: bool = False) -> None:
        self._automaton = automaton(strings) if strings else None
        self._node = self._automaton.root if self._automaton else None
        self._include = include
        self._held = ""
        self.stopped = False
        self.after = ""  # what came with the end of the string that stopped it

    def push(self, text: str, armed: bool = True) -> str:
        """What may be said now. A string that ends while not `armed` does not count (`min_tokens`).

        Once it has stopped, nothing more is said.
        """
        machine = self._automaton
        if machine is None:
            return text
        if self.stopped:
            return ""
        if not self._held and machine.begins(text) is None:
            return text
        whole = self._held + text
        at = len(self._held)
        node = self._node
        for char in text:
            node = machine.step(node, char)
            at += 1
            if node.found and armed:
                self.stopped = True
                self._held, self.after = "", whole[at:]
                return whole[: at if self._include else at - node.found]
        self._node = node
        keep = node.depth if node is not None else 0
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def rest(self) -> str:
        """What was held back, when nothing follows."""
        held, self._held = self._held, ""
        return held
