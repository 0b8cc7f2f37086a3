"""Plans and answers for engines that take tokens or plain text: everything between OpenAI's API and such an engine."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from backends.answer import Answer
from backends.ask import Ask
from backends.bodies import Generation, invalid, stops
from backends.frames import Frames, tokenized
from backends.generation import Able, Body, ChatBody, CompletionBody, TokenizeBody, check, guide, reader, sampling
from backends.messages import messages
from backends.protocol import Kind, Plan, Prompt, Refused
from backends.ready import Ready
from backends.toolcalls import FORMATS, calling
from backends.words import Words

__all__ = ["Ask", "Scribe", "ready_stream"]

THREAD_BYTES = 4096  # of a body, beyond which it is read in a thread: two milliseconds of tokenizing
COMPLETION_TOKENS = 16  # OpenAI's default of `max_tokens`, for completions only
OUTPUT_TOKENS = 1024  # of an answer that nothing else bounds
BYTES_PER_TOKEN = 512  # more than any token stands for, whatever a normalizer makes shorter
_RATIO_START = 4.0  # bytes of a prompt per token, before anything was learned
_RATIO_BOUNDS = (1.0, 16.0)
_RATIO_FADE = 0.98


class Scribe:
    """Reads requests for one engine and writes its answers. Without `words` only completions are understood.

    `context_tokens` is what prompt and answer may have together, `input_tokens` the prompt alone; 0 is not known.
    `default_output` is the limit of an answer that neither the client nor the context bounds. Raises ValueError for a
    notation of tool calls that it does not know.
    """

    def __init__(
        self,
        name: str,
        able: Able,
        words: Words | None,
        context_tokens: int,
        default_output: int = 0,
        *,
        input_tokens: int = 0,
    ) -> None:
        if able.tool_format and able.tool_format not in FORMATS:
            raise ValueError(f"tools: {able.tool_format!r} is no notation known here; known: {', '.join(FORMATS)}")
        self._name, self._able, self._words = name, able, words
        self._context, self._input = context_tokens, input_tokens
        self._default = default_output or OUTPUT_TOKENS
        self.kinds = frozenset(kind.value for kind in _kinds(words))
        self._reader = reader(able, self.kinds)
        self._seen_bytes, self._seen_tokens = 1000 * _RATIO_START, 1000.0

    def __repr__(self) -> str:
        return f"<Scribe of {self._name}: {self._words or 'no tokenizer'}, {self._context} tokens>"

    async def plan(self, prompt: Prompt) -> Plan:
        """See `backends.protocol.Backend`. What is long is read in a thread. Raises Refused."""
        if len(prompt.body) > THREAD_BYTES:
            ask = await asyncio.to_thread(self._read, prompt)
        else:
            ask = self._read(prompt)
        return Plan(
            prompt=prompt,
            maker=self._name,
            prompt_tokens=ask.prompt_tokens,
            exact=ask.exact,
            output_limit=0 if ask.ready is not None else ask.max_tokens * ask.n,
            work=ask,
        )

    def answer(self, plan: Plan, request_id: str, fingerprint: str = "") -> Answer:
        """The answer to a plan of its own, yet without a word."""
        created = time.time_ns() // 1_000_000_000  # unix time, for people
        frames = Frames(plan.prompt, request_id, fingerprint, created)
        return Answer(plan, frames, self._words, partial(self._learn, len(plan.work.text)))

    def _read(self, prompt: Prompt) -> Ask:
        body = self._reader.read(prompt)
        if isinstance(body, TokenizeBody):
            return self._tokenize(body)
        check(prompt, body, self._able)
        if isinstance(body, ChatBody):
            field, ask = "messages", self._chat(body)
        else:
            field, ask = "prompt", self._completion(body)
        self._bound(ask, body, field)
        self._finish(ask, body)
        return ask

    def _chat(self, body: ChatBody) -> Ask:
        assert self._words is not None
        text = self._templated(body)
        ids = self._ids(text, "messages", bool(body.add_special_tokens))
        return Ask(kind=Kind.CHAT, ids=ids, text=self._words.without_begin(text), prompt_tokens=len(ids), exact=True)

    def _templated(self, body: ChatBody | TokenizeBody) -> str:
        assert self._words is not None
        assert self._words.template is not None
        tools = [msgspec.to_builtins(tool) for tool in body.tools or ()]
        begin = body.add_generation_prompt is not False
        said = messages(body.messages or (), self._reader)
        return self._words.template.render(said, tools, body.chat_template_kwargs, begin)

    def _completion(self, body: CompletionBody) -> Ask:
        text, ids = _one_prompt(body.prompt)
        if ids:
            self._check_ids(ids)
        elif self._words is not None:
            ids = self._ids(text, "prompt", body.add_special_tokens is not False)
        if self._words is not None:
            return Ask(kind=Kind.COMPLETION, ids=ids, text=text, prompt_tokens=len(ids), exact=True)
        size = max(1, int(len(text.encode()) / self.bytes_per_token))
        return Ask(kind=Kind.COMPLETION, text=text, prompt_tokens=size)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if self._words is None or not self._able.stop_ids:
            raise self._reader.unsupported("prompt", f"prompt: {self._able.what} takes text, not token ids")
        if (largest := max(ids)) >= self._words.vocab_size:
            raise invalid("prompt", f"there is no token {largest}; the vocabulary has {self._words.vocab_size}")

    def _ids(self, text: str, field: str, special: bool) -> list[int]:
        """Tokenizes, unless its length alone says that it is too long. Raises Refused."""
        assert self._words is not None
        least = len(text) // BYTES_PER_TOKEN
        if self._context and least >= self._context:
            raise _too_long(self._context, field, f"at least {least} in the {field}")
        return self._words.encode(text, special)

    def _bound(self, ask: Ask, body: ChatBody | CompletionBody, field: str) -> None:
        """Sets the output limit. Raises Refused where prompt and answer do not fit."""
        size, context = ask.prompt_tokens, self._context
        if not size:
            raise invalid(field, "it has no tokens")
        if self._input and size > self._input:
            text = f"this engine takes at most {self._input} tokens of prompt; the request has {size}"
            raise Refused(400, "context_length_exceeded", text, field)
        room = max(0, context - size) if context else 0
        if context and ask.exact and not room:
            raise _too_long(context, field, f"{size} in the {field}")
        limit, named = _asked(body)
        if limit and context and ask.exact and limit > room:
            raise _too_long(context, named, f"{size + limit} tokens ({size} in the {field}, {limit} in the completion)")
        if not limit and isinstance(body, CompletionBody):
            limit = COMPLETION_TOKENS
        ask.max_tokens = min(limit or room or self._default, room or limit or self._default)
        if (body.min_tokens or 0) > ask.max_tokens:
            raise invalid("min_tokens", f"more than the {ask.max_tokens} tokens that the answer may have")

    def _finish(self, ask: Ask, body: Body) -> None:
        ask.n = body.n or 1
        ask.sampling = sampling(body)
        ask.guide = guide(body, self._able)
        if isinstance(body, ChatBody):
            ask.calling, held = calling(body, self._able)
            if held is not None and ask.guide is not None:
                raise invalid("tool_choice", "a call that must be made leaves no room for another form of the answer")
            ask.guide = held or ask.guide
        logprobs = getattr(body, "logprobs", None)
        ask.logprobs = logprobs is not None and logprobs is not False
        ask.stops = stops(body)
        ask.include_stop = bool(body.include_stop_str_in_output)
        own = self._words.end_ids if self._words is not None and not body.ignore_eos else ()
        ask.end_ids = tuple(dict.fromkeys((*own, *(body.stop_token_ids or ()))))

    def _tokenize(self, body: TokenizeBody) -> Ask:
        assert self._words is not None
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "either prompt or messages is needed")
        if body.messages is not None and not self._words.has_template:
            raise self._reader.unsupported("messages", f"messages: {self._able.what} has no chat template")
        text = body.prompt if body.prompt is not None else self._templated(body)
        special = body.add_special_tokens
        ids = self._words.encode(text, body.prompt is not None if special is None else special)
        texts = [self._words.token_text(token) for token in ids] if body.return_token_strs else None
        return Ask(kind=Kind.TOKENIZE, ready=tokenized(ids, self._context, texts))

    @property
    def bytes_per_token(self) -> float:
        """Of prompts, as learned from what the engine counted."""
        low, high = _RATIO_BOUNDS
        return min(max(self._seen_bytes / self._seen_tokens, low), high)

    def _learn(self, size_bytes: int, tokens: int) -> None:
        self._seen_bytes = _RATIO_FADE * self._seen_bytes + size_bytes
        self._seen_tokens = _RATIO_FADE * self._seen_tokens + tokens


def ready_stream(ask: Ask) -> Ready:
    """The stream of an ask that needs no engine."""
    assert ask.ready is not None
    return Ready(ask.ready)


def _kinds(words: Words | None) -> set[Kind]:
    if words is None:
        return {Kind.COMPLETION}
    return {Kind.COMPLETION, Kind.TOKENIZE} | ({Kind.CHAT} if words.has_template else set())


def _one_prompt(prompt: str | list[str | int]) -> tuple[str, list[int]]:
    """A prompt as text or as ids. Raises Refused for several."""
    if isinstance(prompt, str):
        return prompt, []
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0], []
    ids = [token for token in prompt if isinstance(token, int)]
    if not ids:
        raise Refused(400, "unsupported_feature", "prompt: one at a time", "prompt")
    if len(ids) != len(prompt):
        raise invalid("prompt", "either text or token ids")
    return "", ids


def _asked(body: Generation) -> tuple[int, str]:
    """The client's limit on one choice, 0 where it set none, and the field that says it."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens or 0, "max_tokens"


def _too_long(context: int, field: str, what: str) -> Refused:
    message = (
        f"This model's maximum context length is {context} tokens. However, you requested {what}. "
        f"Please reduce the length of the prompt or of the completion."
    )
    return Refused(400, "context_length_exceeded", message, field)
