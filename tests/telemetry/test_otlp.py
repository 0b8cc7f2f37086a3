"""What the sender makes of a collector's answers, over HTTP and gRPC, and what is wrong in `[telemetry]`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.config import ConfigError, decode
from gateway.telemetry import otlp, start
from gateway.telemetry.otlp import Sender
from gateway.telemetry.protobuf import block
from gateway.telemetry.settings import Telemetry, collector
from tests.support.collector import plain
from tests.support.site import POOL

SPANS = [block(2, block(5, b"one")), block(2, block(5, b"two")) + block(2, block(5, b"three"))]


@asynccontextmanager
async def http(answer: Callable[[bytes, Any], web.Response]) -> AsyncIterator[str]:
    async def take(request: web.Request) -> web.Response:
        return answer(await request.read(), request.headers)

    app = web.Application()
    app.router.add_post("/some/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/some/v1/traces"
    finally:
        await runner.cleanup()


@contextmanager
def sender(url: str, **more: Any) -> Iterator[Sender]:
    settings = Telemetry(otlp_url=url, **more)
    to = settings.collector
    assert to is not None
    with closing(Sender(otlp.wire(settings, to), otlp.resource(settings), url)) as one:
        yield one


async def sent(one: Sender) -> bool:
    return await asyncio.to_thread(one, SPANS)


async def test_a_batch_is_one_request_with_all_its_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTOR", "x-key=s3cret, x-other = two")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.name=theirs")
    got: list[tuple[bytes, Any]] = []

    def take(body: bytes, headers: Any) -> web.Response:
        got.append((body, headers))
        return web.Response()

    async with http(take) as url:
        with sender(url, headers_env="COLLECTOR") as one:
            assert await sent(one)
            assert await sent(one)
        with sender(url, service_name="ours") as one:
            assert await sent(one)
    body, headers = got[0]
    assert (headers["x-key"], headers["x-other"]) == ("s3cret", "two")
    assert headers["content-type"] == "application/x-protobuf"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    about = plain(resource.resource.attributes)
    assert (about["service.name"], about["deployment.environment.name"]) == ("theirs", "test")
    (scope,) = resource.scope_spans
    assert [span.name for span in scope.spans] == ["one", "two", "three"]
    assert scope.scope.name == "signalbox"
    (resource,) = ExportTraceServiceRequest.FromString(got[2][0]).resource_spans
    assert plain(resource.resource.attributes)["service.name"] == "ours"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_collector_that_is_busy_gets_the_batch_again(status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    answers = [status, status, 200]
    async with http(lambda body, headers: web.Response(status=answers.pop(0))) as url:
        with sender(url) as one:
            assert [await sent(one) for _ in range(3)] == [False, False, True]
    told = [record.getMessage() for record in caplog.records if record.name == "gateway.telemetry.otlp"]
    assert len(told) == 2
    assert f"it answers {status}" in told[0]
    assert "is back" in told[1]


async def test_a_batch_that_is_refused_is_not_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    async with http(lambda body, headers: web.Response(status=400, text="what is this")) as url:
        with sender(url) as one:
            assert await sent(one)
    assert "it answers 400: b'what is this'" in caplog.text


async def test_what_a_collector_did_not_take_is_told(caplog: pytest.LogCaptureFixture) -> None:
    partial = block(1, b"\x08\x02" + block(2, b"too many"))
    async with http(lambda body, headers: web.Response(body=partial)) as url:
        with sender(url) as one:
            assert await sent(one)
    assert "too many" in caplog.text


async def test_a_connection_that_the_collector_has_closed_is_made_again() -> None:
    asked = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        asked += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(once, "127.0.0.1", 0) as server:
        with sender(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as one:
            assert [await sent(one) for _ in range(3)] == [True] * 3
            assert asked == 3
            server.close()
            assert not await sent(one)


async def test_grpc_codes_are_waited_out_or_given_up(caplog: pytest.LogCaptureFixture) -> None:
    codes = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT, None]
    got: list[Any] = []

    def export(body: bytes, context: grpc.ServicerContext) -> bytes:
        got.append((body, dict(context.invocation_metadata())))
        if (code := codes.pop(0)) is not None:
            context.abort(code, "scripted")
        return b""

    server = grpc.server(futures.ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(export)
    service, method = otlp.METHOD.lstrip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with sender(f"grpc://127.0.0.1:{port}") as one:
            assert [await sent(one) for _ in range(3)] == [False, True, True]
    finally:
        await asyncio.to_thread(server.stop(None).wait)
    assert "UNAVAILABLE: scripted" in caplog.text
    assert "INVALID_ARGUMENT: scripted" in caplog.text
    (resource,) = ExportTraceServiceRequest.FromString(got[2][0]).resource_spans
    assert len(resource.scope_spans[0].spans) == 3


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://here", ("http", "here", 4318, "/v1/traces")),
        ("https://here:1/a/", ("https", "here", 1, "/a")),
        ("grpc://[::1]:5", ("grpc", "::1", 5, "")),
        ("grpcs://here/", ("grpcs", "here", 4317, "")),
    ],
)
def test_addresses(url: str, found: tuple[str, str, int, str]) -> None:
    assert collector(url) == found


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('otlp_url = "here:4317"', "otlp_url"),
        ('otlp_url = "ftp://here"', "otlp_url"),
        ('otlp_url = "http://u:p@here"', "otlp_url: no user"),
        ('otlp_url = "http://here:x"', "otlp_url"),
        ('otlp_url = "grpc://here/path"', "gRPC has no path"),
        ('otlp_url = "http://here"\nca_file = "a.pem"', "ca_file means nothing"),
        ("trace_ratio = 1.5", "trace_ratio"),
        ('keep = ["all"]', "keep"),
        ('access_log = "some"', "access_log"),
        ("otlp = true", "otlp"),
    ],
)
def test_a_wrong_setting_is_named(lines: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decode(f"[telemetry]\n{lines}\n{POOL}".encode())


@pytest.mark.parametrize(
    ("lines", "path"),
    [
        ('headers_env = "NO_SUCH_VARIABLE"', "$.telemetry.headers_env"),
        ('headers_env = "BROKEN_HEADERS"', "$.telemetry.headers_env"),
        ('ca_file = "/nowhere/ca.pem"', "$.telemetry.ca_file"),
    ],
)
def test_what_is_not_there_is_told_at_the_start(lines: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN_HEADERS", "no equals sign")
    config = decode(f'[telemetry]\notlp_url = "https://here"\n{lines}\n{POOL}'.encode())
    with pytest.raises(ConfigError) as caught:
        start.Telemetry(config)
    assert caught.value.path == path


def test_grpc_that_is_not_installed_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp.importlib.util, "find_spec", lambda name: None)
    config = decode(f'[telemetry]\notlp_url = "grpc://here"\n{POOL}'.encode())
    with pytest.raises(ConfigError, match=r"\$\.telemetry\.otlp_url: gRPC is not installed here: pip install"):
        start.Telemetry(config)


def test_a_certificate_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(ValueError, match="ca_file"):
        otlp.check(Telemetry(otlp_url="https://here", ca_file=str(tmp_path / "ca.pem")))
