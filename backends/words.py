"""A model's words: its tokenizer and chat template, read from the folder that the model came in.

Needs the packages `tokenizers` and `jinja2`. What a folder holds beyond tokenizer.json may be missing.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from backends.chat_template import ChatTemplate, read_template
from backends.detokenize import ByBytes, ByWindow, Detokenizer, byte_level_bytes, fallback_bytes, family
from backends.toolcalls import NOTATION

MARKS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_SANE_TOKENS = 1 << 24  # transformers writes 10^30 for "no limit"
_PINNED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)


class _File(Struct):
    """What is looked at in tokenizer.json itself."""

    decoder: Any = None


class Words:
    """One tokenizer. Encoding and decoding are thread-safe.

    `end_ids` are the tokens that end an answer, the main one first. `context_tokens` is 0 where no file says it.
    """

    def __init__(
        self, tokenizer: Tokenizer, decoder: Any, settings: "_Settings", template: ChatTemplate | None
    ) -> None:
        self._tokenizer = tokenizer
        self._family, self._strips = family(decoder)
        self._pieces: dict[int, str | bytes] = {}
        self._as_bytes = fallback_bytes if self._family == "fallback" else byte_level_bytes
        self._special = frozenset(
            token
            for token, added in tokenizer.get_added_tokens_decoder().items()
            if added.special and added.content not in NOTATION
        )
        self.folder = settings.folder
        self.fingerprint = settings.fingerprint
        self.context_tokens = settings.context_tokens
        self.marks = settings.marks
        self.template = template
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.end_ids = settings.end_ids
        self.pad_id = self._mark_id("pad_token")
        self._begins = settings.marks.get("bos_token", "")
        self.adds_begin = bool(self._begins) and self.encode("x")[:1] == [tokenizer.token_to_id(self._begins)]

    def __repr__(self) -> str:
        return f"<Words of {self.folder}: {self.vocab_size} tokens>"

    @property
    def has_template(self) -> bool:
        return self.template is not None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text; with `special`, with what the tokenizer puts around a text by itself.

        Lets go of the interpreter, so that it may run in a thread; 1.5 us a token.
        """
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """For one answer to that prompt."""
        if self._family == "window":
            return ByWindow(self, prompt)
        return ByBytes(self, prompt, self._strips)

    def piece(self, token: int) -> str | bytes:
        """See `backends.detokenize.Pieces`. Empty also for an id that there is not."""
        try:
            return self._pieces[token]
        except KeyError:
            data = b"" if token in self._special else self._as_bytes(self.token_text(token))
            try:
                made: str | bytes = data.decode()
            except UnicodeDecodeError:
                made = data
            self._pieces[token] = made
            return made

    def token_text(self, token: int) -> str:
        """A token as it stands in the vocabulary; empty for an id that there is not."""
        return self._tokenizer.id_to_token(token) or "" if 0 <= token < 1 << 32 else ""

    def spelled(self, token: int) -> tuple[str, bytes]:
        """A token as text and as the bytes it stands for, special ones as they are written."""
        if self._family == "window":
            text = self.token_text(token).replace("\u2581", " ")
            return text, text.encode()
        if token in self._special:
            text = self.token_text(token)
            return text, text.encode()
        piece = self.piece(token)
        return (piece, piece.encode()) if isinstance(piece, str) else (piece.decode("utf-8", "replace"), piece)

    def is_special(self, token: int) -> bool:
        """Whether it says nothing: a special token, or an id that there is not."""
        return token in self._special or not self.token_text(token)

    def without_begin(self, text: str) -> str:
        """A templated prompt for a server that tokenizes it and begins every text with the same token by itself."""
        return text.removeprefix(self._begins) if self.adds_begin else text

    def _mark_id(self, name: str) -> int | None:
        token = self._tokenizer.token_to_id(self.marks[name]) if name in self.marks else None
        return None if token is None else int(token)


class _Settings(Struct, frozen=True):
    folder: str
    fingerprint: str
    marks: dict[str, str]
    end_ids: tuple[int, ...]
    context_tokens: int


def load(folder: str) -> Words:
    """The words of a model's folder. Raises ValueError naming the file that is wrong.

    The library holds the interpreter while it reads a vocabulary, for a second or more where that has 260,000 words. So
    a folder that has not changed is read once in a process, however often an engine is connected again.
    """
    where = Path(folder).expanduser()
    stamps = [(name, (where / name).stat().st_mtime_ns) for name in _PINNED if (where / name).is_file()]
    return _load(where, tuple(stamps))


@lru_cache(maxsize=16)
def _load(where: Path, stamps: tuple[tuple[str, int], ...]) -> Words:
    """`stamps` are there to be compared with those of the last time."""
    file = where / "tokenizer.json"
    if not file.is_file():
        hint = (
            f"; {where / 'tokenizer.model'} has to be converted first, by transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            if (where / "tokenizer.model").is_file()
            else ""
        )
        raise ValueError(f"tokenizer: there is no {file}{hint}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
        decoder = msgspec.json.decode(file.read_bytes(), type=_File).decoder
    except Exception as error:  # tokenizers raises nothing more special
        raise ValueError(f"tokenizer: {file}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _json(where / "tokenizer_config.json")
    marks = _marks(_json(where / "special_tokens_map.json") | config)
    model = _json(where / "config.json")
    settings = _Settings(
        folder=str(where),
        fingerprint=_fingerprint(where),
        marks=marks,
        end_ids=_end_ids(_json(where / "generation_config.json"), model, marks, tokenizer),
        context_tokens=_context(model, config),
    )
    return Words(tokenizer, decoder, settings, read_template(where, config, marks))


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"tokenizer: {file}: {error}") from None


def _marks(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that have a name; each is a string, or an object with its `content`."""
    found = {}
    for name in MARKS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _end_ids(
    generation: dict[str, Any], model: dict[str, Any], marks: dict[str, str], tokenizer: Tokenizer
) -> tuple[int, ...]:
    """The model's end tokens: one or several, of generation_config.json or config.json, and the tokenizer's own."""
    found: list[int] = []
    text_model = model.get("text_config")
    for config in (generation, model, text_model if isinstance(text_model, dict) else {}):
        value = config.get("eos_token_id")
        found += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)]
        if found:
            break
    if "eos_token" in marks and (own := tokenizer.token_to_id(marks["eos_token"])) is not None:
        found.append(own)
    return tuple(dict.fromkeys(found))


def _context(model: dict[str, Any], config: dict[str, Any]) -> int:
    text_model = model.get("text_config")
    for holder, name in ((model, "max_position_embeddings"), (text_model, "max_position_embeddings")):
        value = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(value, int) and value > 0:
            return value
    limit = config.get("model_max_length")
    return int(limit) if isinstance(limit, (int, float)) and 0 < limit <= _SANE_TOKENS else 0


def _fingerprint(folder: Path) -> str:
    found = hashlib.sha256()
    for name in _PINNED:
        if (file := folder / name).is_file():
            found.update(name.encode() + b"\0" + file.read_bytes())
    return f"sha256:{found.hexdigest()[:32]}"
