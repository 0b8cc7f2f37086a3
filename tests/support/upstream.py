"""A scriptable OpenAI-compatible server: on a test's own loop, or as a process of its own.

    python -m tests.support.upstream [--port N] [--model M] [--ttft S] [--itl S]

prints its URL on the first line. `GET /_stats` and `POST /_script` are how a test talks to such a process.
It invents its text: word after word of upstream_frames.WORDS, one word a token.
"""

import argparse
import asyncio
import json
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from msgspec import Struct

from tests.support.upstream_frames import Frames, Script, head

GENERATE = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
APIS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/v1/models", "/health", "/version")


class Seen(Struct):
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Upstream:
    """The server. `script` is for requests that find nothing in `scripts`; counters are for asserting on."""

    def __init__(
        self, *models: str, ttft_s: float = 0.0, itl_s: float = 0.0, key: str = "", owner: str = "vllm"
    ) -> None:
        self.models = models or ("mock",)
        self.ttft_s = ttft_s
        self.itl_s = itl_s
        self.key = key
        self.owner = owner
        self.apis: tuple[str, ...] = APIS
        self.metrics = True
        self.pages: dict[str, Any] = {}  # by path, instead of its own; what can be called is
        self.script = Script()
        self.scripts: deque[Script] = deque()
        self.seen: list[Seen] = []
        self.running = self.aborted = self.completed = self.connections = self.sent_bytes = 0
        self.url = ""
        self._gate = asyncio.Event()
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._live: set[_Connection] = set()

    def __repr__(self) -> str:
        return f"<Upstream {self.url}: {self.running} running, {self.completed} completed, {self.aborted} aborted>"

    async def __aenter__(self) -> "Upstream":
        return self if self._server else await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def start(self, port: int = 0, unix: str = "", tls: ssl.SSLContext | None = None) -> "Upstream":
        loop = asyncio.get_running_loop()
        if unix:
            self._server = await loop.create_unix_server(lambda: _Connection(self), unix)
            self.url = f"unix:{unix}"
        else:
            self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", port, ssl=tls, backlog=1024)
            host = "localhost" if tls else "127.0.0.1"
            self.url = f"http{'s' if tls else ''}://{host}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def aclose(self) -> None:
        """Stop listening and cut everything off."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._live):
            connection.transport.abort()
        await self.until(lambda: not self._live)

    def release(self) -> None:
        """Let everything go on that a script holds now, and what it would hold later."""
        self._gate.set()

    def hold(self) -> None:
        self._gate.clear()

    async def until(self, condition: Callable[[], bool], limit_s: float = 10.0) -> None:
        """Wait until a condition on this server holds; looked at whenever a counter changes."""
        async with asyncio.timeout(limit_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def change(self) -> None:
        self._changed.set()

    def stats(self) -> dict[str, int]:
        names = ("running", "aborted", "completed", "connections", "sent_bytes")
        return {**{name: getattr(self, name) for name in names}, "requests": len(self.generations)}

    @property
    def generations(self) -> list[Seen]:
        return [one for one in self.seen if one.path in GENERATE]

    async def held(self) -> None:
        await self._gate.wait()


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, site: Upstream) -> None:
        self.site = site
        self.transport: asyncio.Transport
        self.task: asyncio.Task[None] | None = None
        self.generating = False
        self.parts: list[bytes] = []
        self.headers: dict[str, str] = {}
        self.path = b""
        self.room = asyncio.Event()
        self.room.set()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.site.connections += 1
        self.site._live.add(self)
        self.site.change()

    def connection_lost(self, exc: Exception | None) -> None:
        self.site._live.discard(self)
        if self.generating:
            self.generating = False
            self.site.running -= 1
            self.site.aborted += 1
        if self.task is not None:
            self.task.cancel()
        self.site.change()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def pause_writing(self) -> None:
        self.room.clear()

    def resume_writing(self) -> None:
        self.room.set()

    def on_message_begin(self) -> None:
        self.parts, self.headers, self.path = [], {}, b""

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        seen = Seen(self.parser.get_method().decode(), self.path.decode(), self.headers, b"".join(self.parts))
        self.site.seen.append(seen)
        self.task = asyncio.get_running_loop().create_task(self.answer(seen))

    async def answer(self, seen: Seen) -> None:
        if self.site.key and seen.headers.get("authorization") != f"Bearer {self.site.key}":
            self.page(
                401, {"error": {"message": "bad key", "type": "authentication_error", "param": None, "code": 401}}
            )
        elif seen.path in GENERATE and seen.path in self.site.apis:
            await self.generate(seen)
        else:
            self.page(*self.other(seen))

    def other(self, seen: Seen) -> tuple[int, Any]:
        site = self.site
        if seen.path == "/_script":
            site.script = msgspec.json.decode(seen.body, type=Script)
            return 200, {}
        if seen.path == "/_release":
            site.release()
            return 200, {}
        if seen.path in site.pages:
            page = site.pages[seen.path]
            return 200, page() if callable(page) else page
        if seen.path == "/metrics" and site.metrics:
            return 200, metrics(site)
        if seen.path == "/v1/embeddings" and seen.path in site.apis:
            usage = {"prompt_tokens": 3, "total_tokens": 3}
            vector = {"object": "embedding", "index": 0, "embedding": [0.25, -0.5]}
            return 200, {"object": "list", "data": [vector], "model": site.models[0], "usage": usage}
        cards = [{"id": m, "object": "model", "owned_by": site.owner, "max_model_len": 4096} for m in site.models]
        pages: dict[str, Any] = {
            "/_stats": site.stats(),
            "/openapi.json": {"openapi": "3.1.0", "paths": {path: {} for path in site.apis}},
            "/v1/models": {"object": "list", "data": cards},
            "/health": b"",
            "/version": {"version": "0.1.test"},
            "/tokenize": {"count": 3, "max_model_len": 4096, "tokens": [1, 2, 3]},
        }
        if seen.path in pages and (seen.path in site.apis or seen.path in ("/_stats", "/openapi.json")):
            return 200, pages[seen.path]
        return 404, {"detail": "Not Found"}

    async def generate(self, seen: Seen) -> None:
        site = self.site
        script = site.scripts.popleft() if site.scripts else site.script
        self.generating = True
        site.running += 1
        site.change()
        try:
            asked = seen.json()
            await self.run(script, asked, GENERATE[seen.path])
        finally:
            if self.generating:
                self.generating = False
                site.running -= 1
                site.completed += 1
                site.change()

    async def run(self, script: Script, asked: dict[str, Any], kind: str) -> None:
        site = self.site
        if script.hold_at == 0:
            await site.held()
        if script.close_at == 0:
            return self.cut(script)
        if script.status != 200:
            return self.page(script.status, script.body.encode(), script.headers)
        limit = asked.get("max_completion_tokens") or asked.get("max_tokens") or 8
        total = script.tokens if script.tokens >= 0 else limit
        make = Frames(asked, kind, total, "length" if total >= limit else "stop", script)
        if site.ttft_s:
            await asyncio.sleep(site.ttft_s)
        if not asked.get("stream"):
            if script.close_at > 0:
                whole = make.whole()
                self.send(head(200, "application/json", len(whole)) + whole[: len(whole) // 2])
                return self.cut(script)
            if script.hold_at > 0:
                await site.held()
            await asyncio.sleep(site.itl_s * total)
            return self.page(200, make.whole(), script.headers, script.content_type)
        await self.stream(script, make, bool((asked.get("stream_options") or {}).get("include_usage")), total)
        return None

    async def stream(self, script: Script, make: "Frames", wants_usage: bool, total: int) -> None:
        site = self.site
        self.send(
            head(200, script.content_type or "text/event-stream; charset=utf-8", -2 if script.until_close else -1)
        )
        self.frame(script, make.role())
        for i in range(total):
            if i and site.itl_s:
                await asyncio.sleep(site.itl_s)
            self.frame(script, make.token(i))
            if not self.room.is_set():
                await self.room.wait()
            if script.hold_at == i + 1:
                await site.held()
            if script.close_at == i + 1:
                return self.cut(script)
            if script.error_at == i + 1:
                error = {"error": {"message": "scripted failure", "type": "server_error", "code": 500}}
                self.frame(script, b"data: %b\n\n" % json.dumps(error).encode())
                break
        else:
            self.frame(script, make.last())
            if wants_usage and script.usage:
                self.frame(script, make.usage_frame())
        if script.done:
            self.frame(script, b"data: [DONE]\n\n")
        if script.until_close:
            self.transport.close()
        else:
            self.send(b"0\r\n\r\n")
        return None

    def frame(self, script: Script, data: bytes) -> None:
        if data:
            self.send(data if script.until_close else b"%x\r\n%b\r\n" % (len(data), data))

    def send(self, data: bytes) -> None:
        self.site.sent_bytes += len(data)
        self.transport.write(data)

    def cut(self, script: Script) -> None:
        self.generating = False
        self.site.running -= 1
        self.site.change()
        if script.reset:
            self.transport.abort()
        else:
            self.transport.close()

    def page(self, status: int, body: Any, headers: dict[str, str] | None = None, content_type: str = "") -> None:
        kind = content_type or ("application/json" if not isinstance(body, str) else "text/plain; version=0.0.4")
        data = (
            body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        )
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items()).encode()
        self.send(head(status, kind, len(data), extra) + data)


def metrics(site: Upstream) -> str:
    labels = f'{{engine="0",model_name="{site.models[0]}"}}'
    return (
        "# TYPE vllm:num_requests_running gauge\n"
        f"vllm:num_requests_running{labels} {float(site.running)}\n"
        f"vllm:num_requests_waiting{labels} 0.0\n"
        f'vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 7.0\n'
        f"vllm:kv_cache_usage_perc{labels} 0.25\n"
        f"vllm:num_preemptions_total{labels} 2.0\n"
        f'vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="128"}} 1.0\n'
    )


async def serve(args: argparse.Namespace) -> None:
    site = await Upstream(*args.model, ttft_s=args.ttft, itl_s=args.itl).start(args.port)
    print(site.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int, default=0)
    options.add_argument("--model", action="append", default=[])
    options.add_argument("--ttft", type=float, default=0.0)
    options.add_argument("--itl", type=float, default=0.0)
    asyncio.run(serve(options.parse_args()))
