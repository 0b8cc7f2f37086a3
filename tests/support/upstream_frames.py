"""What the scripted upstream says, in the shapes of vLLM's server."""

import json
from typing import Any

from msgspec import Struct

WORDS = ("the", "box", "hands", "a", "token", "to", "each", "train")


class Script(Struct, forbid_unknown_fields=True):
    """How one generation goes. Numbers of tokens count events with output; -1 is never.

    `status` other than 200 answers with `body`. `hold_at` waits there for `Upstream.release`: 0 is before the head, n
    after n tokens. `close_at` closes there, rudely with `reset`. `error_at` puts an error event there. `chunk` is what
    each token says, if not its word.
    """

    status: int = 200
    headers: dict[str, str] = {}
    body: str = '{"error":{"message":"scripted","type":"server_error","param":null,"code":"scripted"}}'
    tokens: int = -1
    hold_at: int = -1
    close_at: int = -1
    reset: bool = True
    error_at: int = -1
    done: bool = True
    until_close: bool = False
    content_type: str = ""
    chunk: str = ""
    usage: bool = True


class Frames:
    """What one answer says, in the shapes of vLLM's server."""

    def __init__(self, asked: dict[str, Any], kind: str, total: int, reason: str, script: Script) -> None:
        self.kind, self.total, self.reason, self.script = kind, total, reason, script
        self.model = asked["model"]
        self.choices = int(asked.get("n") or 1)
        said = asked.get("prompt") or " ".join(str(one.get("content")) for one in asked.get("messages", ()))
        prompt = max(1, len(str(said).split()))
        output = total * self.choices
        self.usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def word(self, i: int) -> str:
        return self.script.chunk or f" {WORDS[i % len(WORDS)]}"

    def event(self, choices: list[Any], **more: Any) -> bytes:
        chat = self.kind == "chat"
        name = "chat.completion.chunk" if chat else "text_completion"
        value = {"id": "cmpl-1", "object": name, "created": 1700000000, "model": self.model, "choices": choices, **more}
        return b"data: %b\n\n" % json.dumps(value, separators=(",", ":")).encode()

    def part(self, delta: dict[str, Any], text: str, reason: str | None) -> bytes:
        said: dict[str, Any] = {"delta": delta} if self.kind == "chat" else {"text": text}
        return b"".join(
            self.event([{"index": i, **said, "logprobs": None, "finish_reason": reason}]) for i in range(self.choices)
        )

    def role(self) -> bytes:
        return self.part({"role": "assistant", "content": ""}, "", None) if self.kind == "chat" else b""

    def token(self, i: int) -> bytes:
        return self.part({"content": self.word(i)}, self.word(i), None)

    def last(self) -> bytes:
        return self.part({}, "", self.reason)

    def usage_frame(self) -> bytes:
        return self.event([], usage=self.usage)

    def text(self) -> str:
        return "".join(self.word(i) for i in range(self.total))

    def whole(self) -> bytes:
        chat = self.kind == "chat"
        said: dict[str, Any] = (
            {"message": {"role": "assistant", "content": self.text()}} if chat else {"text": self.text()}
        )
        choices = [{"index": i, **said, "logprobs": None, "finish_reason": self.reason} for i in range(self.choices)]
        name = "chat.completion" if chat else "text_completion"
        value = {"id": "cmpl-1", "object": name, "created": 1700000000, "model": self.model, "choices": choices}
        return json.dumps({**value, **({"usage": self.usage} if self.script.usage else {})}).encode()


def head(status: int, content_type: str, length: int, extra: bytes = b"") -> bytes:
    """A response head; length -1 is chunked, -2 until the connection closes."""
    body = {-1: b"transfer-encoding: chunked\r\n", -2: b"connection: close\r\n"}.get(
        length, b"content-length: %d\r\n" % length
    )
    return b"HTTP/1.1 %d Said\r\ncontent-type: %b\r\n%b%b\r\n" % (status, content_type.encode(), body, extra)
