"""The spans of one request, made at its end from its recorded times, as the bytes that OTLP carries.

Names and attributes follow OpenTelemetry's semantic conventions for HTTP servers and generative AI; what they have no
word for is `signalbox.*`. The SDK's span objects would cost more than the request itself (docs/decisions/0008).
"""

import random
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from backends.bundle import Bundle
from backends.protocol import PATHS, Kind
from gateway.pool import Member
from gateway.telemetry.context import Context
from gateway.telemetry.phases import BEFORE_QUEUE, faulty, phases
from gateway.telemetry.protobuf import (
    BYTES,
    FIXED32,
    FIXED64,
    KEPT,
    VARINT,
    attribute,
    block,
    fixed32,
    fixed64,
    real_attribute,
    tag,
    text,
    text_attribute,
    varint,
    whole_attribute,
)

if TYPE_CHECKING:
    from gateway.exchange import Exchange

# Fields of opentelemetry.proto.trace.v1: ScopeSpans, Span, Event, Link, Status.
SPANS = tag(2, BYTES)
TRACE_ID, SPAN_ID, PARENT_ID = tag(1, BYTES) + b"\x10", tag(2, BYTES) + b"\x08", tag(4, BYTES) + b"\x08"
STATE, NAME, ATTRIBUTE, EVENT, LINK, STATUS = 3, 5, 9, 11, 13, 15
KIND, START, END, FLAGS = tag(6, VARINT), tag(7, FIXED64), tag(8, FIXED64), tag(16, FIXED32)
INTERNAL, SERVER = b"\x01", b"\x02"
ERROR = block(STATUS, tag(3, VARINT) + b"\x02")
LOCAL_PARENT, REMOTE_PARENT = 0x100, 0x300  # of `flags`; the low byte is that of the trace context

ERROR_TYPE = "error.type"
OPERATIONS = {
    Kind.CHAT: "chat",
    Kind.COMPLETION: "text_completion",
    Kind.RESPONSES: "chat",
    Kind.MESSAGES: "chat",
    Kind.EMBEDDINGS: "embeddings",
    Kind.TOKENIZE: "tokenize",
}

_input_tokens = whole_attribute(ATTRIBUTE, "gen_ai.usage.input_tokens")
_output_tokens = whole_attribute(ATTRIBUTE, "gen_ai.usage.output_tokens")
_cached_tokens = whole_attribute(ATTRIBUTE, "gen_ai.usage.cache_read.input_tokens")
_max_tokens = whole_attribute(ATTRIBUTE, "gen_ai.request.max_tokens")
_first_chunk_s = real_attribute(ATTRIBUTE, "gen_ai.response.time_to_first_chunk")
_planned_tokens = whole_attribute(ATTRIBUTE, "signalbox.prompt_tokens")
_slack_ms = real_attribute(ATTRIBUTE, "signalbox.deadline.slack_ms")
_retries = whole_attribute(ATTRIBUTE, "signalbox.retries")
_request_id = text_attribute(ATTRIBUTE, "signalbox.request_id")


class Runs(NamedTuple):
    """What a backend runs, as attributes say it."""

    backend: str = ""
    engine: str = ""
    model: str = ""
    bundle: str = ""


class Common(NamedTuple):
    """What many server spans have in common; also the key to their bytes."""

    scheme: str
    api: Kind
    tenant: str
    status: int
    outcome: str
    reason: str
    faulty: bool
    kept: str
    stream: bool = False
    service: str = ""
    model: str = ""
    runs: Runs = Runs()


class Family(NamedTuple):
    """What the spans under many server spans have in common. `failed` are the backends that did, and how."""

    names: tuple[str, ...]
    backend: str
    reason: str
    faulty: bool
    failed: tuple[tuple[str, str], ...]
    flags: int
    state: str


