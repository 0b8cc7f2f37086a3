"""Prompts made here are those that transformers makes: the same text, the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends import words

pytestmark = pytest.mark.engines

GEMMA = Path(__file__).resolve().parents[2] / ".models" / "gemma-270m"
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello é 日本語 🙂\n\n  two  spaces <s> </s>"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "{{ not a template }} <|im_end|>"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "dial", "parameters": {"type": "object"}}}]


@pytest.fixture(params=["tiny", "gemma-270m"])
def folder(request: pytest.FixtureRequest, tiny: Path) -> Path:
    if request.param == "gemma-270m" and not GEMMA.is_dir():
        pytest.skip(f"there is no {GEMMA}; `make serve-vllm MODEL=gemma-270m` makes it")
    return tiny if request.param == "tiny" else GEMMA


def test_prompts_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(folder)
    ours = words.load(str(folder))
    assert ours.template is not None
    for chat in CHATS:
        for begin in (True, False):
            for tools in (None, TOOLS):
                expected = theirs.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=begin)
                text = ours.template.render(chat, tools, add_generation_prompt=begin)
                assert text == expected
                assert ours.encode(text, special=False) == theirs(text, add_special_tokens=False).input_ids
        said = chat[0]["content"]
        assert ours.encode(said) == theirs(said).input_ids
        ids = ours.encode(said, special=False)
        detokenizer = ours.detokenizer()
        assert "".join([detokenizer.push(token) for token in ids]) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert theirs.eos_token_id in ours.end_ids
