"""What the operator's copy of an engine's own description says, held against what the server says.

Triton does not show the version, precision, quantization and limits of a TensorRT-LLM engine. They stand in the engine
folder's config.json, or for the LLM API layout in model.yaml.
"""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from backends.protocol import Limits
from backends.triton_layout import STREAMING, Dialect, Layout
from backends.triton_metrics import Sizes


class Facts(Struct, frozen=True, kw_only=True):
    """One engine as its file describes it. Empty and 0 are "it does not say". `source` is the file."""

    source: str = ""
    version: str = ""
    model: str = ""
    precision: str = ""
    quantization: str = ""
    kv_quantization: str = ""
    kv_type: str = ""
    vocab_size: int = 0
    max_input_len: int = 0
    max_seq_len: int = 0
    max_batch_size: int = 0
    max_num_tokens: int = 0
    max_beam_width: int = 0
    tokens_per_block: int = 0
    decoupled: bool | None = None


def read(path: str) -> Facts:
    """Blocks. `path` is a config.json or a model.yaml. Raises ValueError, whose text begins with the setting."""
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ValueError(f"engine_config: {path}: {error.strerror or error}") from None
    yaml = path.endswith((".yaml", ".yml"))
    try:
        said = _yaml(data) if yaml else msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"engine_config: {path}: {error}") from None
    said = said if isinstance(said, dict) else {}
    facts = _of_yaml(said, path) if yaml else _of_json(said, path)
    if facts == Facts(source=path):
        raise ValueError(f"engine_config: {path} says nothing of a TensorRT-LLM engine: is it the right file?")
    return facts


def contradictions(facts: Facts, layout: Layout, sizes: Sizes, limits: Limits, vocab_size: int) -> list[str]:
    """Everything that cannot be true at once, each with both sides."""
    entry, engine, found = layout.entry, layout.engine, []

    def differ(one: str, other: str) -> None:
        found.append(f"{one}, but {other}")

    if facts.decoupled is not None and facts.decoupled != engine.decoupled:
        differ(
            f"{facts.source} has decoupled = {str(facts.decoupled).lower()}",
            f"the Triton model {engine.name!r} runs with decoupled = {str(engine.decoupled).lower()}",
        )
    if layout.dialect is not Dialect.LLMAPI and not layout.streams:
        have = f"an input {STREAMING[layout.dialect]!r}" if entry.decoupled else "decoupled = false"
        lacks = "not " if entry.decoupled else ""
        differ(f"{layout.dialect.value} streams", f"the Triton model {entry.name!r} has {lacks}{have}")
    beams = _number(engine.parameters.get("max_beam_width", ""))
    if facts.max_beam_width and beams > facts.max_beam_width:
        differ(
            f"{facts.source} was built with max_beam_width = {facts.max_beam_width}",
            f"the Triton model {engine.name!r} is set to max_beam_width = {beams}",
        )
    if facts.max_batch_size and sizes.slots > facts.max_batch_size:
        differ(f"{facts.source} has max_batch_size = {facts.max_batch_size}", f"the engine runs {sizes.slots} at once")
    if facts.kv_type and facts.kv_type.upper() != "PAGED" and layout.dialect is not Dialect.LLMAPI:
        differ(f"{facts.source} has kv_cache_type = {facts.kv_type}", "in-flight batching needs PAGED")
    if facts.vocab_size and vocab_size > facts.vocab_size:
        differ(
            f"the tokenizer has {vocab_size} tokens",
            f"{facts.source} has vocab_size = {facts.vocab_size}: another model?",
        )
    for model in {entry.name: entry, engine.name: engine}.values():
        if limits.max_running and model.batcher and 0 < model.batch < limits.max_running:
            differ(
                f"limits.max_running = {limits.max_running}",
                f"the Triton model {model.name!r} has max_batch_size = {model.batch}, and Triton's dynamic batcher "
                "holds what is above it for up to half a second",
            )
    return found


def running(facts: Facts, layout: Layout, sizes: Sizes) -> int:
    """How many requests the engine should have at once: its slots, and no more than Triton's batcher lets through."""
    bounds = [sizes.slots or facts.max_batch_size]
    bounds += [model.batch for model in (layout.entry, layout.engine) if model.batcher]
    return min((bound for bound in bounds if bound > 0), default=0)


def _of_json(said: dict[str, Any], path: str) -> Facts:
    model, build = _table(said, "pretrained_config"), _table(said, "build_config")
    quantization = _table(model, "quantization")
    plugins = _table(build, "plugin_config")
    kv_type = build.get("kv_cache_type")
    return Facts(
        source=path,
        version=_text(said.get("version")),
        model=_text(model.get("architecture")),
        precision=_text(model.get("dtype")),
        quantization=_text(quantization.get("quant_algo")),
        kv_quantization=_text(quantization.get("kv_cache_quant_algo")),
        kv_type=_text(kv_type.get("value") if isinstance(kv_type, dict) else kv_type).rpartition(".")[2],
        vocab_size=_number(model.get("vocab_size")),
        max_input_len=_number(build.get("max_input_len")),
        max_seq_len=_number(build.get("max_seq_len")),
        max_batch_size=_number(build.get("max_batch_size")),
        max_num_tokens=_number(build.get("max_num_tokens")),
        max_beam_width=_number(build.get("max_beam_width")),
        tokens_per_block=_number(plugins.get("tokens_per_block")),
    )


def _of_yaml(said: dict[str, Any], path: str) -> Facts:
    cache, triton = _table(said, "kv_cache_config"), _table(said, "triton_config")
    decoupled = triton.get("decoupled")
    return Facts(
        source=path,
        model=_text(said.get("model")),
        precision=_text(said.get("dtype")),
        quantization=_text(_table(said, "quant_config").get("quant_algo")),
        kv_quantization=_text(_table(said, "quant_config").get("kv_cache_quant_algo") or cache.get("dtype")),
        max_input_len=_number(said.get("max_input_len")),
        max_seq_len=_number(said.get("max_seq_len")),
        max_batch_size=_number(said.get("max_batch_size")),
        max_num_tokens=_number(said.get("max_num_tokens")),
        max_beam_width=_number(said.get("max_beam_width")),
        tokens_per_block=_number(cache.get("tokens_per_block")),
        decoupled=decoupled if isinstance(decoupled, bool) else None,
    )


def _yaml(data: bytes) -> Any:
    try:
        import yaml  # noqa: PLC0415 - only this layout's files need it
    except ImportError:
        raise ValueError("engine_config: reading YAML needs pip install 'signalbox-gateway[triton]'") from None
    try:
        return yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"engine_config: not YAML: {error}") from None


def _table(said: dict[str, Any], name: str) -> dict[str, Any]:
    value = said.get(name)
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return str(value) if value is not None else ""


def _number(value: Any) -> int:
    try:
        return max(0, int(value))
    except (TypeError, ValueError):
        return 0
