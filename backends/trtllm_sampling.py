"""A request in the words of TensorRT-LLM's LLM API."""

from typing import Any

from backends.ask import Ask
from backends.generation import GUIDES, SAMPLING, Able, Guide
from backends.protocol import Refused
from backends.words import Words

FIELDS = SAMPLING - {"logit_bias"}  # wants a tensor as long as the vocabulary
_SAME = (
    "top_k",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
)
_MASK = (1 << 64) - 1


def able(args: dict[str, Any], choices: int, tools: str) -> Able:
    """What an engine with these arguments can do."""
    return Able(
        what="TensorRT-LLM",
        fields=FIELDS,
        choices=max(1, choices),
        logprobs=True,
        guides=frozenset(GUIDES) if args.get("guided_decoding_backend") else frozenset(),
        tool_format=tools,
        stop_ids=True,
    )


def params(package: Any, ask: Ask, words: Words) -> Any:
    """`SamplingParams` for one request. Raises Refused for values that the package does not take.

    Text is made and cut here, so the engine is told of tokens only.
    """
    sampling = ask.sampling
    said: dict[str, Any] = {name: value for name in _SAME if (value := getattr(sampling, name)) is not None}
    said |= _temperature(ask)
    ends = ask.end_ids or words.end_ids
    if ends:
        said |= {"end_id": ends[0], "pad_id": words.pad_id if words.pad_id is not None else ends[0]}
    if stop_ids := ask.end_ids[1:]:
        said["stop_token_ids"] = list(stop_ids)
    if sampling.ignore_eos and not ask.end_ids:
        said["ignore_eos"] = True
    if sampling.seed is not None:
        said["seed"] = sampling.seed & _MASK
    if sampling.bad_words:
        said["bad"] = list(sampling.bad_words)
    if ask.logprobs:
        said["logprobs"] = 1
    if ask.guide is not None:
        said["guided_decoding"] = _guide(package, ask.guide)
    try:
        return package.SamplingParams(max_tokens=ask.max_tokens, n=ask.n, detokenize=False, **said)
    except (ValueError, TypeError) as error:
        raise Refused(400, "invalid_request", f"TensorRT-LLM refuses these values: {error}") from None


def _temperature(ask: Ask) -> dict[str, Any]:
    """The API draws greedily unless it is told of a top_k or top_p, whatever the temperature; OpenAI's clients mean
    temperature 1 when they say nothing.
    """
    sampling = ask.sampling
    if sampling.temperature == 0:
        return {"top_k": 1}
    said = {"temperature": 1.0 if sampling.temperature is None else sampling.temperature}
    return said | {"top_p": 1.0 if sampling.top_p is None else sampling.top_p}


def _guide(package: Any, guide: Guide) -> Any:
    if guide.type == "json":
        return package.GuidedDecodingParams(json_object=True)
    name = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}[guide.type]
    return package.GuidedDecodingParams(**{name: guide.text})
