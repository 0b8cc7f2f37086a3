"""The ASGI object that a route hands back: reads the request, runs its exchange, writes the answer.

It writes the response itself, since a framework's streaming response may never run its clean-up after a disconnect.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from litestar.types import Receive, Scope, Send

from backends.protocol import Chunk, Kind, Prompt
from gateway.clock import now
from gateway.exchange import Exchange
from gateway.http import errors, wire
from gateway.http.line import AsgiLine, Header, Line
from gateway.job import Failed, Job
from gateway.telemetry.context import log_fields
from gateway.telemetry.phases import server_timing
from gateway.tenants import Tenant
from gateway.trunk import Trunk
from policies.reasons import Reason, Refusal
from policies.types import ServiceClass

log = logging.getLogger(__name__)

LINGER_S = 5.0  # how long a client that is refused may go on sending before its connection is closed
WATCH_AFTER_S = 0.03  # most short requests end before they need a watcher
_JSON = (b"content-type", b"application/json")
_SSE = (b"content-type", b"text/event-stream; charset=utf-8")
_NO_CACHE = (b"cache-control", b"no-cache")
_KEEP_ALIVE = b": keep-alive\n\n"
_GONE = Refusal(Reason.CLIENT_GONE, "the client went away")
_STALLED = Refusal(Reason.CLIENT_GONE, "the client did not read its answer")
_EXPIRED = Refusal(Reason.EXPIRED, "the deadline passed")
_TOO_SLOW = Refusal(Reason.TOO_SLOW, "the request body did not arrive in time")


class Relay:
    """What the handler of one API returns. Stateless; each call is a request."""

    def __init__(self, trunk: Trunk, kind: Kind) -> None:
        self.trunk, self.kind = trunk, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        task = asyncio.current_task()
        assert task is not None
        request = _Request(self.trunk, self.kind, AsgiLine(scope, receive, send))
        request.begin(task)
        await request.run()

    def serve(self, line: Line) -> None:
        """Answer what comes over this line, in a task of its own. It is cut when the trunk ends."""
        request = _Request(self.trunk, self.kind, line)
        request.begin(asyncio.get_running_loop().create_task(request.run()))


class _Request:
    """One request on the wire. `tick` and `cut` come from outside its task; the rest runs in it."""

    __slots__ = (
        "_body_by",
        "_keep_alive_s",
        "_kind",
        "_line",
        "_pinging",
        "_reading",
        "_request_id",
        "_sending_since",
        "_sent_at",
        "_service",
        "_started",
        "_stopped",
        "_streams",
        "_task",
        "_trunk",
        "_watch_from",
        "_watcher",
        "exchange",
    )

    def __init__(self, trunk: Trunk, kind: Kind, line: Line) -> None:
        self._trunk, self._kind, self._line = trunk, kind, line
        self.exchange = Exchange(trunk, now())
        self.exchange.api = kind
        self._request_id = ""
        self._service: ServiceClass | None = None
        self._stopped: Refusal | None = None  # why it was cut, once it was
        self._started = False  # the response's head is out
        self._streams = False
        self._reading = True
        self._keep_alive_s = 0.0
        self._sending_since = self._sent_at = 0.0
        self._watcher: asyncio.Task[None] | None = None
        self._pinging: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Request {self._request_id or 'unread'} {self.exchange!r}>"

    def begin(self, task: asyncio.Task[None]) -> None:
        """From now on it is looked at; `task` is where `run` runs."""
        self._task = task
        received = self.exchange.received_at
        self._body_by, self._watch_from = received + self._trunk.config.server.body_s, received + WATCH_AFTER_S
        self._trunk.ticker.add(self)

    async def run(self) -> None:
        refusal: Refusal | None = Refusal(Reason.INTERNAL, "an error inside the gateway")
        try:
            refusal = await self._guarded()
        except asyncio.CancelledError:
            refusal = self._stopped or _GONE
            if refusal is not _STALLED:
                raise
            self._task.uncancel()
        finally:
            self.exchange.finish(refusal)
            self._trunk.ticker.discard(self)
            self._line.hang_up()
            for helper in (self._watcher, self._pinging):
                if helper is not None:
                    helper.cancel()

    async def _guarded(self) -> Refusal | None:
        """The answer, or the reason why there is none, told to the client if it is still there."""
        try:
            job = self._job(*await self._received())
            self._streams = job.prompt.stream
            if self._streams:
                self._keep_alive_s = job.service.keep_alive_s
            chunk = await self.exchange.first(job)
            await (self._pump(chunk) if self._streams else self._join(chunk))
        except wire.Malformed as error:
            failed = Failed(error.refusal)
        except Failed as error:
            failed = error
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
            self._task.uncancel()
            failed = Failed(self._stopped)
        except Exception:
            fields = log_fields(self._request_id, self.exchange.trace)
            log.exception("a request failed inside the gateway", extra=fields)
            failed = Failed(Refusal(Reason.INTERNAL, "an error inside the gateway"))
        else:
            return None
        if failed.refusal.reason is not Reason.CLIENT_GONE:
            await self._say_no(failed)
        return failed.refusal

    # -- seen from outside the task ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Start what late requests need, and end what is over time."""
        if self._reading:
            if now > self._body_by:
                self.cut(_TOO_SLOW)
            return
        if self._watcher is None and now > self._watch_from:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())
        if (end_by := self.exchange.end_by) and now > end_by:
            self.cut(_EXPIRED)
        if self._sending_since and now - self._sending_since > self._stall_s():
            self._stopped = _STALLED
            self._line.abort()
            self._task.cancel()
        elif self._keep_alive_s and self._pinging is None and not self._sending_since:
            last = self._sent_at or self.exchange.received_at
            if now - last > self._keep_alive_s:
                self._pinging = asyncio.get_running_loop().create_task(self._ping())

    def cut(self, refusal: Refusal) -> None:
        """End early, for this reason; the first one stands."""
        if self._stopped is None:
            self._stopped = refusal
            self._task.cancel()

    def _stall_s(self) -> float:
        """How long one write may take; the last words of a request that is cut get a second."""
        return 1.0 if self._stopped else self._trunk.config.server.stall_s

    async def _watch(self) -> None:
        await self._line.gone()
        self.cut(_GONE)

    async def _ping(self) -> None:
        """A comment through a silence, for proxies that close idle connections. Gives up the honest status."""
        if not self._started:
            self._start(200, [_SSE, _NO_CACHE])
        await self._write(_KEEP_ALIVE)
        self._pinging = None

    # -- request in -------------------------------------------------------------------------------------------------

    async def _received(self) -> tuple[Tenant, dict[bytes, bytes], bytes]:
        """Who asks, the headers and the body. Raises Failed."""
        headers = dict(self._line.headers)
        self._request_id = self.exchange.request_id = wire.request_id(headers.get(b"x-request-id"))
        if (sampler := self._trunk.trace_sampler) is not None:
            self.exchange.trace = sampler.begin(headers)
        tenant = self.exchange.tenant = self._authenticate(headers)
        if self._trunk.draining:
            raise Failed(Refusal(Reason.DRAINING, "the gateway is shutting down"))
        return tenant, headers, await self._body(headers)

    def _authenticate(self, headers: Mapping[bytes, bytes]) -> Tenant:
        tenant = self._trunk.tenants.of(headers.get(b"authorization"))
        if tenant is None and (key := headers.get(b"x-api-key")) is not None:
            tenant = self._trunk.tenants.of_key(key)
        if tenant is None:
            what = "a key is needed: Authorization: Bearer KEY" if b"authorization" not in headers else "unknown key"
            raise Failed(Refusal(Reason.UNAUTHENTICATED, what))
        return tenant

    async def _body(self, headers: Mapping[bytes, bytes]) -> bytes:
        limit = self._trunk.config.server.max_body_bytes
        _check_media(headers)
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        while True:
            if (read := await self._line.read()) is None:
                raise Failed(_GONE)
            part, self._reading = read
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            if not parts and not self._reading:
                return part
            parts.append(part)
            if not self._reading:
                return b"".join(parts)

    def _job(self, tenant: Tenant, headers: Mapping[bytes, bytes], body: bytes) -> Job:
        seen = wire.peek(body)
        pool = self._trunk.names.get(seen.model)
        if pool is None:
            raise Failed(Refusal(Reason.UNKNOWN_MODEL, f"the model {seen.model!r} does not exist", "model"))
        if not tenant.may_use(pool.model):
            raise Failed(Refusal(Reason.FORBIDDEN, f"{tenant.name} may not use the model {seen.model!r}", "model"))
        asked = wire.service_class(
            seen, headers.get(b"x-priority-class"), self._trunk.classes, self._trunk.default_class
        )
        service = asked if asked.rank >= tenant.rank else self._trunk.class_of_rank(tenant.rank)
        self._service = service
        goal = wire.objective(service, headers)
        if seen.model != pool.model:
            body = wire.with_model(body, pool.model)
        first_by, end_by = wire.due(goal, self.exchange.received_at)
        has_stream_options = bool(seen.stream_options)
        prompt = Prompt(
            kind=self._kind,
            model=pool.model,
            body=body,
            stream=bool(seen.stream) and self._kind in wire.KINDS_THAT_STREAM,
            want_usage=has_stream_options and wire.wants_usage(seen),
            has_stream_options=has_stream_options,
            max_tokens=wire.output_limit(seen),
            tpot_ms=goal.tpot_ms,
            request_id=self._request_id,
            rank=service.rank,
            headers=(("x-request-id", self._request_id),),
            trace=self._trace(headers),
        )
        wanted = {} if pool.every_feature else wire.features(body)
        known = wire.identity(self._kind, headers, body) if b"idempotency-key" in headers else ""
        again = b"x-stainless-retry-count" in headers and wire.comes_again(headers)
        return Job(tenant, service, pool, prompt, wanted, first_by, end_by, goal.tpot_ms, known, again)

    def _trace(self, headers: Mapping[bytes, bytes]) -> tuple[tuple[str, str], ...]:
        """What the engine is told: our place in the trace, the client's where nothing is traced here."""
        if self.exchange.trace is not None:
            return self.exchange.trace.headers()
        return wire.trace(headers) if b"traceparent" in headers else ()

    # -- answer out -------------------------------------------------------------------------------------------------

    async def _pump(self, chunk: Chunk | None) -> None:
        """Engine chunk to socket, one write each. A reader that is too slow holds the engine's pipe, then is cut."""
        if not self._started:
            self._start(200, [_SSE, _NO_CACHE])
        while chunk is not None and not chunk.last:
            if chunk.data:
                await self._write(chunk.data)
            chunk = await self.exchange.next()
        self.exchange.engine_done()
        await self._write(chunk.data if chunk is not None else b"", more=False)

    async def _join(self, chunk: Chunk | None) -> None:
        parts: list[bytes] = []
        while chunk is not None:
            parts.append(chunk.data)
            chunk = None if chunk.last else await self.exchange.next()
        self.exchange.engine_done()
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._start(200, [_JSON], len(body))
        await self._write(body, more=False)

    async def _say_no(self, failed: Failed) -> None:
        """The refusal with its honest status, or as the last event of a stream that has begun."""
        refusal = failed.refusal
        self._keep_alive_s = 0.0
        self._stopped = self._stopped or refusal  # no second cut while this is said
        if self._started:
            if self._streams:
                await self._write(errors.terminal_event(self._kind, refusal, self.exchange.usage_so_far()), more=False)
            return
        body = failed.body or errors.body_of(self._kind, refusal)
        status = failed.status or errors.STATUS[refusal.reason]
        told = errors.headers_of(refusal, self.exchange.invites(refusal))
        self._start(status, [_JSON, *told], len(body), refusal.reason in _UNREAD)
        lingers = self._reading and refusal.reason in _UNREAD and refusal.reason is not Reason.TOO_SLOW
        await self._write(body, more=lingers)
        if lingers:
            await self._linger()
            await self._write(b"", more=False)

    async def _linger(self) -> None:
        """Take in for a moment what is still sent: else the client reads a reset, not the refusal, and tries again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(LINGER_S, max(0.0, self._body_by - now()))):
                while (read := await self._line.read()) is not None and read[1]:
                    pass

    def _start(self, status: int, headers: list[Header], length: int = -1, close: bool = False) -> None:
        self._started = True
        self.exchange.status = status
        headers.append((b"x-request-id", self._request_id.encode()))
        if self._service is not None:
            headers.append((b"x-signalbox-class", self._service.name.encode()))
            headers.append((b"server-timing", server_timing(self.exchange, now())))
        if self.exchange.quota is not None:
            headers.extend(errors.quota_headers(self.exchange.quota))
        self._line.start(status, headers, length, close)

    async def _write(self, data: bytes, more: bool = True) -> None:
        line = self._line
        line.write(data, more)
        if self._keep_alive_s:
            self._sent_at = now()
        if line.full:
            self._sending_since = now()
            await line.drain()
            self._sending_since = 0.0


_UNREAD = frozenset({Reason.TOO_LARGE, Reason.TOO_SLOW, Reason.UNSUPPORTED_MEDIA_TYPE, Reason.UNAUTHENTICATED})
"""Reasons after which a part of the body may still be under way: the connection is not used again."""


def _too_large(limit: int) -> Failed:
    return Failed(Refusal(Reason.TOO_LARGE, f"the body is larger than {limit} bytes"))


def _check_media(headers: Mapping[bytes, bytes]) -> None:
    media = headers.get(b"content-type", b"application/json")
    if media != b"application/json" and media.split(b";", 1)[0].strip().lower() != b"application/json":
        what = "content-type: application/json is needed"
        raise Failed(Refusal(Reason.UNSUPPORTED_MEDIA_TYPE, what, "content-type"))
    coding = headers.get(b"content-encoding")
    if coding is not None and coding.strip().lower() != b"identity":
        what = "a compressed body is not accepted"
        raise Failed(Refusal(Reason.UNSUPPORTED_MEDIA_TYPE, what, "content-encoding"))
