"""A real OpenTelemetry collector (rotel) in a process of its own; what it passes on, in the official classes."""

import asyncio
import importlib.util
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span


def plain(attributes: Any) -> dict[str, Any]:
    """Attributes as Python values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


class Trace:
    """All spans of one trace that have come, of this gateway."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = sorted(spans, key=lambda one: (one.start_time_unix_nano, one.end_time_unix_nano))

    @property
    def server(self) -> Span:
        (found,) = [one for one in self.spans if one.kind == Span.SPAN_KIND_SERVER]
        return found

    @property
    def children(self) -> list[Span]:
        return [one for one in self.spans if one.parent_span_id == self.server.span_id]

    def named(self, name: str) -> list[Span]:
        return [one for one in self.children if one.name == name]

    def check(self, *names: str) -> None:
        """Exactly these phases under the server span, in this order, without a gap, within it, and adding up to it."""
        server, children = self.server, self.children
        assert [one.name for one in children] == list(names)
        assert len(self.spans) == 1 + len(names)
        assert len({one.span_id for one in self.spans}) == len(self.spans)
        for one in self.spans:
            assert (len(one.trace_id), len(one.span_id)) == (16, 8)
            assert server.start_time_unix_nano <= one.start_time_unix_nano <= one.end_time_unix_nano
            assert one.end_time_unix_nano <= server.end_time_unix_nano
        for one, following in itertools.pairwise(children):
            assert one.end_time_unix_nano == following.start_time_unix_nano
        whole = server.end_time_unix_nano - server.start_time_unix_nano
        parts = sum(one.end_time_unix_nano - one.start_time_unix_nano for one in children)
        assert abs(whole - parts) < 1_000_000


class Collector:
    """`http` and `grpc` are its addresses; `resources` is what came out of it."""

    def __init__(self) -> None:
        self.resources: list[ResourceSpans] = []
        self.http = self.grpc = ""
        self._came = asyncio.Event()

    def traces(self) -> dict[str, Trace]:
        """By trace id in hex."""
        found: dict[str, list[Span]] = {}
        for resource in self.resources:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    found.setdefault(span.trace_id.hex(), []).append(span)
        return {trace_id: Trace(spans) for trace_id, spans in found.items()}

    async def until(self, condition: Callable[[dict[str, Trace]], bool], within_s: float = 15.0) -> dict[str, Trace]:
        """Wait until it holds of what has come; that."""
        async with asyncio.timeout(within_s):
            while not condition(self.traces()):
                self._came.clear()
                await self._came.wait()
        return self.traces()

    async def one(self) -> Trace:
        """The one trace that comes."""
        (trace,) = (await self.until(bool)).values()
        return trace

    async def take(self, request: web.Request) -> web.Response:
        self.resources += ExportTraceServiceRequest.FromString(await request.read()).resource_spans
        self._came.set()
        return web.Response(content_type="application/x-protobuf")


@asynccontextmanager
async def receiver(collector: Collector) -> AsyncIterator[str]:
    """An OTLP receiver in this process; its URL."""
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def rotel(folder: Path) -> AsyncIterator[Collector]:
    """A running rotel that passes on at once. Skips where its package has none for this machine."""
    spec = importlib.util.find_spec("rotel")
    if spec is None or spec.origin is None:
        pytest.skip("rotel is not installed: its package has no wheel for this machine")
    collector = Collector()
    async with receiver(collector) as sink:
        ports = _free_ports(2)
        command = [
            str(Path(spec.origin).with_name("rotel-agent")), "start", "--disable-batching",
            "--pid-file", str(folder / "rotel.pid"), "--log-file", str(folder / "rotel.log"),
            "--otlp-http-endpoint", f"127.0.0.1:{ports[0]}", "--otlp-grpc-endpoint", f"127.0.0.1:{ports[1]}",
            "--exporter", "otlp", "--otlp-exporter-endpoint", sink, "--otlp-exporter-protocol", "http",
        ]  # fmt: skip
        with (folder / "rotel.out").open("wb") as out:
            process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
        try:
            for port in ports:
                await _answers(port, process, folder / "rotel.out")
            collector.http, collector.grpc = f"http://127.0.0.1:{ports[0]}", f"grpc://127.0.0.1:{ports[1]}"
            yield collector
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


async def _answers(port: int, process: asyncio.subprocess.Process, out: Path) -> None:
    async with asyncio.timeout(15):
        while True:
            assert process.returncode is None, out.read_text()
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            await writer.wait_closed()
            return
