"""Text out of token ids as they come: whole characters only, each token looked at once.

Three families of tokenizers. Byte-level ones (GPT-2 and its heirs) and SentencePiece ones with byte fallback (Llama,
Gemma, Mistral) turn into bytes token by token, so that an incremental UTF-8 decoder is all it takes. Any other is
decoded by the library over a short window, as vLLM and TGI do.
"""

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

BROKEN = "\ufffd"
_WINDOW = 6  # tokens of the prompt that a decoder may look back at
_HELD = 32  # tokens without a whole character, after which what there is counts as broken


class Detokenizer(Protocol):
    """One answer's. `push` gives what is settled; what never becomes a whole character is never said."""

    def push(self, token: int) -> str: ...


class Pieces(Protocol):
    """What tokens are made of. See `backends.words.Words`."""

    def piece(self, token: int) -> str | bytes:
        """What it says: whole characters, else bytes. Empty for a special token, which is not said."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...
    def is_special(self, token: int) -> bool: ...


class ByBytes:
    """For tokens that are bytes. With `strip`, the answer's first space belongs to the tokenizer and is left out."""

    __slots__ = ("_held", "_piece", "_strip")

    def __init__(self, pieces: Pieces, prompt: Sequence[int], strip: bool) -> None:
        self._piece = pieces.piece
        self._held = b""  # of a character that is not whole yet
        self._strip = strip
        for token in prompt[-4:]:  # a character that the prompt began may end in the answer
            if piece := self._piece(token):
                self._bytes(piece)
                self._strip = False

    def push(self, token: int) -> str:
        """The text that this token settles; empty in the middle of a character."""
        piece = self._piece(token)
        text = piece if type(piece) is str and not self._held else self._bytes(piece)
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def _bytes(self, piece: str | bytes) -> str:
        data = self._held + (piece.encode() if isinstance(piece, str) else piece)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text


class ByWindow:
    """For every other tokenizer: what a token adds to the decoded text of those since the last but one settled text."""

    __slots__ = ("_before", "_ids", "_known", "_pieces")

    def __init__(self, pieces: Pieces, prompt: Sequence[int]) -> None:
        self._pieces = pieces
        self._ids = [token for token in prompt[-_WINDOW:] if not pieces.is_special(token)]
        self._known = len(self._ids)  # of `_ids`, whose text is `_before`
        self._before = pieces.decode(self._ids) if self._ids else ""

    def push(self, token: int) -> str:
        """See `ByBytes.push`."""
        if self._pieces.is_special(token):
            return ""
        self._ids.append(token)
        text = self._pieces.decode(self._ids)
        if text.endswith(BROKEN) and len(self._ids) - self._known < _HELD:
            return ""
        new = text[len(self._before) :]
        self._ids = self._ids[self._known :]  # begins with a whole character, which a window of fixed length may not
        self._known = len(self._ids)
        self._before = self._pieces.decode(self._ids)
        return new


class Cumulative:
    """The new part of a text that is sent whole each time, as some models do."""

    __slots__ = ("_said", "_whole")

    def __init__(self) -> None:
        self._said = 0  # characters
        self._whole = ""

    def piece(self, whole: str) -> str:
        """What is new and settled. A broken character at the end may become whole with the next text: it waits."""
        self._whole = whole
        settled = len(whole.rstrip(BROKEN))
        new = whole[self._said : settled]
        self._said = max(self._said, settled)
        return new

    def rest(self) -> str:
        """What still waits, when nothing follows."""
        new = self._whole[self._said :]
        self._said = len(self._whole)
        return new


def byte_level() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies, as GPT-2's encoder has them."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + nth): byte for nth, byte in enumerate(others)}


BYTE_OF = byte_level()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; of one that isn't (an added token with spaces) its text."""
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def fallback_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece token: `<0x41>` is a byte, U+2581 a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()


def family(decoder: Any) -> tuple[str, bool]:
    """Which of the three a tokenizer.json's `decoder` is (`bytes`, `fallback`, `window`), and whether it strips."""
    if not isinstance(decoder, dict):
        return "window", False
    steps = decoder.get("decoders", ()) if decoder.get("type") == "Sequence" else [decoder]
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return "bytes", False
    replace = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    fallback = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if steps == fallback:
        return "fallback", False
    if steps == [*fallback, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
        return "fallback", True
    return "window", False
