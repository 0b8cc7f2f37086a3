"""A tiny reversible tokenizer: common words are one token, with or without a space before them; all else is bytes.

`tests/support/tokenizers.py` makes real tokenizer files with the same ids.
"""

import re

PAD, BOS, EOS = 0, 1, 2
BYTE0 = 3
_COMMON = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so said what up
its about into than them can only other time new some could these two may first then do any like my now over
such our man me even most made after also did many off before must well back through years where much your way
down should because long each just state those people too little make very year still see own work men day get
here old both between life being under three never know same last another while us great
"""
WORDS = _COMMON.split()
PIECES = [" " + word for word in WORDS] + WORDS
IDS = {piece: BYTE0 + 256 + at for at, piece in enumerate(PIECES)}

_SPLIT = re.compile(r" ?[A-Za-z]+|\s|[^A-Za-z\s]+")


def encode(text: str) -> list[int]:
    ids: list[int] = []
    for piece in _SPLIT.findall(text):
        if piece in IDS:
            ids.append(IDS[piece])
        else:
            ids.extend(BYTE0 + byte for byte in piece.encode())
    return ids


def to_bytes(ids: list[int]) -> bytes:
    """What the ids stand for; special tokens stand for nothing."""
    out = bytearray()
    for one in ids:
        if one >= BYTE0 + 256:
            out += PIECES[one - BYTE0 - 256].encode()
        elif one >= BYTE0:
            out.append(one - BYTE0)
    return bytes(out)


def decode(ids: list[int]) -> str:
    """Half of a character comes out as U+FFFD, as it does in most tokenizers."""
    return to_bytes(ids).decode("utf-8", errors="replace")


def babble(seed: int, tokens: int) -> list[int]:
    """So many words, the same for the same seed."""
    state = (seed * 2654435761 + 12345) & 0xFFFFFFFF
    ids = []
    for _ in range(tokens):
        state = (1103515245 * state + 12345) & 0x7FFFFFFF
        ids.append(BYTE0 + 256 + (state >> 8) % len(WORDS))
    return ids
