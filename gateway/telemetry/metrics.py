"""What happens to requests, in numbers: one object of cells per label set, found once per request.

Everything comes from the times and counts that an exchange keeps anyway, when it ends; nothing is done per chunk.
"""

from bisect import bisect_left
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from backends.protocol import Kind
from gateway.telemetry.metrics_sheet import Board, Cells
from gateway.telemetry.metrics_table import (
    BY_NAME,
    DURATION_S,
    FIRST_TOKEN_S,
    OFF_BY,
    PER_TOKEN_S,
    STATE_S,
    STOP_S,
    TOKENS,
    TURN_EVENTS,
    TURN_S,
)
from policies.lifecycle import State
from policies.reasons import Reason

if TYPE_CHECKING:
    from gateway.exchange import Exchange
    from gateway.job import Job

OK = "ok"
"""As a reason: a whole answer."""
NONE = "none"
"""As a label: the request ended before that was known."""
OTHER = "other"
"""As a tenant: one of those beyond the first so many."""
FAILURES = {"BackendBusy": "busy", "BackendError": "error"}
"""What an attempt came to, by its error; any other means that the backend was not there."""
CUT = frozenset({State.CANCELLED, State.EXPIRED})
"""Ends in which an engine is told to stop what it does."""
OPERATIONS = {Kind.COMPLETION: "text_completion"}
"""Names of the GenAI conventions where ours differ."""


class MetricsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may read `/metrics`, and how many tenants have a label of their own: the `[metrics]` section.

    `access`: `open` to all who reach the port; `admin`: with an admin key. Tenants beyond the first `max_tenants` to
    come are counted together, as `other`.
    """

    access: Literal["open", "admin"] = "open"
    max_tenants: Annotated[int, Meta(ge=0, le=1_000)] = 100


def observe(cells: Cells, bounds: tuple[float, ...], value: float) -> None:
    """One value into a histogram."""
    cells[bisect_left(bounds, value)] += 1.0
    cells[-1] += value


class _Counts(dict[str, Cells]):
    """The counters of one family that differ in their last label; each is made when it is first asked for."""

    def __init__(self, board: Board, name: str, *labels: str) -> None:
        super().__init__()
        self._board, self._family, self._labels = board, BY_NAME[name], labels

    def __missing__(self, last: str) -> Cells:
        cells = self[last] = self._board.own.series(self._family, *self._labels, last)
        return cells

    def begin(self, *lasts: str) -> None:
        """Tell these as 0 from now on: the rise of what was never told is not seen."""
        for last in lasts:
            self[last][0] += 0.0


class _Service:
    """A model, a class, an API."""

    __slots__ = (
        "duration", "estimated", "exact", "first_token", "good", "granted", "missed", "pace", "prompt_error", "queued",
        "reasons", "received", "refusal", "streaming", "tokens_in", "tokens_out", "wasted",
    )  # fmt: skip

    def __init__(self, board: Board, kind: Kind, model: str, service: str) -> None:
        series = board.own.series
        pool, gen_ai = (model, service), (OPERATIONS.get(kind, kind.value), model, service)
        states = BY_NAME["signalbox_state_seconds"]
        self.received, self.queued, self.granted, self.streaming = (
            series(states, *pool, state) for state in (State.RECEIVED, State.QUEUED, State.GRANTED, State.STREAMING)
        )
        self.first_token = series(BY_NAME["gen_ai_server_time_to_first_token_seconds"], *gen_ai)
        self.pace = series(BY_NAME["gen_ai_server_time_per_output_token_seconds"], *gen_ai)
        self.duration = series(BY_NAME["gen_ai_server_request_duration_seconds"], *gen_ai)
        usage = BY_NAME["gen_ai_client_token_usage"]
        self.tokens_in, self.tokens_out = series(usage, *gen_ai, "input"), series(usage, *gen_ai, "output")
        plans = BY_NAME["signalbox_plans"]
        self.exact, self.estimated = series(plans, model, "exact"), series(plans, model, "estimated")
        self.prompt_error = series(BY_NAME["signalbox_prompt_error_ratio"], model)
        self.good = series(BY_NAME["signalbox_goodput"], *pool)
        self.refusal = series(BY_NAME["signalbox_refusal_seconds"], *pool)
        self.missed = _Counts(board, "signalbox_missed", *pool)
        self.reasons = _Counts(board, "signalbox_requests", *pool)
        self.wasted = _Counts(board, "signalbox_wasted_tokens", *pool)
        self.missed.begin("ttft", "tpot", "total")
        self.reasons.begin(OK, Reason.INTERNAL)


class _Engine:
    """A backend of a model."""

    __slots__ = ("ends", "pace", "prefill", "stop")

    def __init__(self, board: Board, model: str, backend: str) -> None:
        series = board.own.series
        self.prefill = series(BY_NAME["signalbox_prefill_seconds"], model, backend)
        self.pace = series(BY_NAME["signalbox_decode_seconds_per_token"], model, backend)
        self.stop = series(BY_NAME["signalbox_engine_stop_seconds"], model, backend)
        self.ends = _Counts(board, "signalbox_attempts", model, backend)


class _Tenant:
    """A tenant, or all those without a label of their own."""

    __slots__ = ("ends", "queued", "tokens_in", "tokens_out")

    def __init__(self, board: Board, name: str) -> None:
        series = board.own.series
        tokens = BY_NAME["signalbox_tenant_tokens"]
        self.tokens_in, self.tokens_out = series(tokens, name, "input"), series(tokens, name, "output")
        self.queued = series(BY_NAME["signalbox_tenant_queue_seconds"], name)
        self.ends = _Counts(board, "signalbox_tenant_requests", name)


class Metrics:
    """What this process counts. Every method is synchronous and takes microseconds."""

    def __init__(self, board: Board, settings: MetricsConfig) -> None:
        self.board = board
        self._max_tenants = settings.max_tenants
        self._services: dict[tuple[Kind, str, str], _Service] = {}
        self._engines: dict[tuple[str, str], _Engine] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._others: _Tenant | None = None
        self._early = _Counts(board, "signalbox_requests", NONE, NONE)
        self._early.begin(Reason.INTERNAL)
        self._turn = board.own.series(BY_NAME["signalbox_turn_seconds"])
        self._missed_looks = board.own.series(BY_NAME["signalbox_store_look_failures"])
        self._events = board.own.series(BY_NAME["signalbox_turn_events"])

    def __repr__(self) -> str:
        return f"<Metrics {len(self._services)} services, {len(self._tenants)} tenants, {self.board!r}>"

    def ended(self, exchange: "Exchange") -> None:
        """A request is in its last state."""
        reason = OK if exchange.refusal is None else exchange.refusal.reason
        job = exchange.job
        if job is None:  # before it was known what was asked for: a bad key, a body that cannot be read
            self._early[reason][0] += 1.0
            return
        service = self._service(job.prompt.kind, job.pool.model, job.service.name)
        tenant = self._tenant(job.tenant.name)
        service.reasons[reason][0] += 1.0
        tenant.ends[exchange.state][0] += 1.0
        self._states(exchange, service, tenant)
        self._attempts(exchange, job.pool.model)
        if exchange.started_at:
            self._answered(exchange, service, tenant)
        if exchange.refusal is not None:
            observe(service.refusal, DURATION_S, exchange.ended_at - exchange.received_at)

    def stopped(self, exchange: "Exchange") -> None:
        """An engine was told to stop a stream, and has let go of it."""
        job, member = exchange.job, exchange.member
        if job is not None and member is not None and exchange.state in CUT:
            engine = self._engine(job.pool.model, member.config.name)
            observe(engine.stop, STOP_S, exchange.stopped_at - exchange.ended_at)

    def turned(self, seconds: float, events: int) -> None:
        """An exchange with the store is over."""
        observe(self._turn, TURN_S, seconds)
        observe(self._events, TURN_EVENTS, events)

    def missed_look(self) -> None:
        """The store could not be asked for a scrape."""
        self._missed_looks[0] += 1.0

    # -- one request ------------------------------------------------------------------------------------------------

    def _states(self, exchange: "Exchange", service: _Service, tenant: _Tenant) -> None:
        """Time in each state, over all attempts, as far as it came: together the whole time."""
        ended, failed = exchange.ended_at, exchange.failed
        since = failed[0].submitted_at if failed else exchange.submitted_at
        observe(service.received, STATE_S, (since or ended) - exchange.received_at)
        if not since:
            return
        queued = granted = 0.0
        for attempt in failed:
            queued += attempt.granted_at - since
            granted += attempt.failed_at - attempt.granted_at
            since = attempt.failed_at
        queued += (exchange.granted_at or ended) - since
        observe(service.queued, STATE_S, queued)
        tenant.queued[0] += queued
        if exchange.granted_at:
            granted += (exchange.started_at or ended) - exchange.granted_at
        if granted:
            observe(service.granted, STATE_S, granted)
        if exchange.started_at:
            observe(service.streaming, STATE_S, ended - exchange.started_at)

    def _attempts(self, exchange: "Exchange", model: str) -> None:
        """Every backend that was tried, with what became of it."""
        for attempt in exchange.failed:
            self._engine(model, attempt.backend).ends[FAILURES.get(attempt.error, "lost")][0] += 1.0
        member = exchange.member
        if exchange.granted_at and member is not None:
            gone = exchange.refusal is not None and exchange.refusal.reason is Reason.NO_BACKEND
            outcome = Reason.NO_BACKEND if gone else exchange.state
            self._engine(model, member.config.name).ends[outcome][0] += 1.0

    def _answered(self, exchange: "Exchange", service: _Service, tenant: _Tenant) -> None:
        """An answer that had begun, whole or not."""
        job, member, usage, started = exchange.job, exchange.member, exchange.usage, exchange.started_at
        assert job is not None
        assert member is not None
        prompt, output = (usage.prompt_tokens, usage.completion_tokens) if usage else (exchange.held, exchange.chunks)
        observe(service.tokens_in, TOKENS, prompt)
        observe(service.tokens_out, TOKENS, output)
        if exchange.plan is not None:
            (service.exact if exchange.plan.exact else service.estimated)[0] += 1.0
            if not exchange.plan.exact and usage is not None and usage.prompt_tokens > 0:
                observe(service.prompt_error, OFF_BY, abs(exchange.held / usage.prompt_tokens - 1))
        tenant.tokens_in[0] += prompt
        tenant.tokens_out[0] += output
        engine = self._engine(job.pool.model, member.config.name)
        observe(engine.prefill, FIRST_TOKEN_S, started - exchange.granted_at)
        pace = 0.0
        if job.prompt.stream:
            observe(service.first_token, FIRST_TOKEN_S, started - exchange.received_at)
            if output > 1:
                pace = (exchange.ended_at - started) / (output - 1)
                observe(service.pace, PER_TOKEN_S, pace)
                observe(engine.pace, PER_TOKEN_S, pace)
        if exchange.state is State.DONE:
            observe(service.duration, DURATION_S, exchange.ended_at - exchange.received_at)
            _judge(exchange, job, service, pace)
        else:
            service.wasted[exchange.state][0] += output

    # -- label sets -------------------------------------------------------------------------------------------------

    def _service(self, kind: Kind, model: str, name: str) -> _Service:
        known = self._services.get((kind, model, name))
        if known is None:
            known = self._services[kind, model, name] = _Service(self.board, kind, model, name)
        return known

    def _engine(self, model: str, backend: str) -> _Engine:
        known = self._engines.get((model, backend))
        if known is None:
            known = self._engines[model, backend] = _Engine(self.board, model, backend)
        return known

    def _tenant(self, name: str) -> _Tenant:
        known = self._tenants.get(name)
        if known is not None:
            return known
        if len(self._tenants) < self._max_tenants:
            known = self._tenants[name] = _Tenant(self.board, name)
            return known
        if self._others is None:
            self._others = _Tenant(self.board, OTHER)
        return self._others


def _judge(exchange: "Exchange", job: "Job", service: _Service, pace_s: float) -> None:
    """A whole answer against its objectives."""
    missed = []
    if job.first_by and exchange.started_at > job.first_by:
        missed.append("ttft")
    if job.tpot_ms and pace_s * 1000 > job.tpot_ms:
        missed.append("tpot")
    if job.end_by and exchange.ended_at > job.end_by:
        missed.append("total")
    for each in missed:
        service.missed[each][0] += 1.0
    if not missed:
        service.good[0] += 1.0
