"""Small real tokenizers, built here: one of each family that a model's folder may hold, with a chat template."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CONTEXT_TOKENS = 512
CORPUS = """\
The signal box stands by the river, and the signalman knows each train by its sound. Before a train may enter a section
of line the box hands it a token; without one it waits. café naïve Übergröße 日本語の文章です。 Привет,
мир! שלום 🙂 👩‍👩‍👧 🚂🚃🚃
def token(line: str) -> int:\n    return len(line) # spaces   and\ttabs\n"""
TEMPLATE = """\
{{- bos_token -}}
{%- if tools %}{{ '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([CORPUS], trainer)
    made.add_tokens(["<tool call>"])
    return made


def fallback(strip: bool = True) -> Tokenizer:
    """As Llama 2 and Gemma have it: SentencePiece with bytes for what is not in the vocabulary."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[^ ]+"), "isolated")
    words = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    made.train_from_iterator(["".join(char for char in CORPUS if char.isascii()).replace(" ", " \u2581")], words)
    state: dict[str, Any] = json.loads(made.to_str())
    vocabulary: dict[str, int] = state["model"]["vocab"]
    for byte in range(256):
        vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
    made = Tokenizer.from_str(json.dumps(state))
    made.pre_tokenizer = None
    start = [normalizers.Prepend("\u2581")] if strip else []
    made.normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return made


def metaspace() -> Tokenizer:
    """Of neither family: what the library alone can decode."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(CORPUS.splitlines(), trainer)
    return made


def pieces(words: Sequence[str]) -> Tokenizer:
    """Three special tokens, 256 bytes, and these words: the ids are in that order."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {word: 259 + nth for nth, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|\s|[^A-Za-z\s]+"), "isolated")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<pad>", "<s>", "</s>"])
    return made


FAMILIES = {
    "byte-level": byte_level,
    "fallback": fallback,
    "fallback without strip": lambda: fallback(strip=False),
    "metaspace": metaspace,
}


def save(tokenizer: Tokenizer, folder: Path, *, template: str | None = TEMPLATE, **config: Any) -> Path:
    """A model's folder with this tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    known = {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": CONTEXT_TOKENS} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
