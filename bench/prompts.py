"""Prompts of a given number of tokens, for whichever model answers.

A prompt is one fixed word and then words that are one token each, so its length is their count and a constant (the
chat template's own tokens). Both are found by asking whoever can count: `/v1/tokenize`, a tokenizer in a local folder,
or the `usage` of short answers.
"""

import random
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

FIRST = "Signal"
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what
all were we when your can said there use an each which she do how their if will up other about out many then them these
so some her would make like him into time has look two more write go see number no way could people my than first water
been call who its now find long down day did get come made may part over new sound take only little work know place year
live me back give most very after thing our just name good great where help through much before line right too mean old
any same tell boy follow came want show also around form three small set put end does another well large must big even
such because turn here why ask went men read need land
"""
CANDIDATES = tuple(_WORDS.split())
ENOUGH = 16  # different words that make a prompt

Count = Callable[[str], Awaitable[int]]
"""Tokens of a whole request whose only text is this, template included. Raises what its way of asking raises."""


class PromptError(Exception):
    """Prompts of a given length can't be made. Its text is one line for the operator."""


class Words(Struct, frozen=True):
    """Words of one token each (with the blank before them), and the tokens that every prompt has besides them."""

    words: tuple[str, ...]
    overhead: int

    def prompt(self, tokens: int, rng: random.Random) -> str:
        """A text that makes a request of `tokens` in all; of `overhead` where that is more."""
        return FIRST + "".join(rng.choices(self.words, k=max(0, tokens - self.overhead)))

    def shared(self, tokens: int, blocks: Sequence[int], block_tokens: int, rng: random.Random) -> str:
        """The same, where equal block ids are equal text: a prompt of whole blocks, and what is left over at its end.

        The constant counts as part of the first block, so that blocks of text and blocks of tokens end together.
        """
        left, parts = max(0, tokens - self.overhead), [FIRST]
        for nth, block in enumerate(blocks):
            if left <= 0:
                break
            whole = block_tokens - (self.overhead if nth == 0 else 0)
            words = random.Random(block).choices(self.words, k=max(0, whole))[:left]
            parts += words
            left -= len(words)
        return "".join(parts) + "".join(rng.choices(self.words, k=left))


async def calibrated(count: Count) -> Words:
    """Words for the model that `count` counts for. Raises PromptError where it has too few of one token."""
    overhead = await count(FIRST)
    for some in (CANDIDATES, LETTERS):
        words = tuple(f" {word}" for word in some)
        kept = await _single(count, words, overhead)
        if len(kept) >= ENOUGH:
            await _verify(count, Words(kept, overhead))
            return Words(kept, overhead)
    raise PromptError("this model's tokenizer has too few short words of one token to make prompts of a given length")


async def _single(count: Count, words: tuple[str, ...], overhead: int) -> tuple[str, ...]:
    """Those of one token. A group that counts as many tokens as words has nothing else in it."""
    excess = await count(FIRST + "".join(words)) - overhead - len(words)
    if excess <= 0:
        return words if excess == 0 else ()
    if len(words) == 1:
        return ()
    half = len(words) // 2
    return await _single(count, words[:half], overhead) + await _single(count, words[half:], overhead)


async def _verify(count: Count, words: Words) -> None:
    """Mixed prompts must count as promised. Raises PromptError."""
    for wanted in (words.overhead + 50, words.overhead + 333):
        found = await count(words.prompt(wanted, random.Random(wanted)))
        if abs(found - wanted) > 0.02 * wanted:
            raise PromptError(f"a prompt made for {wanted} tokens has {found}: this tokenizer joins words")


def local(folder: str) -> Callable[[str], int]:
    """The tokens of a text alone, by `tokenizer.json` in a folder. Raises PromptError."""
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - only where it is asked for
    except ImportError:
        raise PromptError("--tokenizer needs the package `tokenizers` (pip install tokenizers)") from None
    try:
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    except Exception as error:  # noqa: BLE001 - its Rust half raises Exception itself
        raise PromptError(f"--tokenizer: {folder}/tokenizer.json can't be loaded: {error}") from None

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count
