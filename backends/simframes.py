"""What the simulated engine says on the wire: OpenAI's frames and bodies, as bytes."""

import base64
import struct

import msgspec

from backends.protocol import Kind, Prompt, Usage

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


class Frames:
    """The frames of one chat or completion answer. What is the same in all of them is encoded once.

    Where the client asked for usage each frame has a `usage`, null in all but the last.
    """

    def __init__(self, prompt: Prompt, request_id: str, engine: str, created: int) -> None:
        self._chat = prompt.kind is Kind.CHAT
        self._want_usage = prompt.want_usage
        self._head: dict[str, object] = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + request_id,
            "created": created,
            "model": prompt.model,
            "system_fingerprint": f"simulated-{engine}",
        }
        name = "chat.completion.chunk" if self._chat else "text_completion"
        self._open = b"data: " + _encode({"object": name, **self._head})[:-1] + b',"choices":['
        self._close = b'],"usage":null}\n\n' if prompt.want_usage else b"]}\n\n"
        self._text = b'"delta":{"content":' if self._chat else b'"text":'
        self._text_end = b"}" if self._chat else b""

    def opening(self, index: int) -> bytes:
        """The first frame of a choice: its role. Completions have none."""
        if not self._chat:
            return b""
        return self._choice(index, b'"delta":{"role":"assistant","content":"","refusal":null}', b"null")

    def text(self, index: int, text: str) -> bytes:
        return self._choice(index, self._text + _encode(text) + self._text_end, b"null")

    def finish(self, index: int, reason: str) -> bytes:
        empty = b'"delta":{}' if self._chat else b'"text":""'
        return self._choice(index, empty, _encode(reason))

    def usage(self, usage: Usage) -> bytes:
        """The last frame, where the client asked for it."""
        if not self._want_usage:
            return b""
        return self._open + b'],"usage":' + _encode(_usage(usage)) + b"}\n\n"

    def whole(self, answers: list[tuple[str, str]], usage: Usage) -> bytes:
        """The body of an unstreamed answer; `answers` are the text and the finish reason of each choice."""
        name = "chat.completion" if self._chat else "text_completion"
        choices = [self._answer(index, text, reason) for index, (text, reason) in enumerate(answers)]
        return _encode({"object": name, **self._head, "choices": choices, "usage": _usage(usage)})

    def _choice(self, index: int, content: bytes, reason: bytes) -> bytes:
        head = b'{"index":%d,%b,"logprobs":null,"finish_reason":%b}' % (index, content, reason)
        return self._open + head + self._close

    def _answer(self, index: int, text: str, reason: str) -> dict[str, object]:
        said: dict[str, object] = {"text": text}
        if self._chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **said, "logprobs": None, "finish_reason": reason}


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def embeddings(model: str, vectors: list[list[float]], base64_wanted: bool, prompt_tokens: int) -> bytes:
    """The body of an embeddings answer. In base64 a vector is little-endian 32-bit floats, as OpenAI has it."""
    rows = [
        {"object": "embedding", "index": index, "embedding": _packed(vector) if base64_wanted else vector}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return _encode({"object": "list", "data": rows, "model": model, "usage": usage})


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def tokenized(ids: list[int], context_tokens: int, texts: list[str] | None) -> bytes:
    """The body of a tokenize answer, in the form of vLLM's server."""
    return _encode({"count": len(ids), "max_model_len": context_tokens, "tokens": ids, "token_strs": texts})