class Spans:
    """Writes spans. `scheme` is what clients reach the gateway by, http or https."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._known: dict[Member, tuple[Bundle | None, Runs]] = {}

    def of(self, x: "Exchange", context: Context, kept: str, offset_s: float) -> bytes:
        """All spans of an ended exchange, as fields of a `ScopeSpans`. `offset_s` turns the loop's time into unix time.

        `kept` is the rule that kept an unsampled one.
        """
        names, times = phases(x)
        common = self._common(x, kept)
        failed = tuple([(one.backend, one.error) for one in x.failed]) if x.failed else ()
        family = Family(names, common.runs.backend, common.reason, common.faulty, failed, context.flags, context.state)
        trace, server = bytes.fromhex(context.trace_id), bytes.fromhex(context.span_id)
        at = [fixed64(int((one + offset_s) * 1e9)) for one in times]
        ids = random.getrandbits(64 * len(names)).to_bytes(8 * len(names), "little")
        values: list[bytes] = []
        before = b""
        for nth, name in enumerate(names):
            span = ids[8 * nth : 8 * nth + 8]
            values += (trace, span, server, at[nth], at[nth + 1])
            if name == "queue" and nth > len(BEFORE_QUEUE):
                values += (trace, before)
            before = span
        children = _family(family) if not family.state else _family.__wrapped__(family)
        return self._server(x, context, common, at) + children % tuple(values)

    def _server(self, x: "Exchange", context: Context, common: Common, at: list[bytes]) -> bytes:
        parts = [TRACE_ID, bytes.fromhex(context.trace_id), SPAN_ID, bytes.fromhex(context.span_id)]
        if context.state:
            parts.append(text(STATE, context.state))
        if context.parent_id:
            parts += (PARENT_ID, bytes.fromhex(context.parent_id), FLAGS, fixed32(context.flags | REMOTE_PARENT))
        else:
            parts += (FLAGS, fixed32(context.flags | LOCAL_PARENT))
        parts += (START, at[0], END, at[-1], _shared(common), _request_id(x.request_id))
        _add_numbers(parts, x)
        for nth, attempt in enumerate(x.failed):
            parts.append(_retry(at[len(BEFORE_QUEUE) + 2 * nth + 2], attempt.backend, attempt.error))
        body = b"".join(parts)
        return b"%b%b%b" % (SPANS, varint(len(body)), body)

    def _common(self, x: "Exchange", kept: str) -> Common:
        job, member, tenant = x.job, x.member, x.tenant
        name = tenant.name if tenant is not None else ""
        reason = x.refusal.reason.value if x.refusal is not None else ""
        if job is None:
            return Common(self._scheme, x.api, name, x.status, x.state.value, reason, faulty(x), kept)
        return Common(
            self._scheme, x.api, name, x.status, x.state.value, reason, faulty(x), kept,
            job.prompt.stream, job.service.name, job.pool.model, self._runs(member) if member is not None else Runs(),
        )  # fmt: skip

    def _runs(self, member: Member) -> Runs:
        """What runs on it, or ran when it was last up."""
        known = self._known.get(member)
        bundle = member.backend.bundle if member.backend is not None else None
        if known is None or (bundle is not None and known[0] is not bundle):
            known = self._known[member] = (bundle, _runs(member.config.name, bundle))
        return known[1]


def _runs(name: str, bundle: Bundle | None) -> Runs:
    if bundle is None:
        return Runs(name)
    words = (bundle.engine, bundle.engine_version, bundle.model, bundle.revision, bundle.precision, bundle.quantization)
    return Runs(name, bundle.engine, bundle.model, " ".join(filter(None, words)))


@lru_cache(KEPT)
def _shared(one: Common) -> bytes:
    """Of a server span: name, kind, status, and the attributes in common."""
    path, runs = PATHS[one.api], one.runs
    values: dict[str, str | int | bool] = {
        "http.request.method": "POST",
        "http.route": path,
        "url.path": path,
        "url.scheme": one.scheme,
        "http.response.status_code": one.status,
        ERROR_TYPE: one.reason,
        "gen_ai.operation.name": OPERATIONS[one.api],
        "gen_ai.provider.name": runs.engine,
        "gen_ai.request.model": one.model,
        "gen_ai.response.model": runs.model,
        "signalbox.tenant": one.tenant,
        "signalbox.class": one.service,
        "signalbox.backend": runs.backend,
        "signalbox.bundle": runs.bundle,
        "signalbox.outcome": one.outcome,
        "signalbox.reason": one.reason,
        "signalbox.kept": one.kept,
    }
    parts = [attribute(ATTRIBUTE, name, value) for name, value in values.items() if value]
    if one.model:
        parts.append(attribute(ATTRIBUTE, "gen_ai.request.stream", one.stream))
    return b"".join([text(NAME, f"POST {path}"), KIND, SERVER, *parts, ERROR if one.faulty else b""])


def _add_numbers(parts: list[bytes], x: "Exchange") -> None:
    job, plan = x.job, x.plan
    if job is None:
        return
    if job.prompt.max_tokens:
        parts.append(_max_tokens(job.prompt.max_tokens))
    if job.first_by:
        parts.append(_slack_ms((job.first_by - (x.started_at or x.ended_at)) * 1000))
    if plan is not None:
        parts.append(_planned_tokens(plan.prompt_tokens))
    if x.started_at:
        usage = x.usage_so_far()
        parts += (_input_tokens(usage.prompt_tokens), _output_tokens(usage.completion_tokens))
        if usage.cached_tokens:
            parts.append(_cached_tokens(usage.cached_tokens))
        if job.prompt.stream:
            parts.append(_first_chunk_s(x.started_at - x.received_at))
    if x.failed:
        parts.append(_retries(len(x.failed)))


def _retry(at: bytes, backend: str, error: str) -> bytes:
    """The event of an attempt that failed, on the server span."""
    what = attribute(3, "signalbox.backend", backend) + attribute(3, ERROR_TYPE, error)
    return block(EVENT, tag(1, FIXED64) + at + text(2, "signalbox.retry") + what)


@lru_cache(KEPT)
def _family(one: Family) -> bytes:
    """The spans under a server span, with `%b` for what differs: trace, own and parent's id, start and end; of a queue
    after the first then the trace and the id of the `prefill` that failed before it, which it links to."""
    out = []
    prefills, last = 0, len(one.names) - 1 - (one.names[-1] == "cancel")
    everyone = (text(STATE, one.state) if one.state else b"") + FLAGS + fixed32(one.flags | LOCAL_PARENT)
    for nth, name in enumerate(one.names):
        parts = [text(NAME, name), KIND, INTERNAL, everyone]
        error = ""
        if name in ("prefill", "decode"):
            backend, error = one.failed[prefills] if prefills < len(one.failed) else (one.backend, "")
            prefills += 1
            parts.append(attribute(ATTRIBUTE, "signalbox.backend", backend))
        if nth == last:
            error = error or one.reason
        if error:
            parts.append(attribute(ATTRIBUTE, ERROR_TYPE, error))
        if error and (one.faulty or nth != last):
            parts.append(ERROR)
        holes: list[bytes | int] = [TRACE_ID, 16, SPAN_ID, 8, PARENT_ID, 8, START, 8, END, 8, b"".join(parts)]
        if name == "queue" and nth > len(BEFORE_QUEUE):
            link = attribute(4, "signalbox.link", "retry")
            size = len(TRACE_ID) + 16 + len(SPAN_ID) + 8 + len(link)
            holes += [tag(LINK, BYTES) + varint(size) + TRACE_ID, 16, SPAN_ID, 8, link]
        size = sum(part if isinstance(part, int) else len(part) for part in holes)
        out += [SPANS + varint(size), *holes]
    return b"".join([b"%b" if isinstance(part, int) else part.replace(b"%", b"%%") for part in out])
