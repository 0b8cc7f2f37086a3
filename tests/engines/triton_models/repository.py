"""Writes a Triton model repository of stand-ins: both layouts side by side, so that one server shows all dialects."""

import shutil
from pathlib import Path

from tests.engines.triton_models import tensors

STANDIN = Path(__file__).parent / "standin"
SHARED = ("engine", "metrics", "text")
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
ENGINE: dict[str, str | int | float] = {
    "standin_slots": 16,
    "standin_token_ms": 5,
    "standin_kv_blocks": 512,
    "standin_max_queue_size": 64,
    "cancellation_check_period_ms": 100,
    # what the real config.pbtxt carries, too
    "gpt_model_type": "inflight_fused_batching",
    "batch_scheduler_policy": "guaranteed_no_evict",
    "max_beam_width": 1,
    "exclude_input_in_output": "true",
    "guided_decoding_backend": "xgrammar",
    "kv_cache_free_gpu_mem_fraction": "${kv_cache_free_gpu_mem_fraction}",
}


def write(folder: Path, *, batch: int = 128, batcher: bool = True, **engine: str | int | float) -> None:
    """`batch` is Triton's max_batch_size; `engine` overrides parameters of `ENGINE`.

    `llmapi` and `llmapi_delta` are the LLM API layout under other names than its own, which is `tensorrt_llm`.
    """
    parameters = ENGINE | engine
    front = f"max_batch_size: {batch}\n"
    queue = "dynamic_batching { max_queue_delay_microseconds: 0 }\n" if batcher else ""
    _model(
        folder / "tensorrt_llm",
        "tensorrt_llm",
        front + DECOUPLED + queue + _parameters(parameters),
        (tensors.TENSORRT_LLM_IN, tensors.TENSORRT_LLM_OUT),
    )
    for name in ("preprocessing", "postprocessing"):
        given = (getattr(tensors, f"{name.upper()}_IN"), getattr(tensors, f"{name.upper()}_OUT"))
        _model(folder / name, name, front + "dynamic_batching { }\n", given)
    _ensemble(folder / "ensemble", front)
    for name, said in (("llmapi", "cumulative"), ("llmapi_delta", "delta")):
        more = {"standin_stream_text": said, "standin_metrics": "false"}
        _model(
            folder / name,
            "llmapi",
            "max_batch_size: 0\n" + DECOUPLED + _parameters(parameters | more),
            (tensors.LLMAPI_IN, tensors.LLMAPI_OUT),
        )


def _model(folder: Path, code: str, head: str, given: tuple[str, str]) -> None:
    (folder / "1").mkdir(parents=True)
    shutil.copy(STANDIN / f"{code}.py", folder / "1" / "model.py")
    for name in SHARED:
        shutil.copy(STANDIN / f"{name}.py", folder / "1" / f"{name}.py")
    instances = "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
    _config(folder, 'backend: "python"\n' + head + instances, given)


def _ensemble(folder: Path, head: str) -> None:
    (folder / "1").mkdir(parents=True)
    steps = []
    for model, inputs, outputs in tensors.ENSEMBLE_STEPS:
        maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
        maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
        steps.append(f'step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}')
    body = "ensemble_scheduling {\n" + "\n".join(steps) + "\n}\n"
    _config(folder, 'platform: "ensemble"\n' + head + body, (tensors.ENSEMBLE_IN, tensors.TEXT_OUT))


def _config(folder: Path, head: str, given: tuple[str, str]) -> None:
    text = f'name: "{folder.name}"\n{head}' + _tensors("input", given[0]) + _tensors("output", given[1])
    (folder / "config.pbtxt").write_text(text)


def _tensors(kind: str, table: str) -> str:
    blocks = []
    for line in filter(None, table.splitlines()):
        name, datatype, dims, *flags = line.split()
        more = "".join(_FLAGS[flag] for flag in "".join(flags))
        blocks.append(f'{{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dims} ]{more} }}')
    return f"{kind} [\n" + ",\n".join(blocks) + "\n]\n"


_FLAGS = {"o": " optional: true", "r": " allow_ragged_batch: true", "s": " reshape { shape: [ ] }"}


def _parameters(values: dict[str, str | int | float]) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in values.items()
    )
