"""What is read of a model's folder."""

import asyncio
import json
from pathlib import Path

import pytest

from backends import words
from backends.words import Words
from tests.support.tokenizers import byte_level, fallback, save


def test_a_folder(folder: Path, plain: Words) -> None:
    assert plain.folder == str(folder)
    assert plain.end_ids == (1,)
    assert (plain.pad_id, plain.context_tokens, plain.has_template) == (None, 512, True)
    assert plain.vocab_size > 256
    assert plain.fingerprint.startswith("sha256:")
    assert repr(plain) == f"<Words of {folder}: {plain.vocab_size} tokens>"


def test_end_ids_and_context_come_from_the_models_files(tmp_path: Path) -> None:
    save(byte_level(), tmp_path, pad_token={"content": "</s>", "special": True})
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 9, "max_position_embeddings": 77}}')
    found = words.load(str(tmp_path))
    assert (found.end_ids, found.context_tokens, found.pad_id) == ((9, 1), 77, 1)
    before = found.fingerprint
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    found = words.load(str(tmp_path))
    assert found.end_ids == (3, 1)
    assert found.fingerprint != before


def test_a_folder_is_read_again_only_if_it_changed(tmp_path: Path) -> None:
    save(byte_level(), tmp_path)
    first = words.load(str(tmp_path))
    assert words.load(str(tmp_path)) is first
    (tmp_path / "chat_template.jinja").write_text("new")
    assert words.load(str(tmp_path)) is not first


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    save(byte_level(), tmp_path, model_max_length=1e30, eos_token=None)
    found = words.load(str(tmp_path))
    assert (found.context_tokens, found.end_ids) == (0, ())


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    found = words.load(str(save(tokenizer, tmp_path)))
    assert len(found.encode("one two three four five six seven")) not in (4, 64)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tokenizer.json", "{}", r"tokenizer: .*tokenizer\.json: "),
        ("tokenizer.json", "no", r"tokenizer: .*tokenizer\.json: "),
        ("tokenizer_config.json", "[]", r"tokenizer: .*tokenizer_config\.json: "),
        ("generation_config.json", "{", r"tokenizer: .*generation_config\.json: "),
        ("chat_template.jinja", "{% if %}", r"the chat template 'default' is wrong"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    save(byte_level(), tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=says):
        words.load(str(tmp_path))


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no .*tokenizer\.json$"):
        words.load(str(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"tokenizer\.model has to be converted"):
        words.load(str(tmp_path))


def test_templates_where_older_models_keep_them(tmp_path: Path) -> None:
    save(byte_level(), tmp_path, template=None)
    assert not words.load(str(tmp_path)).has_template
    both = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    save(byte_level(), tmp_path, template=None, chat_template=both)
    found = words.load(str(tmp_path)).template
    assert found is not None
    assert (found.render([]), found.render([], [{}])) == ("D", "T")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    found = words.load(str(tmp_path)).template
    assert found is not None
    assert found.render([]) == "J"
    save(byte_level(), tmp_path, template=None, chat_template=[both[1]])
    (tmp_path / "chat_template.json").unlink()
    with pytest.raises(ValueError, match="none is called default"):
        words.load(str(tmp_path))


def test_a_prompt_does_not_begin_twice(tmp_path: Path) -> None:
    """A server that tokenizes the text by itself begins it with the same token."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = fallback()
    begins = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begins)])
    found = words.load(str(save(tokenizer, tmp_path)))
    assert found.adds_begin
    assert found.without_begin("<s>Hello") == "Hello"
    assert found.encode("Hello")[0] == begins
    assert found.encode("Hello", special=False)[0] != begins


def test_tokens_as_they_are_spelled(each: Words) -> None:
    ids = each.encode("The train", special=False)
    assert b"".join(each.spelled(token)[1] for token in ids).strip().decode().replace(" ", "") == "Thetrain"
    end = each.end_ids[0]
    assert each.spelled(end) == ("</s>", b"</s>")


async def test_a_thread_that_tokenizes_lets_the_loop_go_on(plain: Words) -> None:
    """The ticks of the loop while a long text is tokenized elsewhere."""
    work = asyncio.get_running_loop().run_in_executor(None, plain.encode, "The train waits by the river. " * 40_000)
    ticks = 0
    while not work.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert len(await work) > 100_000
    assert ticks >= 3
