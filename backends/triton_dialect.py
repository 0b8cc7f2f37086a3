"""How a request is put in each dialect, and what its responses say."""

import random
from collections.abc import Mapping
from typing import Any, Protocol

from backends.answer import Answer
from backends.ask import Ask
from backends.detokenize import Cumulative
from backends.generation import Able, Sampling
from backends.protocol import BackendError
from backends.triton_layout import STREAMING, Dialect, Layout
from backends.triton_tensors import Outputs

TEXT_OUT = "text_output"

_INFLIGHT = {
    "temperature": ("temperature",),
    "top_k": ("runtime_top_k", "top_k"),
    "top_p": ("runtime_top_p", "top_p"),
    "seed": ("seed", "random_seed"),
    "min_tokens": ("min_tokens", "min_length"),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
    "repetition_penalty": ("repetition_penalty",),
    "length_penalty": ("len_penalty", "length_penalty"),
    "ignore_eos": ("end_id",),
}
_NAMES: dict[Dialect, Mapping[str, tuple[str, ...]]] = {
    Dialect.TOKENS: _INFLIGHT,
    Dialect.ENSEMBLE: {**_INFLIGHT, "bad_words": ("bad_words",)},
    Dialect.LLMAPI: {
        name: (f"sampling_param_{name}",)
        for name in ("temperature", "top_k", "top_p", "seed", "presence_penalty", "frequency_penalty")
    },
}
"""Per field of `Sampling`: what the dialect calls it, over the releases. The first that the model has is used."""

_NUMBERS = ("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty")
_GUIDES = frozenset({"json", "json_schema", "regex", "ebnf_grammar"})
_BROKEN_OFF = frozenset({"cancelled", "timeout"})  # of the LLM API's finish reasons those that are no answer's end
_SEED_BITS = 63


class Listener(Protocol):
    """Hears the responses of one request and tells the answer.

    Raises ValueError for what can't be read, BackendError for an answer that was broken off.
    """

    def hear(self, outputs: Outputs, last: bool) -> None: ...


class Speech:
    """Requests in one dialect for one layout. What is the same in all of them is worked out once.

    `tokens_per_block` turns reused KV blocks into cached tokens; 0 is unknown. `cumulative`: each streamed text holds
    all text so far. `logprobs`: ask the engine for log-probabilities where a client does.
    """

    def __init__(self, layout: Layout, *, cumulative: bool, logprobs: bool, tokens_per_block: int = 0) -> None:
        self.layout = layout
        self.dialect = layout.dialect
        self.tokens_per_block = tokens_per_block
        self._cumulative = cumulative
        self._form, self._engine = layout.entry.form, layout.engine.form
        inputs = layout.entry.inputs
        self._names = {
            field: next(name for name in names if name in inputs)
            for field, names in _NAMES[self.dialect].items()
            if any(name in inputs for name in names)
        }
        self._logprobs = logprobs and self.dialect is Dialect.TOKENS and "return_log_probs" in inputs
        guided = "guided_decoding_guide_type" in inputs and "guided_decoding_backend" in layout.engine.parameters
        self._guides = _GUIDES if guided else frozenset[str]()

    def able(self, tool_format: str) -> Able:
        """What requests of this dialect can ask for."""
        return Able(
            what=f"the Triton model {self.layout.entry.name!r}",
            fields=frozenset(self._names),
            logprobs=self._logprobs,
            guides=self._guides,
            tool_format=tool_format,
            stop_ids=self.dialect is Dialect.TOKENS,
        )

    def request(self, ask: Ask, request_id: str) -> Any:
        """The request for a planned one, a ModelInferRequest. Raises ValueError where a value fits no tensor."""
        form = self._form
        request = form.request(request_id)
        if self.dialect is Dialect.TOKENS:
            self._put_tokens(request, ask.ids, ask.max_tokens, ask.end_ids)
        else:
            self._put_text(request, ask.text, ask.max_tokens)
        self._put_sampling(request, ask.sampling)
        if ask.guide is not None:
            form.put(request, "guided_decoding_guide_type", ask.guide.type)
            form.put(request, "guided_decoding_guide", ask.guide.text)
        if ask.logprobs:
            form.put(request, "return_log_probs", True)
        return request

    def canary(self, request_id: str) -> Any:
        """The least that shows whether the engine is alive: one token."""
        request = self._form.request(request_id)
        if self.dialect is Dialect.TOKENS:
            self._put_tokens(request, [1], 1, ())
        else:
            self._put_text(request, "a", 1)
        return request

    def stop(self, request_id: str) -> Any:
        """Ends the engine's request of this id. The inputs that it must have mean nothing."""
        form = self._engine
        request = form.request(request_id)
        if "input_ids" in form.inputs:
            for name in ("input_ids", "input_lengths", "request_output_len"):
                form.put(request, name, 1)
        else:
            form.put(request, "text_input", "")
        form.put(request, "stop", True)
        return request

    def listener(self, ask: Ask, answer: Answer) -> Listener:
        """Who hears the responses to `ask`."""
        if self.dialect is Dialect.TOKENS:
            return Tokens(answer, self.tokens_per_block, ask.logprobs)
        if self.dialect is Dialect.LLMAPI:
            return Llm(answer, self.tokens_per_block, self._cumulative, self.layout.streams)
        return Text(answer, self.tokens_per_block)

    def _put_tokens(self, request: Any, ids: list[int], max_tokens: int, end_ids: tuple[int, ...]) -> None:
        form = self._form
        form.put(request, "input_ids", *ids)
        form.put(request, "input_lengths", len(ids))
        form.put(request, "request_output_len", max_tokens)
        form.put(request, "end_id", end_ids[0] if end_ids else -1)
        if more := end_ids[1:]:  # words of one token each: row 0 holds them, row 1 where each ends
            form.put(request, "stop_words_list", *more, *range(1, len(more) + 1), rows=2)
        form.put(request, "exclude_input_in_output", True)
        self._put_common(request)

    def _put_text(self, request: Any, text: str, max_tokens: int) -> None:
        form = self._form
        form.put(request, "text_input", text)
        if self.dialect is Dialect.LLMAPI:
            form.put(request, "sampling_param_max_tokens", max_tokens)
            form.put(request, "sampling_param_exclude_input_from_output", True)
            form.put(request, "sampling_param_return_perf_metrics", True)
            form.put(request, "return_finish_reason", True)
        else:
            form.put(request, "max_tokens", max_tokens)
            form.put(request, "exclude_input_in_output", True)
            form.put(request, "return_num_input_tokens", True)
            form.put(request, "return_num_output_tokens", True)
        self._put_common(request)

    def _put_common(self, request: Any) -> None:
        if self.layout.streams:
            self._form.put(request, STREAMING[self.dialect], True)
        if self.tokens_per_block and self.dialect is not Dialect.LLMAPI:
            self._form.put(request, "return_perf_metrics", True)

    def _put_sampling(self, request: Any, sampling: Sampling) -> None:
        """Without any of the three a TensorRT-LLM engine is greedy, and without a seed each sample is the same."""
        if sampling.temperature == 0:
            self._put(request, "top_k", 1)
        else:
            self._put(request, "temperature", 1.0 if sampling.temperature is None else sampling.temperature)
            self._put(request, "top_p", 1.0 if sampling.top_p is None else sampling.top_p)
            if sampling.top_k is not None and sampling.top_k > 0:
                self._put(request, "top_k", sampling.top_k)
            seed = random.getrandbits(_SEED_BITS) if sampling.seed is None else sampling.seed
            self._put(request, "seed", seed % (1 << _SEED_BITS))
        for field in _NUMBERS:
            if (value := getattr(sampling, field)) is not None:
                self._put(request, field, value)
        if sampling.ignore_eos and self.dialect is not Dialect.TOKENS:  # token ids come without an end then
            self._put(request, "ignore_eos", -1)
        if sampling.bad_words:
            self._put(request, "bad_words", *sampling.bad_words)

    def _put(self, request: Any, field: str, *values: Any) -> None:
        if (name := self._names.get(field)) is not None:
            self._form.put(request, name, *values)


