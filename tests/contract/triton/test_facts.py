"""The engine's own description against the running server: both sides of every contradiction are shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from backends import triton_facts
from backends.protocol import BackendError, Limits, Refused
from tests.contract.triton.asking import connected, prompt
from tests.contract.triton.fake import FakeTriton, inflight, llmapi

ENGINE: dict[str, Any] = {
    "version": "1.2.1",
    "pretrained_config": {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "vocab_size": 128_256,
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    },
    "build_config": {
        "max_input_len": 1_024,
        "max_seq_len": 1_536,
        "max_batch_size": 32,
        "max_num_tokens": 8_192,
        "max_beam_width": 1,
        "kv_cache_type": "PAGED",
        "plugin_config": {"tokens_per_block": 32},
    },
}


def changed(**build: Any) -> dict[str, Any]:
    return ENGINE | {"build_config": ENGINE["build_config"] | build}


def written(folder: Path, said: Any) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(said))
    return str(file)


async def test_an_engine_that_fits(tokenizer: Path, tmp_path: Path) -> None:
    given = {"engine_config": written(tmp_path, ENGINE)}
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer, **given) as backend:
        bundle = backend.bundle
        assert (bundle.engine, bundle.engine_version) == ("tensorrt-llm", "1.2.1")
        assert (bundle.precision, bundle.quantization) == ("bfloat16", "FP8")
        assert (bundle.model, bundle.context_tokens, bundle.max_running) == ("LlamaForCausalLM", 1_536, 32)
        with pytest.raises(Refused, match="at most 1024 tokens of prompt"):
            await backend.plan(prompt("of the time " * 400))


@pytest.mark.parametrize(
    ("said", "parameters", "settings", "sides"),
    [
        (changed(max_beam_width=1), {"max_beam_width": "4"}, {}, ["max_beam_width = 1", "max_beam_width = 4"]),
        (changed(kv_cache_type="CONTINUOUS"), {}, {}, ["kv_cache_type = CONTINUOUS", "needs PAGED"]),
        (changed(max_seq_len=512), {}, {"context_tokens": 1_024}, ["context_tokens = 1024", "has max_seq_len = 512"]),
        (
            ENGINE | {"pretrained_config": {"vocab_size": 100}},
            {},
            {},
            ["tokenizer has 531 tokens", "vocab_size = 100"],
        ),
        (ENGINE, {}, {"limits": Limits(max_running=100)}, ["limits.max_running = 100", "max_batch_size = 64"]),
    ],
)
async def test_both_sides_are_shown(
    said: Any, parameters: dict[str, str], settings: Any, sides: list[str], tokenizer: Path, tmp_path: Path
) -> None:
    models = inflight()
    models[0].parameters |= parameters
    async with FakeTriton(*models) as fake:
        with pytest.raises(BackendError) as caught:
            async with connected(fake, tokenizer, engine_config=written(tmp_path, said), **settings):
                pass
        for side in sides:
            assert side in str(caught.value)


async def test_models_that_cannot_stream(tokenizer: Path) -> None:
    models = inflight()
    models[0].decoupled = False
    async with FakeTriton(*models) as fake:
        with pytest.raises(BackendError, match=r"inflight-tokens streams, but .* has decoupled = false"):
            async with connected(fake, tokenizer):
                pass


async def test_a_model_yaml(tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text("model: TinyLlama\ndtype: float16\nmax_batch_size: 24\ntriton_config:\n  decoupled: true\n")
    given = {"engine_config": str(file)}
    async with FakeTriton(*llmapi()) as fake, connected(fake, tokenizer, **given) as backend:
        assert (backend.bundle.model, backend.bundle.precision) == ("TinyLlama", "float16")
        assert backend.bundle.max_running == 24
    file.write_text("model: TinyLlama\ntriton_config:\n  decoupled: false\n")
    async with FakeTriton(*llmapi()) as fake:
        with pytest.raises(BackendError, match=r"decoupled = false, but .* runs with decoupled = true"):
            async with connected(fake, tokenizer, **given):
                pass


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.json", None, "No such file"),
        ("bad.json", "{", "engine_config"),
        ("list.json", "[]", "says nothing of a TensorRT-LLM engine"),
        ("other.json", '{"a": 1}', "is it the right file"),
        ("bad.yaml", "a: [", "not YAML"),
    ],
)
def test_files_that_are_none(name: str, text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        triton_facts.read(str(tmp_path / name))
