"""Turns a checked request into work for the simulated engine: how many tokens go in, and what will come out."""

from typing import TYPE_CHECKING

from msgspec import Struct

from backends import bodies, frames, simframes, simrequest, simtext
from backends.protocol import Plan, Prompt, Refused
from backends.simrequest import ChatBody, CompletionBody, EmbeddingsBody, TokenizeBody

if TYPE_CHECKING:
    from backends.simulated import Simulated

_COMPLETION_TOKENS = 16  # OpenAI's default of `max_tokens`, for completions only


class Choice(Struct, frozen=True):
    """One answer to come. `chars` is where a stop string cuts its text, None where none does."""

    key: int
    output_tokens: int
    finish_reason: str
    chars: int | None = None


class Job(Struct, frozen=True):
    """The work of one plan: `choices` over one prompt, or `body` to be sent once all `prompts` are computed.

    `prompts` are pairs of tokens and prefix names. `ready` is an answer that needs no engine.
    """

    prompts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    choices: tuple[Choice, ...] = ()
    body: bytes = b""
    ready: bytes | None = None


class _Length(Struct, frozen=True):
    """How many tokens an answer may have, as the client put it; `limit` is what there is room for."""

    limit: int
    least: int
    exactly: bool


class Planner:
    """Plans requests for one engine. Touches neither the engine nor a clock."""

    def __init__(self, config: "Simulated") -> None:
        self._config = config

    def plan(self, prompt: Prompt) -> Plan:
        """Raises Refused, naming the field."""
        body = simrequest.read(prompt)
        if isinstance(body, ChatBody):
            return self._generation(prompt, body, simrequest.chat_text(body.messages), "messages")
        if isinstance(body, CompletionBody):
            return self._generation(prompt, body, body.prompt, "prompt")
        if isinstance(body, EmbeddingsBody):
            return self._embeddings(prompt, body)
        return self._tokenize(prompt, body)

    def _generation(self, prompt: Prompt, body: ChatBody | CompletionBody, text: str, field: str) -> Plan:
        if body.stream_options is not None and not prompt.stream:
            raise bodies.invalid("stream_options", "only allowed when stream is true")
        stops = bodies.stops(body)
        size, names = self._measure(text, field)
        length = self._length(body, size)
        seed = self._config.seed if body.seed is None else self._config.seed ^ body.seed
        choices = tuple(self._choice(simtext.key(seed, text, number), length, stops) for number in range(body.n or 1))
        job = Job(((size, names),) * len(choices), choices)
        return self._planned(prompt, size, length.limit * len(choices), job)

    def _measure(self, text: str, field: str) -> tuple[int, tuple[int, ...]]:
        """The tokens of a prompt and the names of its blocks. Refuses one that leaves no room for an answer."""
        context = self._config.context_tokens
        if simtext.least_tokens(text) >= context:
            raise _too_long(field, context, f"at least {simtext.least_tokens(text)}")
        parts = simtext.pieces(text)
        if len(parts) >= context:
            raise _too_long(field, context, str(len(parts)))
        names: tuple[int, ...] = ()
        if self._config.prefix_cache:
            names = simtext.prefix_names(simtext.token_ids(parts), self._config.kv_block)
        return max(1, len(parts)), names

    def _length(self, body: ChatBody | CompletionBody, prompt_tokens: int) -> _Length:
        room = self._config.context_tokens - prompt_tokens
        asked, field = body.max_tokens, "max_tokens"
        if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
            asked, field = body.max_completion_tokens, "max_completion_tokens"
        if asked is None and isinstance(body, CompletionBody):
            asked = min(_COMPLETION_TOKENS, room)
        if asked is not None and asked > room:
            raise _too_long(field, self._config.context_tokens, f"{prompt_tokens} in the prompt and {asked} in {field}")
        limit = room if asked is None else asked
        least = body.min_tokens or 0
        if least > limit:
            raise bodies.invalid("min_tokens", f"more than the {limit} tokens that the answer may have")
        return _Length(limit, least, bool(body.ignore_eos))

    def _choice(self, key: int, length: _Length, stops: tuple[str, ...]) -> Choice:
        natural = max(length.least, self._natural(key))
        tokens = length.limit if length.exactly else min(natural, length.limit)
        reason = "length" if length.exactly or natural > length.limit else "stop"
        if stops and (found := _first_stop(key, tokens, length.least, stops)) is not None:
            return Choice(key, found[0], "stop", found[1])
        return Choice(key, tokens, reason)

    def _natural(self, key: int) -> int:
        return simtext.natural_tokens(key, self._config.output_mean_tokens, self._config.output_sigma)

    def _embeddings(self, prompt: Prompt, body: EmbeddingsBody) -> Plan:
        dims = body.dimensions or self._config.embedding_dims
        if dims > self._config.embedding_dims:
            raise bodies.invalid("dimensions", f"at most {self._config.embedding_dims}")
        texts = [body.input] if isinstance(body.input, str) else body.input
        if not texts:
            raise bodies.invalid("input", "at least one text is needed")
        prompts = tuple(self._measure(text, "input") for text in texts)
        size = sum(tokens for tokens, _ in prompts)
        vectors = [simtext.unit_vector(simtext.key(self._config.seed, text), dims) for text in texts]
        answer = simframes.embeddings(prompt.model, vectors, body.encoding_format == "base64", size)
        return self._planned(prompt, size, 0, Job(prompts, body=answer))

    def _tokenize(self, prompt: Prompt, body: TokenizeBody) -> Plan:
        if (body.prompt is None) == (body.messages is None):
            raise bodies.invalid("prompt", "either prompt or messages is needed")
        text = body.prompt if body.prompt is not None else simrequest.chat_text(body.messages or [])
        parts = simtext.pieces(text)
        strings = parts if body.return_token_strs else None
        answer = frames.tokenized(simtext.token_ids(parts), self._config.context_tokens, strings)
        return self._planned(prompt, 0, 0, Job(ready=answer))

    def _planned(self, prompt: Prompt, size: int, limit: int, job: Job) -> Plan:
        return Plan(
            prompt=prompt, maker=self._config.name, prompt_tokens=size, exact=True, output_limit=limit, work=job
        )


def _first_stop(key: int, tokens: int, least: int, stops: tuple[str, ...]) -> tuple[int, int] | None:
    """Where the answer first holds a stop string: how many tokens that takes, and at which character it begins.

    As in vLLM a stop string counts only when its end comes after the `least` tokens.
    """
    writer = simtext.Writer(key)
    text = writer.write(least)
    for written in range(least + 1, tokens + 1):
        before = len(text)
        text += writer.write(1)
        found = [at for stop in stops if (at := text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if found:
            return written, min(found)
    return None


def _too_long(field: str, context: int, what: str) -> Refused:
    message = f"this model holds {context} tokens of prompt and answer together; the request has {what}"
    return Refused(400, "context_length_exceeded", message, param=field)
