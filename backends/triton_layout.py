"""Which of TensorRT-LLM's model layouts a Triton server has, told from its models' metadata and configuration."""

import enum
from typing import Any

from msgspec import Struct

from backends.protocol import BackendError, BackendLost
from backends.triton_link import Link, Listed
from backends.triton_tensors import Declared, Form

DEFAULT_MODELS = ("tensorrt_llm", "ensemble")
"""The names of NVIDIA's two layouts, for where the configuration names no model."""


class Dialect(enum.StrEnum):
    """How a request is put. The in-flight layout is spoken by token ids or through its ensemble, by text."""

    TOKENS = "inflight-tokens"
    ENSEMBLE = "inflight-ensemble"
    LLMAPI = "llmapi"


NEEDED: dict[Dialect, tuple[str, ...]] = {
    Dialect.TOKENS: ("input_ids", "input_lengths", "request_output_len"),
    Dialect.ENSEMBLE: ("text_input", "max_tokens"),
    Dialect.LLMAPI: ("text_input", "sampling_param_max_tokens"),
}
GIVEN: dict[Dialect, tuple[str, ...]] = {
    Dialect.TOKENS: ("output_ids",),
    Dialect.ENSEMBLE: ("text_output",),
    Dialect.LLMAPI: ("text_output",),
}
STREAMING: dict[Dialect, str] = {Dialect.TOKENS: "streaming", Dialect.ENSEMBLE: "stream", Dialect.LLMAPI: "streaming"}
"""The input that asks for a response per token."""

_PREFERRED = {
    True: (Dialect.TOKENS, Dialect.ENSEMBLE, Dialect.LLMAPI),
    False: (Dialect.ENSEMBLE, Dialect.LLMAPI),  # nobody here could make token ids
}


class Model(Struct, frozen=True):
    """One model as the server describes it.

    `batch` is its max_batch_size, 0 where requests have no batch dimension. `batcher` is whether Triton's dynamic
    batcher stands in front of it. `steps` are the models of an ensemble, each with the inputs it is given.
    """

    name: str
    inputs: dict[str, Declared]
    outputs: dict[str, Declared]
    platform: str
    backend: str
    batch: int
    batcher: bool
    decoupled: bool
    parameters: dict[str, str]
    steps: dict[str, frozenset[str]]

    @property
    def form(self) -> Form:
        return Form(self.name, self.inputs, self.batch > 0)


class Layout(Struct, frozen=True):
    """How requests go in (`entry`), and what generates (`engine`: the same model, or a step of the ensemble)."""

    dialect: Dialect
    entry: Model
    engine: Model

    @property
    def streams(self) -> bool:
        """Whether there is a response per token; else there is one in all."""
        return self.entry.decoupled and STREAMING[self.dialect] in self.entry.inputs

    @property
    def stops(self) -> bool:
        """Whether a running request can be stopped by a second one with its id."""
        return "stop" in self.engine.inputs


async def look(link: Link, wanted: str, dialect: Dialect | None, has_words: bool, timeout_s: float) -> Layout:
    """The layout, or the settings' word for it: `wanted` names the model, `dialect` how it is spoken to.

    With a tokenizer at hand (`has_words`) token ids are preferred where the server has both ways.
    Raises BackendError for what can't be served, BackendLost for a model that is not ready, and all that a call raises.
    """
    listed = await link.index(timeout_s)
    models = {}
    for name in _candidates(listed, wanted):
        _check_state(name, listed)
        models[name] = await read_model(link, name, timeout_s)
    if wanted and dialect is not None:
        return await _layout(link, models[wanted], dialect, timeout_s)
    for speaks in (dialect,) if dialect is not None else _PREFERRED[has_words]:
        for model in models.values():
            if dialect_of(model) is speaks:
                return await _layout(link, model, speaks, timeout_s)
    raise BackendError(_nothing(models, dialect))


def dialect_of(model: Model) -> Dialect | None:
    """What the model's tensors say, None where they are no layout that is served here."""
    if model.steps:
        return Dialect.ENSEMBLE if _has(model, Dialect.ENSEMBLE) else None
    return next((one for one in (Dialect.TOKENS, Dialect.LLMAPI) if _has(model, one)), None)


