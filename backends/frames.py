"""OpenAI's frames and bodies for chat and completions, as bytes, where an engine does not write them itself."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from backends.protocol import Kind, Prompt, Usage

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


class Scored(Struct, frozen=True):
    """A token of the answer with its log probability. `data` are its bytes, which may be half a character."""

    text: str
    data: bytes
    logprob: float


class ToolCall(Struct, frozen=True):
    """A function that the model wants called. `arguments` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


class Said(Struct, frozen=True, kw_only=True):
    """One whole choice."""

    text: str
    reason: str
    logprobs: Sequence[Scored] | None = None
    calls: Sequence[ToolCall] = ()


class Frames:
    """The frames of one chat or completion answer. What is the same in all of them is encoded once.

    Where the client asked for usage each frame has a `usage`, null in all but the last. `created` is unix time.
    """

    def __init__(self, prompt: Prompt, request_id: str, fingerprint: str, created: int) -> None:
        self._chat = prompt.kind is Kind.CHAT
        self._want_usage = prompt.want_usage
        self._head: dict[str, object] = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + request_id,
            "created": created,
            "model": prompt.model,
            "system_fingerprint": fingerprint or None,
        }
        name = "chat.completion.chunk" if self._chat else "text_completion"
        self._open = b"data: " + _encode({"object": name, **self._head})[:-1] + b',"choices":['
        self._close = b'],"usage":null}\n\n' if prompt.want_usage else b"]}\n\n"
        self._text = b'"delta":{"content":' if self._chat else b'"text":'
        self._text_end = b"}" if self._chat else b""
        self._chars: dict[int, int] = {}  # of text so far, by choice: where a completion's next logprob begins

    def opening(self, index: int) -> bytes:
        """The first frame of a choice: its role. Completions have none."""
        if not self._chat:
            return b""
        return self._choice(index, b'"delta":{"role":"assistant","content":"","refusal":null}', b"null")

    def text(self, index: int, text: str, logprobs: Sequence[Scored] | None = None) -> bytes:
        said = self._text + _encode(text) + self._text_end
        return self._choice(index, said, b"null", self._scores(index, logprobs))

    def calls(self, index: int, deltas: list[dict[str, object]]) -> bytes:
        """Parts of tool calls, in the form of `delta.tool_calls`."""
        return self._choice(index, b'"delta":{"tool_calls":' + _encode(deltas) + b"}", b"null")

    def finish(self, index: int, reason: str, logprobs: Sequence[Scored] | None = None) -> bytes:
        """The last frame of a choice; what is left of the logprobs goes with it."""
        empty = b'"delta":{}' if self._chat else b'"text":""'
        return self._choice(index, empty, _encode(reason), self._scores(index, logprobs))

    def usage(self, usage: Usage) -> bytes:
        """The last frame, where the client asked for it."""
        if not self._want_usage:
            return b""
        return self._open + b'],"usage":' + _encode(_usage(usage)) + b"}\n\n"

    def whole(self, answers: Sequence[Said], usage: Usage) -> bytes:
        """The body of an unstreamed answer."""
        name = "chat.completion" if self._chat else "text_completion"
        choices = [self._answer(index, said) for index, said in enumerate(answers)]
        return _encode({"object": name, **self._head, "choices": choices, "usage": _usage(usage)})

    def _choice(self, index: int, content: bytes, reason: bytes, logprobs: bytes = b"null") -> bytes:
        head = b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b}' % (index, content, logprobs, reason)
        return self._open + head + self._close

    def _answer(self, index: int, said: Said) -> dict[str, object]:
        content: dict[str, object] = {"text": said.text}
        if self._chat:
            message: dict[str, object] = {"role": "assistant", "content": said.text, "refusal": None}
            if said.calls:
                message |= {"content": said.text or None, "tool_calls": [whole_call(call) for call in said.calls]}
            content = {"message": message}
        logprobs = msgspec.Raw(self._scores(index, said.logprobs))
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": said.reason}

    def _scores(self, index: int, scored: Sequence[Scored] | None) -> bytes:
        if not scored:
            return b"null"
        if self._chat:
            content = [
                {"token": one.text, "logprob": one.logprob, "bytes": list(one.data), "top_logprobs": []}
                for one in scored
            ]
            return _encode({"content": content, "refusal": None})
        offsets = []
        at = self._chars.get(index, 0)
        for one in scored:
            offsets.append(at)
            at += len(one.text)
        self._chars[index] = at
        lists = {
            "tokens": [one.text for one in scored],
            "token_logprobs": [one.logprob for one in scored],
            "top_logprobs": [{one.text: one.logprob} for one in scored],
            "text_offset": offsets,
        }
        return _encode(lists)


def whole_call(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def tokenized(ids: list[int], context_tokens: int, texts: list[str] | None) -> bytes:
    """The body of a tokenize answer, in the form of vLLM's server."""
    return _encode({"count": len(ids), "max_model_len": context_tokens, "tokens": ids, "token_strs": texts})
