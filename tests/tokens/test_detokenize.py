"""Text that comes token by token is the text that the tokenizer makes of all of them."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.detokenize import BROKEN, Cumulative, family
from backends.words import Words
from tests.support.tokenizers import CORPUS

MIXED = st.one_of(
    st.text(),
    st.text(alphabet=CORPUS),
    st.text(alphabet="🙂👩\u200d👧🚂é日\u0301 a\n"),
)
SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def told(words: Words, ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    """What each token settles."""
    detokenizer = words.detokenizer(prompt)
    return [detokenizer.push(token) for token in ids]


@SHARED
@given(text=MIXED)
def test_any_text_comes_back_whole(each: Words, text: str) -> None:
    ids = each.encode(text, special=False)
    assert "".join(told(each, ids)) == each.decode(ids)


@SHARED
@given(text=MIXED)
def test_nothing_broken_is_ever_said(each: Words, text: str) -> None:
    ids = each.encode(text.replace(BROKEN, ""), special=False)
    whole = each.decode(ids)
    if BROKEN in whole:
        return  # only where the vocabulary itself has no word for it
    said = ""
    for piece in told(each, ids):
        said += piece
        assert BROKEN not in piece
        assert whole.startswith(said)


@SHARED
@given(data=st.data())
def test_any_tokens_in_any_order(plain: Words, data: st.DataObject) -> None:
    """Bytes that are no UTF-8 at all come out as the tokenizer has them, but for half a character at the end."""
    ids = data.draw(st.lists(st.integers(0, plain.vocab_size - 1)))
    text, whole = "".join(told(plain, ids)), plain.decode(ids)
    assert whole.startswith(text)
    assert not whole[len(text) :].strip(BROKEN)


@SHARED
@given(data=st.data())
def test_any_split_of_a_character_over_tokens(each: Words, data: st.DataObject) -> None:
    """Each byte a token of its own: a character is said with its last byte, and not before."""
    text = data.draw(st.text(alphabet="🙂é日x", min_size=1))
    byte = {token: nth for nth in range(each.vocab_size) for token in [each.token_text(nth)]}
    names = [f"<0x{one:02X}>" for one in text.encode()]
    if not all(name in byte for name in names):
        return
    pieces = told(each, [byte[name] for name in names], (byte["<0x41>"],))
    said = iter(pieces)
    for char in text:
        *silent, last = [next(said) for _ in char.encode()]
        assert not any(silent)
        assert last == char


def test_a_half_character_at_the_end_is_never_said(plain: Words) -> None:
    ids = plain.encode("ab🦉", special=False)
    assert "".join(told(plain, ids[:-1])) == "ab"
    assert "".join(told(plain, ids)) == "ab🦉"


def test_special_tokens_are_not_said(each: Words) -> None:
    ids = each.encode("The train", special=False)
    special = [token for token in range(each.vocab_size) if each.is_special(token)]
    assert len(special) >= 4
    assert "".join(told(each, [*special, *ids, *special])) == each.decode(ids)


def test_tokens_that_there_are_not_say_nothing(each: Words) -> None:
    assert told(each, [each.vocab_size + 7, (1 << 32) + 1, -1]) == ["", "", ""]


def test_after_a_prompt_the_first_space_is_the_answers(each: Words) -> None:
    """SentencePiece drops a text's first space; the middle of a text has it."""
    prompt, whole = each.encode("The train", special=False), each.encode("The train waits", special=False)
    if whole[: len(prompt)] == prompt:
        assert "".join(told(each, whole[len(prompt) :], tuple(prompt))) == " waits"


def test_added_tokens_with_spaces(plain: Words) -> None:
    ids = plain.encode("a<tool call>b", special=False)
    assert len(ids) == 3
    assert "".join(told(plain, ids)) == "a<tool call>b"


def test_broken_bytes_do_not_hold_up_what_follows(each: Words) -> None:
    """A model may draw half a character and go on: with the next text it is settled, as broken as it is."""
    half = next((nth for nth in range(each.vocab_size) if each.token_text(nth) in ("<0xF0>", "\u00f0")), None)
    if half is None:
        return
    (after,) = each.encode("t", special=False)[-1:]
    said = told(each, [after, half, after, after])
    assert "".join(said[2:]) == BROKEN + "tt"


REPLACE: dict[str, Any] = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}


@pytest.mark.parametrize(
    ("decoder", "found"),
    [
        (None, ("window", False)),
        ({"type": "WordPiece"}, ("window", False)),
        ({"type": "ByteLevel", "add_prefix_space": True}, ("bytes", False)),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, ("bytes", False)),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}]}, ("window", False)),
        ({"type": "Sequence", "decoders": [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]}, ("fallback", False)),
        ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}, ("window", False)),
    ],
)
def test_families_are_told_apart(decoder: Any, found: tuple[str, bool]) -> None:
    assert family(decoder) == found


@given(parts=st.lists(st.text(alphabet="a🙂é")), hold=st.booleans())
def test_a_text_sent_whole_each_time(parts: list[str], hold: bool) -> None:
    cumulative, whole, said = Cumulative(), "", ""
    for part in parts:
        whole += part
        said += cumulative.piece(whole + (BROKEN if hold else ""))
        assert said == whole
    assert cumulative.rest() == (BROKEN if hold and parts else "")
    assert cumulative.rest() == ""
