"""The access log: one JSON line per request, at its end, written by a thread in batches."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct, field

from backends.protocol import PATHS, Kind
from gateway.clock import wall
from gateway.telemetry.outbox import Outbox
from gateway.telemetry.phases import faulty, phases

if TYPE_CHECKING:
    from gateway.exchange import Exchange

MOST_BODY_BYTES = 64 * 1024

_encode = msgspec.json.Encoder().encode
_FIELDS = {name: f"{name}_ms" for name in ("validate", "admit", "queue", "prefill", "decode")}
_MESSAGES = {kind: f"POST {PATHS[kind]}" for kind in Kind}


class Line(Struct, omit_defaults=True, gc=False):
    """What stands in a line, in this order; what is empty or zero is left out."""

    time: str
    level: str
    logger: str
    message: str
    request_id: str = ""
    trace_id: str = ""
    outcome: str = ""
    reason: str = ""
    status: int = 0
    tenant: str = ""
    service: str = field(name="class", default="")
    model: str = ""
    backend: str = ""
    stream: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    retries: int = 0
    total_ms: float = 0.0
    validate_ms: float = 0.0
    admit_ms: float = 0.0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    body: Any = msgspec.UNSET


class AccessLog:
    """Writes lines into an outbox. Request bodies only where `bodies` is set."""

    def __init__(self, which: Literal["all", "failed"], bodies: bool, outbox: Outbox) -> None:
        self._all, self._bodies, self._outbox = which == "all", bodies, outbox
        self._second, self._prefix = 0, ""

    def __repr__(self) -> str:
        return f"<AccessLog {self._outbox!r}>"

    def ended(self, exchange: "Exchange") -> None:
        if self._all or exchange.refusal is not None:
            self._outbox.offer(_encode(self._line(exchange)) + b"\n")

    def stopped(self, exchange: "Exchange") -> None:
        """Its line has been written."""

    def _line(self, x: "Exchange") -> Line:
        job, member, tenant, refusal = x.job, x.member, x.tenant, x.refusal
        line = Line(self._time(wall()), "warning" if faulty(x) else "info", "signalbox.access", _MESSAGES[x.api])
        line.request_id, line.outcome, line.status = x.request_id, x.state.value, x.status
        line.total_ms = int((x.ended_at - x.received_at) * 1e6) / 1e3
        if tenant is not None:
            line.tenant = tenant.name
        if refusal is not None:
            line.reason = refusal.reason.value
        if x.trace is not None:
            line.trace_id = x.trace.trace_id
        if job is None:
            return line
        line.service, line.model, line.stream = job.service.name, job.pool.model, job.prompt.stream
        if x.trace is None and job.prompt.trace:
            line.trace_id = job.prompt.trace[0][1][3:35]
        if member is not None:
            line.backend = member.config.name
        if x.started_at:
            usage = x.usage_so_far()
            line.prompt_tokens, line.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            line.cached_tokens = usage.cached_tokens
        if x.failed:
            line.retries = len(x.failed)
        _take_times(line, x)
        if self._bodies:
            line.body = _body(job.prompt.body)
        return line

    def _time(self, at: float) -> str:
        """As in every other line of the log; the part that holds for a second is kept."""
        second = int(at)
        if second != self._second:
            self._second = second
            self._prefix = datetime.fromtimestamp(second, UTC).isoformat()[:19]
        return f"{self._prefix}.{int((at - second) * 1000):03d}+00:00"


def _take_times(line: Line, x: "Exchange") -> None:
    """All attempts together. Microseconds are exact enough."""
    names, times = phases(x)
    took = dict.fromkeys(names, 0.0)
    for nth, name in enumerate(names):
        took[name] += times[nth + 1] - times[nth]
    took.pop("cancel", 0.0)
    for name, seconds in took.items():
        setattr(line, _FIELDS[name], int(seconds * 1e6) / 1e3)


def _body(body: bytes) -> Any:
    """What it says; of a long one, or one that is no JSON, its beginning as a text."""
    try:
        if len(body) <= MOST_BODY_BYTES:
            return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return body[:MOST_BODY_BYTES].decode(errors="replace")
