"""Stop strings: any text, any split of it, the same cut."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from backends.stops import Stops

LETTERS = st.text(alphabet="ab\n🙂", max_size=40)
STRINGS = st.lists(st.text(alphabet="ab\n🙂", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def cut(text: str, strings: tuple[str, ...], include: bool) -> str:
    """The text up to the stop string that ends first, the longest of those that end there. Slow and plain."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            return text[: end if include else end - max(map(len, found))]
    return text


def split(text: str, at: list[int]) -> list[str]:
    marks = sorted({min(one, len(text)) for one in at} | {0, len(text)})
    return [text[begin:end] for begin, end in itertools.pairwise(marks)]


@given(text=LETTERS, at=st.lists(st.integers(0, 40)), strings=STRINGS, include=st.booleans())
@example(text="aabab", at=[1, 2, 3, 4], strings=("abab", "b"), include=False)
def test_any_split_is_cut_the_same(text: str, at: list[int], strings: tuple[str, ...], include: bool) -> None:
    stops = Stops(strings, include)
    said = "".join([stops.push(piece) for piece in split(text, at)]) + stops.rest()
    assert said == cut(text, strings, include)
    assert stops.stopped == any(string in text for string in strings)
    assert stops.push("more") == ("" if stops.stopped else "more") or not stops.stopped


@given(text=LETTERS, at=st.lists(st.integers(0, 40)), strings=STRINGS)
def test_only_a_beginning_is_held_back(text: str, at: list[int], strings: tuple[str, ...]) -> None:
    stops, seen, said = Stops(strings), "", ""
    for piece in split(text, at):
        seen += piece
        said += stops.push(piece)
        if stops.stopped:
            break
        held = seen[len(said) :]
        beginnings = {string[:size] for string in strings for size in range(1, len(string))}
        longest = max((size for size in range(len(seen) + 1) if seen[len(seen) - size :] in beginnings), default=0)
        assert len(held) == longest


@given(text=LETTERS, at=st.lists(st.integers(0, 40)), strings=STRINGS, unarmed=st.integers(0, 40))
def test_what_ends_too_early_does_not_count(text: str, at: list[int], strings: tuple[str, ...], unarmed: int) -> None:
    """With `min_tokens`: only a string that ends after them stops."""
    stops, seen, expected = Stops(strings), 0, None
    said = ""
    for piece in split(text, at):
        armed = seen >= unarmed
        said += stops.push(piece, armed)
        for end in range(seen + 1, seen + len(piece) + 1):
            ends = [string for string in strings if text[:end].endswith(string)]
            if armed and ends and expected is None:
                expected = text[: end - max(map(len, ends))]
        seen += len(piece)
    said += stops.rest()
    assert stops.stopped == (expected is not None)
    assert said == (text if expected is None else expected)


def test_without_strings_everything_passes() -> None:
    stops = Stops(())
    assert stops.push("abc") == "abc"
    assert stops.rest() == ""
    assert not stops.stopped
