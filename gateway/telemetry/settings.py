"""What `[telemetry]` in the configuration means."""

import os
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta, Struct

Keep = Literal["slow", "refused", "failed"]

_PORTS = {"http": 4318, "https": 4318, "grpc": 4317, "grpcs": 4317}


class Collector(NamedTuple):
    """Where spans go: `scheme` is one of http, https, grpc, grpcs; `path` is empty for gRPC."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def grpc(self) -> bool:
        return self.scheme.startswith("grpc")

    @property
    def tls(self) -> bool:
        return self.scheme.endswith("s")

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Telemetry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traces and logs.

    `otlp_url` is the collector: `http[s]://host[:port][/path]` speaks OTLP over HTTP, `grpc[s]://host[:port]` over
    gRPC; empty means no traces. `trace_ratio` of the traces that begin here are kept, and all whose caller keeps its
    own. Those named in `keep` are kept besides, at most `keep_per_s` of them. `headers_env` names the variable with
    headers for the collector, as `name=value,name=value`. `log_prompts` writes request bodies into the access log.
    """

    otlp_url: str = ""
    trace_ratio: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    keep: tuple[Keep, ...] = ("slow", "refused", "failed")
    keep_per_s: Annotated[float, Meta(ge=0.0, le=10_000.0)] = 20.0
    headers_env: str = ""
    ca_file: str = ""
    service_name: Annotated[str, Meta(max_length=255)] = ""
    access_log: Literal["all", "failed", "off"] = "all"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        to = self.collector
        if to is not None and self.ca_file and not to.tls:
            raise ValueError(f"ca_file means nothing for {self.otlp_url}, which has no TLS")

    @property
    def collector(self) -> Collector | None:
        return collector(self.otlp_url) if self.otlp_url else None


def collector(url: str) -> Collector:
    """Raises ValueError, which names the field."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"otlp_url: {url}: {error}") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError(f"otlp_url: {url!r} is not http[s]://host[:port][/path] or grpc[s]://host[:port]")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("otlp_url: no user, query or fragment; headers for the collector come from headers_env")
    path = parts.path.rstrip("/")
    if parts.scheme.startswith("grpc"):
        if path:
            raise ValueError(f"otlp_url: {url}: gRPC has no path")
    else:
        path = path or "/v1/traces"
    return Collector(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], path)


def collector_headers(name: str) -> dict[str, str]:
    """The headers in the variable `name`, lower-cased names. Raises ValueError, which names the field."""
    if not name:
        return {}
    text = os.environ.get(name)
    if text is None:
        raise ValueError(f"headers_env: {name} is not set in the environment")
    found: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        key, equals, value = part.partition("=")
        key, value = key.strip().lower(), value.strip()
        if not (equals and key and (key + value).isascii() and (key + value).isprintable()):
            raise ValueError(f"headers_env: {name} is not name=value,name=value")
        found[key] = value
    return found
