"""The way to a collector: OTLP over HTTP or gRPC, batches of spans that are bytes already."""

import http.client
import importlib.util
import logging
import os
import secrets
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gateway import __version__
from gateway.telemetry.protobuf import attribute, block, text
from gateway.telemetry.settings import Collector, Telemetry, collector_headers

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
PERIOD_S = 1.0
MOST_BYTES = 16 * 1024 * 1024
BATCH_BYTES = 1024 * 1024  # collectors take 4 MiB by default
METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class Away(Exception):
    """The collector cannot be had just now."""


class Rejected(Exception):
    """The collector does not want these spans, now or later."""


class Wire(Protocol):
    """A connection to a collector, for use by one thread."""

    def send(self, body: bytes) -> bytes:
        """An `ExportTraceServiceRequest`; the answer's bytes. Raises Away or Rejected."""
        ...

    def close(self) -> None:
        """Let go of the connection; from any thread."""
        ...


class Sender:
    """Puts spans into requests and sends them: what an outbox delivers to. Says once when the collector goes away."""

    def __init__(self, wire: Wire, resource: bytes, where: str) -> None:
        self._wire, self._where = wire, where
        self._resource = resource
        self._scope = block(1, text(1, "signalbox") + text(2, __version__))
        self._away = False

    def close(self) -> None:
        """No batch comes any more."""
        self._wire.close()

    def __call__(self, spans: list[bytes]) -> bool:
        scope_spans = b"".join([self._scope, *spans])
        body = block(1, self._resource + block(2, scope_spans))
        try:
            answer = self._wire.send(body)
        except Away as error:
            if not self._away:
                log.warning("the trace collector %s cannot be had, spans wait for it: %s", self._where, error)
            self._away = True
            return False
        except Rejected as error:
            log.warning("the trace collector %s refused %d requests' spans: %s", self._where, len(spans), error)
            return True
        if self._away:
            log.info("the trace collector %s is back", self._where)
            self._away = False
        if answer not in (b"", b"\x0a\x00"):  # a partial success with something to say
            log.warning("the trace collector %s did not take all: %r", self._where, answer[:200])
        return True


class OverHttp:
    """One kept-alive connection; made again when it turns out to be gone."""

    def __init__(self, to: Collector, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        self._path = to.path
        self._headers = {"content-type": "application/x-protobuf", "user-agent": f"signalbox/{__version__}", **headers}
        if tls is None:
            self._connection = http.client.HTTPConnection(to.host, to.port, timeout=TIMEOUT_S)
        else:
            self._connection = http.client.HTTPSConnection(to.host, to.port, timeout=TIMEOUT_S, context=tls)

    def send(self, body: bytes) -> bytes:
        try:
            try:
                status, answer = self._post(body)
            except (http.client.RemoteDisconnected, ConnectionError, BrokenPipeError):
                status, answer = self._post(body)  # it was an old one that the collector had closed
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise Away(str(error) or type(error).__name__) from error
        if status in (429, 502, 503, 504):
            raise Away(f"it answers {status}")
        if not 200 <= status < 300:
            raise Rejected(f"it answers {status}: {answer[:200]!r}")
        return answer

    def close(self) -> None:
        self._connection.close()

    def _post(self, body: bytes) -> tuple[int, bytes]:
        try:
            self._connection.request("POST", self._path, body, self._headers)
            response = self._connection.getresponse()
            return response.status, response.read(64 * 1024)
        except BaseException:
            self._connection.close()
            raise


class OverGrpc:
    """A channel; it makes its connection again by itself."""

    def __init__(self, to: Collector, headers: Mapping[str, str], ca: bytes | None) -> None:
        import grpc  # noqa: PLC0415 - in the extra `otlp`

        self._error: type[Exception] = grpc.RpcError
        codes = grpc.StatusCode
        self._passing = {
            codes.CANCELLED, codes.DEADLINE_EXCEEDED, codes.ABORTED, codes.OUT_OF_RANGE, codes.UNAVAILABLE,
            codes.DATA_LOSS, codes.RESOURCE_EXHAUSTED,
        }  # fmt: skip
        options = [("grpc.max_reconnect_backoff_ms", 5_000)]
        if to.tls:
            channel = grpc.secure_channel(to.authority, grpc.ssl_channel_credentials(ca), options)
        else:
            channel = grpc.insecure_channel(to.authority, options)
        self._channel, self._call = channel, channel.unary_unary(METHOD)
        self._metadata = tuple(headers.items())

    def send(self, body: bytes) -> bytes:
        try:
            answer: bytes = self._call(body, timeout=TIMEOUT_S, metadata=self._metadata)
        except self._error as error:
            call: Any = error
            what = f"{call.code().name}: {call.details()}"
            if call.code() in self._passing:
                raise Away(what) from error
            raise Rejected(what) from error
        return answer

    def close(self) -> None:
        self._channel.close()


def check(settings: Telemetry) -> None:
    """What a connection to the collector needs is here. Raises ValueError, which names the field."""
    to = settings.collector
    if to is None:
        return
    collector_headers(settings.headers_env)
    if to.grpc and importlib.util.find_spec("grpc") is None:
        raise ValueError("otlp_url: gRPC is not installed here: pip install 'signalbox-gateway[otlp]'")
    if to.tls:
        _tls(settings.ca_file)


def wire(settings: Telemetry, to: Collector) -> Wire:
    """The connection that the settings ask for; nothing is sent yet. Raises ValueError, which names the field."""
    check(settings)
    headers = collector_headers(settings.headers_env)
    if to.grpc:
        return OverGrpc(to, headers, Path(settings.ca_file).read_bytes() if settings.ca_file else None)
    return OverHttp(to, headers, _tls(settings.ca_file) if to.tls else None)


def _tls(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        raise ValueError(f"ca_file: {ca_file}: {error}") from None


def resource(settings: Telemetry) -> bytes:
    """Who speaks: the process, and what OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME say of it."""
    from opentelemetry.sdk.resources import OTELResourceDetector  # noqa: PLC0415 - slow, and needed with traces only

    values: dict[str, Any] = {
        "service.name": "signalbox",
        "service.version": __version__,
        "service.instance.id": secrets.token_hex(8),
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }
    values |= OTELResourceDetector().detect().attributes
    if settings.service_name:
        values["service.name"] = settings.service_name
    return block(1, b"".join(attribute(1, name, value) for name, value in values.items()))
