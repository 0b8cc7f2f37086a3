"""TensorRT-LLM's Python LLM API in this process: what `kind = "trtllm"` means. Imported when it connects."""

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from backends.protocol import Backend, Limits

OURS = {
    "model": "the backend's field `model`",
    "skip_tokenizer_init": "nothing: guided decoding needs the tokenizer",
    "return_perf_metrics": "nothing: the gateway measures by itself",
}
"""Arguments of `LLM` that `args` may not hold, and what says it instead."""

Argument = str | int | float | bool | list[Any] | dict[str, Any]


class TrtLlm(Struct, tag="trtllm", tag_field="kind", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One TensorRT-LLM engine inside the gateway.

    `model` is a folder (a Hugging Face checkpoint or a built engine) or a Hugging Face id. `tokenizer` is the folder
    with the model's tokenizer files, `model` where it is empty. `args` are arguments of `tensorrt_llm.LLM`; a table is
    what a nested configuration takes (`kv_cache_config = { free_gpu_memory_fraction = 0.8 }`). `tools` is how the
    model writes tool calls. An engine that holds requests and gives no sign for `watchdog_s` seconds counts as hung.
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    model: Annotated[str, Meta(min_length=1)]
    tokenizer: str = ""
    args: dict[str, Argument] = {}
    tools: Literal["", "hermes"] = ""
    context_tokens: Annotated[int, Meta(ge=0)] = 0
    default_output_tokens: Annotated[int, Meta(ge=0)] = 0
    watchdog_s: Annotated[float, Meta(ge=1.0, le=3_600.0)] = 60.0
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        for name, instead in OURS.items():
            if name in self.args:
                raise ValueError(f"args.{name}: set by {instead}")

    @property
    def words_folder(self) -> str:
        """Where the tokenizer's files are."""
        return self.tokenizer or self.model

    async def connect(self, model: str) -> Backend:
        """The engine, once it has answered a request of two tokens; takes as long as the weights take to load.

        Raises ValueError where this installation or this configuration can never work, BackendLost where the engine
        did not come up.
        """
        connect = await asyncio.to_thread(self._ready)
        return await connect(self, model)

    def _ready(self) -> Callable[["TrtLlm", str], Awaitable[Backend]]:
        check_installed()
        if not Path(self.words_folder).expanduser().is_dir():
            where = "tokenizer" if self.tokenizer else "model"
            raise ValueError(f"{where}: {self.words_folder!r} is no folder; tokenizer has to name one with its files")
        from backends.trtllm_engine import connect  # noqa: PLC0415 - needs tokenizers, and connects to the package

        return connect


def check_installed() -> None:
    """Raises ValueError where TensorRT-LLM, or what makes its prompts, is not there."""
    for package, top in (("tensorrt-llm", "tensorrt_llm"), ("tokenizers", "tokenizers"), ("jinja2", "jinja2")):
        if importlib.util.find_spec(top) is None:
            raise ValueError(
                f"kind = 'trtllm' needs {package}, which is not installed in this environment: with an NVIDIA GPU and "
                "CUDA, pip install 'signalbox-gateway[trtllm]'; TensorRT-LLM's own installation guide says which "
                "package index its wheels come from"
            )
