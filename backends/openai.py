"""A remote OpenAI-compatible server as a backend: vLLM, SGLang, trtllm-serve, llama.cpp and others, over HTTP/1.1."""

import asyncio
import os
import ssl
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from backends.bundle import EVERY_FEATURE, Bundle
from backends.features import Feature
from backends.http1 import Pool, Timing, parse_url, tls_context
from backends.http1_errors import HttpError
from backends.openai_body import choices, fit
from backends.openai_meter import Meter, Source, meter
from backends.openai_probe import ModelCard, Site, engine_of, kinds_of
from backends.openai_stream import EventStream, WholeAnswer, accepted, as_backend_error
from backends.protocol import (
    PATHS,
    BackendError,
    Gauge,
    Kind,
    Limits,
    Plan,
    Prompt,
    Refused,
    Stream,
    Usage,
)

Seconds = Annotated[float, Meta(gt=0)]

_TYPED = frozenset({Kind.RESPONSES, Kind.MESSAGES})
_OURS = frozenset(
    {"host", "authorization", "content-length", "content-type", "transfer-encoding", "connection", "accept"}
)
_RATIO_START = 4.0  # bytes of body per prompt token, before anything was learned
_RATIO_BOUNDS = (1.0, 16.0)
_RATIO_FADE = 0.98