async def read_model(link: Link, name: str, timeout_s: float) -> Model:
    """What the server says of one model."""
    inputs, outputs = await link.tensors(name, timeout_s)
    config = await link.config(name, timeout_s)
    return Model(
        name=name,
        inputs=inputs,
        outputs=outputs,
        platform=config.platform,
        backend=config.backend,
        batch=config.max_batch_size,
        batcher=config.HasField("dynamic_batching"),
        decoupled=config.model_transaction_policy.decoupled,
        parameters={key: value for key, each in config.parameters.items() if _is_set(value := each.string_value)},
        steps=_steps(config),
    )


async def _layout(link: Link, model: Model, dialect: Dialect, timeout_s: float) -> Layout:
    missing = [name for name in NEEDED[dialect] if name not in model.inputs]
    missing += [name for name in GIVEN[dialect] if name not in model.outputs]
    if missing:
        has = ", ".join(sorted(model.inputs)) or "no inputs"
        raise BackendError(
            f"dialect: {dialect.value} needs {', '.join(missing)}, which the Triton model {model.name!r} does not "
            f"have; its inputs are {has}"
        )
    if not model.steps:
        return Layout(dialect, model, model)
    name = next((step for step, given in model.steps.items() if "input_ids" in given), "")
    if not name:
        raise BackendError(f"the ensemble {model.name!r} has no step that takes input_ids: {', '.join(model.steps)}")
    return Layout(dialect, model, await read_model(link, name, timeout_s))


def _candidates(listed: list[Listed], wanted: str) -> list[str]:
    names = {one.name for one in listed}
    if wanted:
        if wanted not in names:
            raise BackendError(f"model: this Triton has no model {wanted!r}; it has {_sorted(names)}")
        return [wanted]
    found = [name for name in DEFAULT_MODELS if name in names]
    if not found:
        raise BackendError(
            f"this Triton has none of {', '.join(DEFAULT_MODELS)} but {_sorted(names)}: set the backend's model"
        )
    return found


def _check_state(name: str, listed: list[Listed]) -> None:
    """Raises BackendLost unless some version of the model is loaded."""
    ours = [one for one in listed if one.name == name]
    if not any(one.state == "READY" for one in ours):
        said = "; ".join(f"version {one.version or 'none'} is {one.state or 'not loaded'} {one.reason}" for one in ours)
        raise BackendLost(f"the Triton model {name!r} is not ready: {said.strip()}")


def _nothing(models: dict[str, Model], dialect: Dialect | None) -> str:
    kinds = {name: found.value if (found := dialect_of(model)) else "no known layout" for name, model in models.items()}
    if dialect is not None:
        return f"dialect: {dialect.value} is set, but the server has " + ", ".join(
            f"{n} ({k})" for n, k in kinds.items()
        )
    for model in models.values():
        if model.backend == "python" and not model.steps and "text_input" in model.inputs:
            return (
                f"the Triton model {model.name!r} looks like tensorrt_llm_bls, whose requests can't be cancelled: "
                "use tensorrt_llm with a tokenizer, or the ensemble"
            )
    if Dialect.TOKENS.value in kinds.values():
        return "this Triton takes token ids: set tokenizer to the folder with the model's tokenizer files"
    return "no model of a known layout: " + ", ".join(f"{name} ({kind})" for name, kind in kinds.items())


def _has(model: Model, dialect: Dialect) -> bool:
    return all(name in model.inputs for name in NEEDED[dialect]) and all(
        name in model.outputs for name in GIVEN[dialect]
    )


def _steps(config: Any) -> dict[str, frozenset[str]]:
    if not config.HasField("ensemble_scheduling"):
        return {}
    return {step.model_name: frozenset(step.input_map) for step in config.ensemble_scheduling.step}


def _is_set(value: str) -> bool:
    """A `${name}` that nobody filled in is not set."""
    return bool(value) and not (value.startswith("${") and value.endswith("}"))


def _sorted(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
