"""A Triton server with TensorRT-LLM: what `kind = "triton"` in the configuration means. gRPC comes when it connects."""

import asyncio
import importlib.util
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from backends.protocol import Backend, BackendError, Limits

if TYPE_CHECKING:
    from backends.triton_layout import Dialect

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
GrpcHeader = Annotated[str, Meta(pattern=r"^[a-z0-9_.-]{1,128}\Z")]
Value = Annotated[str, Meta(pattern=r"^[!-~](?:[ -~]*[!-~])?\Z", max_length=4_096)]
NO_METRICS = "off"


class Triton(Struct, tag="triton", tag_field="kind", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[pool.backend]]` that is a Triton server. Dialect and model are found out where they are not set.

    `url` is `grpc[s]://host[:port]` or `unix:/path`. `tokenizer` is a folder with the model's tokenizer files: with it
    chats are templated and, in the token dialect, turned into ids here. `engine_config` is a copy of the engine's
    config.json, or of model.yaml. `metrics_url` empty is port 8002 of the same host, `off` is none. The key goes as
    `api_key_header`, for `authorization` with `Bearer` in front; `metadata` goes with every call, too. `llmapi_text` is
    what a streamed response of the LLM API holds: all text so far, or what is new. 0 for `total_s` and `canary_s` is
    never.
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    url: str
    model: str = ""
    dialect: Literal["", "inflight-tokens", "inflight-ensemble", "llmapi"] = ""
    tokenizer: str = ""
    tools: Literal["", "hermes"] = ""
    logprobs: bool = False
    llmapi_text: Literal["cumulative", "delta"] = "cumulative"
    context_tokens: Annotated[int, Meta(ge=0)] = 0
    default_output_tokens: Annotated[int, Meta(ge=0)] = 0
    engine_config: str = ""
    metrics_url: str = ""
    metadata: dict[GrpcHeader, Value] = {}
    api_key_env: str = ""
    api_key_file: str = ""
    api_key_header: GrpcHeader = "authorization"
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    connect_s: Seconds = 5.0
    first_token_s: Seconds = 60.0
    token_s: Seconds = 15.0
    total_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    canary_s: Annotated[float, Meta(ge=0, le=86_400)] = 5.0
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        target(self.url)
        if self.api_key_env and self.api_key_file:
            raise ValueError("api_key_env and api_key_file are both set: the key can come from one of them")
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file and key_file belong together: one of them is missing")
        if (self.ca_file or self.cert_file) and not self.url.startswith("grpcs:"):
            raise ValueError(f"{'ca_file' if self.ca_file else 'cert_file'} means nothing for {self.url}: use grpcs://")
        for name in (*self.metadata, self.api_key_header):
            if name.startswith("grpc-") or name.endswith("-bin"):
                raise ValueError(f"metadata: {name} is one of gRPC's own names")
        if self.dialect == "inflight-tokens" and not self.tokenizer:
            raise ValueError("dialect inflight-tokens needs a tokenizer: the folder with the model's tokenizer files")

    async def connect(self, model: str) -> Backend:
        """The engine, once it has answered a one-token request.

        Raises ValueError where this configuration can never work, BackendLost where the server or its model is not
        there, BackendError where it is not as set.
        """
        connect = await asyncio.to_thread(self._ready)
        return await connect(self, model)

    def _ready(self) -> Callable[["Triton", str], Awaitable[Backend]]:
        check_installed()
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it writes to stderr itself, past all logging
        from backends.triton_connect import connect  # noqa: PLC0415 - needs tritonclient

        return connect

    @property
    def wanted(self) -> "Dialect | None":
        """The dialect that is set, None where it is to be found out. Needs the client library."""
        from backends.triton_layout import Dialect  # noqa: PLC0415 - needs tritonclient

        return Dialect(self.dialect) if self.dialect else None

    def secret(self) -> tuple[tuple[str, str], ...]:
        """The key as metadata. Blocks: reads a file. Raises BackendError where it is named and not there."""
        key, source = "", ""
        if self.api_key_env:
            source, key = "api_key_env", os.environ.get(self.api_key_env, "").strip()
        elif self.api_key_file:
            source, key = "api_key_file", _read(self, "api_key_file").decode("utf-8", "replace").strip()
        if not source:
            return ()
        if not key:
            raise BackendError(f"{self.name}: {source}: there is no key in {self.api_key_env or self.api_key_file}")
        if not (key.isascii() and key.isprintable()):
            raise BackendError(f"{self.name}: the api key holds characters that no header can carry")
        return ((self.api_key_header, f"Bearer {key}" if self.api_key_header == "authorization" else key),)

    def certificates(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Authorities, our key and our certificate, in PEM. Blocks. Raises BackendError where a file is not there."""
        names = ("ca_file", "key_file", "cert_file")
        found = [_read(self, name) if getattr(self, name) else None for name in names]
        return found[0], found[1], found[2]

    @property
    def metrics_page(self) -> str:
        """Where its metrics are, empty where they are not wanted or nowhere to be guessed."""
        if self.metrics_url:
            return "" if self.metrics_url == NO_METRICS else self.metrics_url
        if self.url.startswith("unix:"):
            return ""
        host = urlsplit(self.url).hostname or ""
        return f"http://[{host}]:8002/metrics" if ":" in host else f"http://{host}:8002/metrics"


def check_installed() -> None:
    """Raises ValueError where the client library is not there."""
    for package, top in (("tritonclient", "tritonclient"), ("grpcio", "grpc"), ("protobuf", "google.protobuf")):
        try:
            found = importlib.util.find_spec(top)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ValueError(
                f"kind = 'triton' needs {package}, which is not installed in this environment: "
                "pip install 'signalbox-gateway[triton]'"
            )


def target(url: str) -> str:
    """gRPC's name for the server at `url`. Raises ValueError."""
    if url.startswith("unix:"):
        path = url.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise ValueError(f"url: {url!r}: a unix URL is unix:/path/to/socket")
        return f"unix:{path}"
    parts = urlsplit(url)
    if parts.scheme not in ("grpc", "grpcs") or not parts.hostname:
        raise ValueError(f"url: {url!r} is not grpc://host:port, grpcs://host:port or unix:/path")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"url: {url!r} is more than host and port")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"url: {url!r}: {error}") from None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port or 8001}"


def _read(config: Triton, name: str) -> bytes:
    try:
        return Path(getattr(config, name)).expanduser().read_bytes()
    except OSError as error:
        raise BackendError(f"{config.name}: {name}: {error}") from error