class OpenAI(Struct, tag="openai", tag_field="kind", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[pool.backend]]` that is a remote server.

    `url` is `http[s]://host[:port][/prefix]` or `unix:/path`, without `/v1`. `model` is the server's own name for the
    model, the pool's where it is empty. The key is named, never written here. `features` and `kinds` say what the
    server can do where it does not say so itself. `metrics` is where its load is read: `auto` looks for metrics in
    Prometheus' form, `iterations` is trtllm-serve's `/metrics`, which nobody else may read then.
    """

    name: str
    url: str
    model: str = ""
    api_key_env: str = ""
    api_key_file: str = ""
    ca_file: str = ""
    verify: bool = True
    connect_s: Seconds = 5.0
    first_byte_s: Seconds = 600.0
    idle_s: Seconds = 60.0
    max_connections: Annotated[int, Meta(ge=1)] = 1024
    features: frozenset[Feature] | None = None
    kinds: frozenset[Kind] = frozenset()
    metrics: Source = "auto"
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        try:
            origin = parse_url(self.url)
        except ValueError as error:
            raise ValueError(f"url: {error}") from None
        if origin.scheme != "https" and (self.ca_file or not self.verify):
            raise ValueError(
                f"{'ca_file' if self.ca_file else 'verify'} means nothing for {self.url}, which is not https"
            )
        if self.api_key_env and self.api_key_file:
            raise ValueError("api_key_env and api_key_file are both set: the key can come from one of them")

    async def connect(self, model: str) -> "RemoteEngine":
        """Read what the server runs. Raises BackendLost if it cannot be reached, BackendError if it is not as set."""
        site, authorization = await self._site()
        try:
            return await _connect(self, site, self.model or model, authorization)
        except BaseException:
            site.pool.close()
            raise

    async def models(self) -> list[ModelCard]:
        """What the server lists. Raises BackendLost, BackendError."""
        site, _ = await self._site()
        try:
            return await site.models()
        finally:
            site.pool.close()

    async def _site(self) -> tuple[Site, str]:
        """The server's pages, and the authorization header of every request to it."""
        origin = parse_url(self.url)
        key = await asyncio.to_thread(self._key)
        authorization = f"authorization: Bearer {key}\r\n" if key else ""
        timing = Timing(connect_s=self.connect_s, first_byte_s=self.first_byte_s, idle_s=self.idle_s)
        tls = await asyncio.to_thread(self._tls) if origin.scheme == "https" else None
        return Site(Pool(origin, timing, tls, self.max_connections), authorization), authorization

    def _tls(self) -> ssl.SSLContext:
        try:
            return tls_context(self.ca_file, self.verify)
        except OSError as error:
            raise BackendError(f"{self.name}: ca_file: {self.ca_file}: {error}") from error

    def _key(self) -> str:
        key = ""
        if self.api_key_env:
            key = os.environ.get(self.api_key_env, "").strip()
            if not key:
                raise BackendError(f"{self.name}: api_key_env: {self.api_key_env} is not set in the environment")
        elif self.api_key_file:
            try:
                key = Path(self.api_key_file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise BackendError(f"{self.name}: api_key_file: {error}") from error
            if not key:
                raise BackendError(f"{self.name}: api_key_file: {self.api_key_file} is empty")
        if not (key.isascii() and key.isprintable()):
            raise BackendError(f"{self.name}: the api key holds characters that no header can carry")
        return key


async def list_models(url: str, api_key_env: str = "", api_key_file: str = "", ca_file: str = "") -> list[ModelCard]:
    """What the server at `url` lists. Raises ValueError for a bad URL, BackendLost, BackendError."""
    return await OpenAI(name=url, url=url, api_key_env=api_key_env, api_key_file=api_key_file, ca_file=ca_file).models()


class Call(Struct, frozen=True):
    """A planned request, ready to be written."""

    head: bytes
    body: bytes


class RemoteEngine:
    """A connected server. One event loop; requests share a pool of kept connections.

    Prompt tokens are estimated from the bytes of the body, by a ratio that is learned from the usage in its answers.
    """

    def __init__(self, config: OpenAI, bundle: Bundle, site: Site, authorization: str, about: "About") -> None:
        self.name = config.name
        self.bundle = bundle
        self._site = site
        self._pool = site.pool
        self._about = about
        self._heads = {
            (kind, streamed): _head(self._pool, path, authorization, streamed)
            for kind, path in about.paths.items()
            for streamed in (False, True)
        }
        self._seen_bytes = 1000 * _RATIO_START
        self._seen_tokens = 1000.0

    def __repr__(self) -> str:
        return f"<RemoteEngine {self.name}: {self.bundle.engine} {self.bundle.model}, {self._pool!r}>"

    @property
    def bytes_per_token(self) -> float:
        low, high = _RATIO_BOUNDS
        return min(max(self._seen_bytes / self._seen_tokens, low), high)

    @property
    def pool(self) -> Pool:
        """Its connections, for those who count them."""
        return self._pool

    async def plan(self, prompt: Prompt) -> Plan:
        head = self._heads.get((prompt.kind, prompt.stream))
        if head is None:
            text = f"{self.name} does not serve the {prompt.kind.value} API"
            raise Refused(400, "unsupported_feature", text, "model")
        try:
            body = fit(prompt, self.bundle.model)
        except ValueError as error:
            raise Refused(400, "invalid_request", str(error)) from error
        passed = _forwarded(prompt.headers + prompt.trace)
        return Plan(
            prompt=prompt,
            maker=self.name,
            prompt_tokens=max(1, int(len(prompt.body) / self.bytes_per_token)),
            output_limit=prompt.max_tokens * choices(prompt.body),
            work=Call(b"%b%bcontent-length: %d\r\n\r\n" % (head, passed, len(body)), body),
        )

    async def open(self, plan: Plan) -> Stream:
        prompt, call = plan.prompt, plan.work
        if not isinstance(call, Call):
            raise TypeError(f"{self.name} did not make this plan, or it was closed")
        learn = partial(self._learn, len(prompt.body))
        try:
            asked = await self._pool.ask(call.head, call.body)
            if not prompt.stream:
                return WholeAnswer(asked, learn)
            try:
                answer = await accepted(asked, b"text/event-stream")
            except BaseException:
                asked.release()
                raise
        except HttpError as error:
            raise as_backend_error(error) from error
        typed = prompt.kind in _TYPED
        return EventStream(answer, not prompt.want_usage and not typed, typed, learn)

    async def gauge(self) -> Gauge:
        return await self._about.meter.gauge()

    async def aclose(self) -> None:
        self._pool.close()

    def _learn(self, size_bytes: int, usage: Usage) -> None:
        if usage.prompt_tokens > 0:
            self._seen_bytes = _RATIO_FADE * self._seen_bytes + size_bytes
            self._seen_tokens = _RATIO_FADE * self._seen_tokens + usage.prompt_tokens


class About(Struct, frozen=True):
    """How to use a server: the path of each API, and how its load is read."""

    paths: dict[Kind, str]
    meter: Meter


async def _connect(config: OpenAI, site: Site, upstream: str, authorization: str) -> RemoteEngine:
    cards = await site.models()
    card = next((one for one in cards if one.id == upstream), None)
    if card is None:
        listed = ", ".join(one.id for one in cards[:8]) or "nothing"
        raise BackendError(f"{config.name}: {config.url} does not list {upstream!r}, but {listed}")
    paths = kinds_of(await site.paths())
    if config.kinds:
        paths = {kind: paths.get(kind, PATHS[kind]) for kind in config.kinds}
    about = About(paths, await meter(site, config.metrics, card.owner))
    bundle = Bundle(
        engine=about.meter.engine or engine_of(card.owner),
        engine_version=await site.version(),
        model=upstream,
        context_tokens=card.context_tokens,
        max_running=config.limits.max_running or about.meter.max_running,
        kv_tokens=config.limits.kv_tokens or about.meter.kv_tokens,
        features=frozenset({EVERY_FEATURE}) if config.features is None else frozenset(config.features),
        kinds=frozenset(kind.value for kind in paths),
    )
    return RemoteEngine(config, bundle, site, authorization, about)


def _head(pool: Pool, path: str, authorization: str, streamed: bool) -> bytes:
    origin = pool.origin
    accept = "text/event-stream" if streamed else "application/json"
    return (
        f"POST {origin.prefix}{path} HTTP/1.1\r\nhost: {origin.authority}\r\n{authorization}"
        f"user-agent: signalbox\r\ncontent-type: application/json\r\naccept: {accept}\r\n"
    ).encode()


def _forwarded(headers: tuple[tuple[str, str], ...]) -> bytes:
    """The client's headers that go on; never ours, and none that could end a line."""
    kept = [pair for pair in headers if pair[1] and pair[0] not in _OURS]
    whole = "".join([name + value for name, value in kept])
    if not (whole.isascii() and whole.isprintable()):
        kept = [(name, value) for name, value in kept if (both := name + value).isascii() and both.isprintable()]
    return "".join([f"{name}: {value}\r\n" for name, value in kept]).encode()