class Tokens:
    """Token ids: each response brings the new ones."""

    __slots__ = ("_answer", "_logprobs", "_per_block")

    def __init__(self, answer: Answer, tokens_per_block: int, logprobs: bool) -> None:
        self._answer, self._per_block, self._logprobs = answer, tokens_per_block, logprobs

    def hear(self, outputs: Outputs, last: bool) -> None:
        ids = outputs.integers("output_ids")
        lengths = outputs.integers("sequence_length")
        if lengths and 0 <= lengths[0] < len(ids):
            ids = ids[: lengths[0]]
        if ids:
            logprobs = outputs.numbers("output_log_probs")[-len(ids) :] if self._logprobs else None
            self._answer.ids(0, ids, logprobs)
        if last:
            self._answer.count(cached_tokens=_cached(outputs, "kv_cache_reused_blocks", self._per_block))
            self._answer.end(0)


class Text:
    """The ensemble's text, piece after piece, with the engine's own counts where it has them."""

    __slots__ = ("_answer", "_completion", "_per_block", "_prompt")

    def __init__(self, answer: Answer, tokens_per_block: int) -> None:
        self._answer, self._per_block = answer, tokens_per_block
        self._prompt = self._completion = 0

    def hear(self, outputs: Outputs, last: bool) -> None:
        text = outputs.text(TEXT_OUT)
        counted = outputs.integers("num_output_tokens")
        self._completion += sum(counted)
        self._prompt = max([self._prompt, *outputs.integers("num_input_tokens")])
        if text or (counted and counted[0]):
            self._answer.text(0, text or "", counted[0] if counted else 1)
        if last:
            cached = _cached(outputs, "kv_cache_reused_blocks", self._per_block)
            self._answer.count(self._prompt, self._completion, cached)
            self._answer.end(0)


class Llm:
    """The LLM API's text: all of it each time (`cumulative`) or what is new, with the reason it ended for.

    One that does not stream (`streams`) says all in one response, whose tokens nobody has counted.
    """

    __slots__ = ("_answer", "_per_block", "_pieces", "_tokens")

    def __init__(self, answer: Answer, tokens_per_block: int, cumulative: bool, streams: bool) -> None:
        self._answer, self._per_block = answer, tokens_per_block
        self._pieces = Cumulative() if cumulative and streams else None
        self._tokens = 1 if streams else 0

    def hear(self, outputs: Outputs, last: bool) -> None:
        text = outputs.text(TEXT_OUT)
        reason = (outputs.text("finish_reason") or "") if last else ""
        if reason in _BROKEN_OFF:
            raise BackendError(f"the engine ended the request: {reason}")
        if text is not None:
            new = self._pieces.piece(text) if self._pieces is not None else text
            self._answer.text(0, new, 0 if last and not new and reason != "length" else self._tokens)
        if last:
            if self._pieces is not None and (rest := self._pieces.rest()):
                self._answer.text(0, rest, 0)
            self._answer.count(cached_tokens=_cached(outputs, "kv_cache_reused_block", self._per_block))
            self._answer.end(0, reason if reason in ("stop", "length") else "")


def _cached(outputs: Outputs, name: str, tokens_per_block: int) -> int:
    blocks = outputs.numbers(name) if tokens_per_block else []
    return int(blocks[0]) * tokens_per_block if blocks and blocks[0] > 0 else 0
