"""A fast OpenAI-compatible server that says nothing of value: the upstream for overhead measurements.

`python -m bench.mock_openai [--port N] [--ttft-ms N] [--itl-ms N]` prints `listening on PORT`. `max_tokens` is how many
chunks it sends. Without pace a stream is written in one go, chunk by chunk, so that whatever stands in front has the
only cost per chunk. A request sets its own pace with `"user": "itl_ms=20"`. `GET /stats` counts requests, completed
and aborted answers.
"""

import argparse
import asyncio
import functools
from typing import cast

import msgspec
import uvloop
from msgspec import Struct

MODEL = "mock"
CREATED = 1_700_000_000


class StreamOptions(Struct):
    include_usage: bool | None = None


class Ask(Struct):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class Stats(Struct):
    requests: int = 0
    completed: int = 0
    aborted: int = 0


_decode = msgspec.json.Decoder(Ask).decode


def _response(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
    return head + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(choices: list[object], **more: object) -> bytes:
    frame = {"id": "chatcmpl-mock", "object": "chat.completion.chunk", "created": CREATED, "model": MODEL}
    return _chunk(b"data: " + msgspec.json.encode({**frame, "choices": choices, **more}) + b"\n\n")


def _delta(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    return _event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}])


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 16, "completion_tokens": tokens, "total_tokens": 16 + tokens}


_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
_FIRST, _TOKEN, _LAST = _delta({"role": "assistant", "content": ""}), _delta({"content": " token"}), _delta({}, "stop")
_DONE = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_CARD = {"id": MODEL, "object": "model", "created": CREATED, "owned_by": "mock", "max_model_len": 32_768}
_MODELS = _response(msgspec.json.encode({"object": "list", "data": [_CARD]}))
_NOT_FOUND = _response(b'{"error":{"message":"not found"}}', b"404 Not Found")


def _tail(tokens: int, usage: bool) -> bytes:
    return _LAST + (_event([], usage=_usage(tokens)) if usage else b"") + _DONE


@functools.lru_cache(64)
def _burst(tokens: int, usage: bool) -> bytes:
    """A whole stream, an HTTP chunk per event. Kept ready, so that the mock is never what limits a benchmark."""
    return _HEAD + _FIRST + _TOKEN * tokens + _tail(tokens, usage)


@functools.lru_cache(64)
def _whole(tokens: int) -> bytes:
    message = {"role": "assistant", "content": " token" * tokens}
    body = {
        "id": "chatcmpl-mock",
        "object": "chat.completion",
        "created": CREATED,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": _usage(tokens),
    }
    return _response(msgspec.json.encode(body))


class Connection(asyncio.Protocol):
    """One client. Reads as much HTTP/1.1 as a client of an LLM server sends; one request at a time."""

    def __init__(self, stats: Stats, ttft_s: float, itl_s: float) -> None:
        self._stats, self._ttft_s, self._itl_s = stats, ttft_s, itl_s
        self._buffer = b""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._stats.aborted += 1

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            found = _body(head, self._buffer, end + 4)
            if found is None:
                return
            body, rest = found
            self._buffer = self._buffer[rest:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        line = head.split(b"\r\n", 1)[0]
        if line.startswith(b"post"):
            self._generate(_decode(body))
        elif b"/stats" in line:
            self._transport.write(_response(msgspec.json.encode(self._stats)))
        elif b"/models" in line:
            self._transport.write(_MODELS)
        else:
            self._transport.write(_response(b"{}") if b"/health" in line else _NOT_FOUND)

    def _generate(self, ask: Ask) -> None:
        self._stats.requests += 1
        tokens = ask.max_tokens or ask.max_completion_tokens or 16
        itl_s = float(ask.user[7:]) / 1e3 if ask.user and ask.user.startswith("itl_ms=") else self._itl_s
        usage = ask.stream_options is not None and bool(ask.stream_options.include_usage)
        if not ask.stream:
            self._later(self._ttft_s + itl_s * tokens, _whole(tokens))
        elif itl_s or self._ttft_s:
            now = asyncio.get_running_loop().time()
            self._tell(now + self._ttft_s, itl_s, tokens, _tail(tokens, usage))
        else:
            self._end(_burst(tokens, usage))

    def _later(self, seconds: float, data: bytes) -> None:
        if seconds:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._end, data)
        else:
            self._end(data)

    def _tell(self, first_s: float, itl_s: float, tokens: int, tail: bytes) -> None:
        """A paced stream. Each token has its own time from the beginning on, so that lateness does not add up."""
        loop = asyncio.get_running_loop()
        told = 0

        def tell() -> None:
            nonlocal told
            self._transport.write(_HEAD + _FIRST + _TOKEN if told == 0 else _TOKEN)
            told += 1
            if told < tokens:
                self._timer = loop.call_at(first_s + told * itl_s, tell)
            else:
                self._end(tail)

        self._timer = loop.call_at(first_s, tell)

    def _end(self, data: bytes) -> None:
        self._timer = None
        self._transport.write(data)
        self._stats.completed += 1


def _body(head: bytes, buffer: bytes, start: int) -> tuple[bytes, int] | None:
    """The body of the request with this head, and where the next one begins; None while it is not all there."""
    if (at := head.find(b"content-length:")) >= 0:
        end = start + int(head[at + 15 :].split(b"\r\n", 1)[0])
        return (buffer[start:end], end) if len(buffer) >= end else None
    if b"transfer-encoding: chunked" not in head:
        return b"", start
    parts: list[bytes] = []
    while (line := buffer.find(b"\r\n", start)) >= 0:
        size = int(buffer[start:line], 16)
        after = line + 2 + size
        if len(buffer) < after + 2:
            return None
        if size == 0:
            return b"".join(parts), after + 2
        parts.append(buffer[line + 2 : after])
        start = after + 2
    return None


async def serve(port: int, ttft_ms: float, itl_ms: float) -> None:
    stats = Stats()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(stats, ttft_ms / 1e3, itl_ms / 1e3), "127.0.0.1", port, backlog=4_096
    )
    print(f"listening on {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=0.0)
    parser.add_argument("--itl-ms", type=float, default=0.0)
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.ttft_ms, args.itl_ms))


if __name__ == "__main__":
    main()
