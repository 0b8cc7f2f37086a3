"""One request from its first byte to its end. It owns its plan, its place in the queue and its stream."""

import logging
import math

from backends.protocol import (
    Backend,
    BackendBusy,
    BackendError,
    BackendLost,
    Chunk,
    Plan,
    Refused,
    Stream,
    Usage,
)
from backends.protocol import Kind as Api
from gateway.clock import now
from gateway.job import Failed, Job, Unable, Unheard, WentDown, failure, ms_until, refusal_of
from gateway.pool import Member, Unservable
from gateway.queue.client import Place, QueueRefusal, Quota
from gateway.telemetry.context import Context, log_fields
from gateway.telemetry.watcher import Attempt
from gateway.tenants import Tenant
from gateway.trunk import Trunk
from policies.lengths import Kind
from policies.lifecycle import TERMINAL, Event, State, step
from policies.reasons import Reason, Refusal
from policies.types import Ticket

log = logging.getLogger(__name__)

NOBODYS = Kind("", "")
REPORT_EVERY = 32  # output tokens after which the shared queue hears what KV is expected now
_EVENTS = {Reason.EXPIRED: Event.EXPIRE, Reason.CLIENT_GONE: Event.LEAVE}
_FAULTS = frozenset({Reason.ENGINE_ERROR, Reason.ENGINE_LOST, Reason.INTERNAL})
_UNPACED = frozenset({Reason.RATE_LIMITED, Reason.DRAINING})


class Exchange:
    """Takes a job through plan, queue and engine. `first`, then `next` until None; `finish` always, in a `finally`.

    Every state change goes through `policies.lifecycle`. `finish` is synchronous and works from any state; a task that
    was cancelled anywhere in here needs nothing else to leave no lease, no stream and no plan behind.

    When what happened: `received_at`, `asked_at` (the job is known), `planned_at`, `submitted_at`, `granted_at`,
    `started_at` (the first chunk), `ended_at`, `stopped_at` (the engine has been told); 0 is not yet, or never. After a
    failed attempt the middle ones are the next attempt's, and `failed` keeps the old ones.
    """

    __slots__ = (
        "api",
        "asked_at",
        "chunks",
        "end_by",
        "ended",
        "ended_at",
        "failed",
        "first_by",
        "granted_at",
        "heard",
        "held",
        "job",
        "kind",
        "leased",
        "member",
        "place",
        "plan",
        "planned_at",
        "quota",
        "received_at",
        "refusal",
        "report_at",
        "request_id",
        "started_at",
        "state",
        "status",
        "stopped_at",
        "stopping",
        "stream",
        "submitted_at",
        "tenant",
        "trace",
        "tried",
        "trunk",
        "usage",
    )

    def __init__(self, trunk: Trunk, received_at: float) -> None:
        self.trunk = trunk
        self.state = State.RECEIVED
        self.job: Job | None = None
        self.plan: Plan | None = None
        self.place: Place | None = None
        self.member: Member | None = None
        self.stream: Stream | None = None
        self.tried: set[int] = set()
        self.first_by = self.end_by = 0.0  # the job's, or nearer: one that comes again has those it had first
        self.kind = NOBODYS  # whose answers this one will resemble
        self.held = 0  # prompt tokens that its member counts for it
        self.chunks = 0  # output tokens seen so far
        self.report_at = REPORT_EVERY  # output tokens at which to report next
        self.quota: Quota | None = None  # what the tenant may still use, as of the last answer of the queue
        self.usage: Usage | None = None  # the engine's own count, once it told
        self.ended = False  # the stream said that it is over: nothing is left to close
        self.heard = False  # an engine knows of it and may have computed its prompt
        self.leased = False  # counted in its member's `running`
        self.received_at = received_at
        self.asked_at = self.planned_at = self.submitted_at = self.granted_at = self.started_at = 0.0
        self.ended_at = self.stopped_at = 0.0
        self.failed: tuple[Attempt, ...] = ()
        self.refusal: Refusal | None = None  # why it ended, if not well
        self.stopping = False  # it ended before its engine was through
        self.api = Api.CHAT  # by which it came in
        self.tenant: Tenant | None = None  # once it is known
        self.request_id = ""
        self.trace: Context | None = None  # where traces are made
        self.status = 0  # of the response, once it has begun

    def __repr__(self) -> str:
        where = f" on {self.member.config.name}" if self.member else ""
        return f"<Exchange {self.state.value}{where}, {self.chunks} tokens>"

    async def first(self, job: Job) -> Chunk | None:
        """The first chunk, from whichever backend gives it first. Raises Failed."""
        self.job, self.asked_at = job, now()
        self.first_by, self.end_by = job.first_by, job.end_by
        self.kind = Kind(job.tenant.name, job.pool.model, job.prompt.kind)
        budget = self.trunk.retries.of(job.tenant.name)
        (budget.repeat if job.again else budget.request)(self.received_at)
        self.trunk.queue.declare_tenant(job.tenant.name, job.tenant.limits)
        try:
            positions = job.pool.candidates(job.prompt.kind, job.wanted, self.tried)
            self.plan = await job.pool.plan(job.prompt, positions)
            self.planned_at = now()
            while True:
                member = await self._lease(job, positions)
                try:
                    return await self._open(job, member)
                except (BackendLost, BackendError, BackendBusy) as error:
                    positions = self._again(job, member, error)
        except Refused as no:
            raise Failed(refusal_of(no), no.status, no.body) from no
        except Unservable as no:
            raise Failed(no.refusal) from no
        except QueueRefusal as no:
            raise Failed(no.refusal) from no

    async def next(self) -> Chunk | None:
        """The next chunk, None at the end. Raises Failed: there is no second half from elsewhere."""
        assert self.stream is not None
        assert self.member is not None
        try:
            chunk = await self.stream.next()
        except BackendLost as error:
            self.member.lost(now())
            raise Failed(Refusal(Reason.ENGINE_LOST, f"the engine was lost: {error}")) from error
        except (BackendError, BackendBusy, Refused) as error:
            self.member.breaker.failure(now())
            raise Failed(Refusal(Reason.ENGINE_ERROR, f"the engine failed: {error}")) from error
        self._count(chunk)
        return chunk

    def engine_done(self) -> None:
        """The engine has nothing more to give: its room goes back before the client has read everything."""
        self._let_go(ran=True, answered=True)

    def invites(self, refusal: Refusal) -> bool:
        """Whether a client that is refused may come again: while its first deadline lets it, if that is kept, and the
        tenant's retry budget is not spent. A quota gives everyone a time of its own, and a draining gateway a peer."""
        job = self.job
        if job is None or refusal.reason in _UNPACED:
            return True
        at = now()
        if job.identity and self.first_by and at + refusal.retry_after_s > self.first_by:
            return False
        return not self.trunk.retries.of(job.tenant.name).spent(at)

    def finish(self, refusal: Refusal | None = None) -> None:
        """End it, once: the life cycle, the lease, the stream, the plan. No await in here."""
        if self.state in TERMINAL:
            return
        self.refusal = refusal
        self.ended_at = at = now()
        if refusal is None:
            self.state = step(self.state, Event.FINISH)
        else:
            event = _EVENTS.get(refusal.reason)
            if event is None:
                event = Event.FAIL if self.state is State.STREAMING or refusal.reason in _FAULTS else Event.REFUSE
            self.state = step(self.state, event)
        if self.job is not None and self.started_at and self.job.pool.answers.curious(at):
            limit = self.plan.output_limit if self.plan else 0
            usage = self.usage_so_far()
            cut_short = self.state is not State.DONE or 0 < limit <= usage.completion_tokens
            self.job.pool.answers.ended(self.kind, usage, cut_short, at)
        self.stopping = self.stream is not None and not self.ended
        self._let_go(ran=self.heard)
        if self.state is State.DONE and self.member is not None:
            self.member.breaker.success(at)
        if self.plan is not None:
            self.plan.close()
        self.trunk.watchers.ended(self)

    def _stopped(self) -> None:
        self.stopped_at = now()
        self.trunk.watchers.stopped(self)

    def usage_so_far(self) -> Usage:
        """What the engine said, else what was seen pass by."""
        if self.usage is not None:
            return self.usage
        return Usage(self.plan.prompt_tokens if self.plan else 0, self.chunks)

    async def _lease(self, job: Job, positions: tuple[int, ...]) -> Member:
        """Wait for a grant. Raises QueueRefusal."""
        assert self.plan is not None
        at = self.submitted_at = now()
        waits_ms = ms_until(self.first_by, at)
        if waits_ms <= 0:
            raise Failed(Refusal(Reason.EXPIRED, "the deadline passed before an engine was free"))
        if self.state is State.RECEIVED:
            self.state = step(self.state, Event.SUBMIT)
        self.place = self.trunk.queue.submit(self._ticket(job, self.plan, positions, waits_ms, at))
        try:
            position = await self.place.granted()
        finally:
            self.quota = self.place.quota
            self._nearer(job, self.place.nearer_s)
        self.state = step(self.state, Event.GRANT)
        self.granted_at = now()
        member = self.member = job.pool.members[position]
        member.running += 1
        member.kv_tokens += self.plan.prompt_tokens
        self.held, self.chunks = self.plan.prompt_tokens, 0
        self.leased = True
        return member

    def _nearer(self, job: Job, by_s: float) -> None:
        """It has come before: its deadlines are nearer than it said."""
        if by_s <= 0.0:
            return
        self.first_by -= by_s
        self.end_by = max(self.end_by - by_s, self.received_at) if self.end_by else 0.0
        if not (job.again or self.tried):
            self.trunk.retries.of(job.tenant.name).repeat(now())

    def _ticket(self, job: Job, plan: Plan, positions: tuple[int, ...], waits_ms: int, at: float) -> Ticket:
        """The job in the numbers that the shared queue orders and counts by."""
        pool, answers = job.pool, job.pool.answers
        expected = answers.expect(self.kind, plan.output_limit, at)
        uncached = answers.uncached(self.kind, plan.prompt_tokens)
        price = answers.prices(job.tenant.weight)
        return Ticket(
            tenant=job.tenant.name,
            rank=job.service.rank,
            pool=pool.model,
            prompt_tokens=plan.prompt_tokens,
            output_tokens=int(expected.mean) + 1,
            waits_ms=waits_ms,
            total_ms=max(1, ms_until(self.end_by, at)) if self.end_by else 0,
            tpot_ms=job.tpot_ms,
            backends=positions if len(positions) < len(pool.members) else (),
            retry=bool(self.tried),
            uncached_tokens=uncached,
            output_variance=int(expected.variance),
            output_high=expected.q90,
            key_ms=self.trunk.config.order.key_ms(waits_ms, uncached),
            prefill_price=price.prefill,
            output_price=price.output,
            billed=not self.tried,
            identity=job.identity if self.first_by else "",
            target_ms=job.service.target_ms(waits_ms),
        )

    async def _open(self, job: Job, member: Member) -> Chunk | None:
        """Start the generation and wait for its first chunk."""
        backend = member.backend
        if backend is None:
            raise WentDown(f"{member.config.name} went down while this waited")
        assert self.plan is not None
        if self.plan.maker != backend.name:
            await self._plan_again(job, backend)
        self.heard = True
        try:
            self.stream = await backend.open(self.plan)
            chunk = await self.stream.next()
            self._count(chunk)
            if chunk is not None and not chunk.tokens and not chunk.last:
                chunk = await self._first_output(self.stream, chunk)
        except Exception:  # not when the client leaves: what it asked for is being computed
            self.heard = False
            raise
        self.state = step(self.state, Event.CHUNK)
        self.started_at = now()
        assert self.place is not None
        self.place.first_token()
        took_s, left_s = self.started_at - self.granted_at, (self.first_by or math.inf) - self.granted_at
        member.steps.first_token(self.place.expected_s, took_s, left_s, self.started_at)
        member.prefilled_tokens += self.held
        return chunk

    async def _first_output(self, stream: Stream, first: Chunk) -> Chunk | None:
        """The first chunk with output in it, after the frames before it (the role, say): until then it may move."""
        chunk: Chunk | None = first
        before: list[bytes] = []
        while chunk is not None and not chunk.tokens and not chunk.last:
            before.append(chunk.data)
            chunk = await stream.next()
            self._count(chunk)
        if chunk is None:
            return Chunk(b"".join(before), last=True)
        return Chunk(b"".join([*before, chunk.data]), chunk.tokens, chunk.usage, chunk.last)

    async def _plan_again(self, job: Job, backend: Backend) -> None:
        """The lease fell on another backend than the one that planned. Raises Unable where it cannot do this."""
        try:
            fresh = await backend.plan(job.prompt)
        except Refused as no:
            if no.code == Reason.UNSUPPORTED_FEATURE:
                raise Unable(no) from no
            raise
        if self.plan is not None:
            self.plan.close()
        self.plan = fresh

    def _again(self, job: Job, member: Member, error: Exception) -> tuple[int, ...]:
        """After a failure before the first chunk: back to the queue for another backend, or Failed.

        Who was never sent anywhere takes nothing from the retry budget.
        """
        at = now()
        unheard = isinstance(error, Unheard)
        if isinstance(error, BackendError):
            member.breaker.failure(at)
        elif isinstance(error, BackendLost) and not unheard:
            member.lost(at)
        fields = log_fields(self.request_id, self.trace)
        log.warning("%s failed before its first chunk: %s", member.config.name, error, extra=fields)
        self._let_go(ran=False)
        self.tried.add(member.position)
        wait_s = error.retry_after_s if isinstance(error, BackendBusy) else 0.0
        try:
            positions = job.pool.candidates(job.prompt.kind, job.wanted, self.tried)
        except Unservable as none:
            if isinstance(error, Unable):
                raise error.refusal from none
            raise failure(error, isinstance(error, BackendLost), wait_s or none.refusal.retry_after_s) from error
        budget = self.trunk.retries.of(job.tenant.name)
        if not unheard and not budget.allows(at, len(self.tried), len(job.pool.members)):
            raise failure(error, False, wait_s) from error
        self.state = step(self.state, Event.RETRY)
        self.failed += (Attempt(self.submitted_at, self.granted_at, at, member.config.name, type(error).__name__),)
        self.granted_at = 0.0
        return positions

    def _let_go(self, ran: bool, answered: bool = False) -> None:
        """Give back the lease and hand the stream to the reaper. Idempotent."""
        if self.place is None and self.stream is None and not self.leased:
            return
        place, self.place = self.place, None
        if place is not None:
            tokens = self.usage.completion_tokens if self.usage else self.chunks
            place.end(tokens, ran, answered)
        stream, self.stream = self.stream, None
        if stream is not None and not self.ended:
            self.trunk.reaper.close(stream.aclose, self._stopped if self.stopping else None)
        member = self.member
        if self.leased and member is not None:
            member.running -= 1
            member.kv_tokens -= self.held + self.chunks
            member.steps.leave(self)
        self.ended = self.leased = False

    def _count(self, chunk: Chunk | None) -> None:
        if chunk is None:
            self.ended = True
            return
        self.ended = chunk.last
        if chunk.usage is not None:
            self.usage = chunk.usage
        tokens, member = chunk.tokens, self.member
        if tokens and member is not None:
            self.chunks += tokens
            member.tokens += tokens
            member.kv_tokens += tokens
            member.steps.follow(self, tokens, member, now())
            if self.chunks >= self.report_at:
                self._report()

    def _report(self) -> None:
        """Tell the shared queue what KV the answer is expected to need now that it is this long."""
        self.report_at = self.chunks + REPORT_EVERY
        if self.place is None or self.plan is None or self.job is None:
            return
        whole = self.job.pool.answers.expect_after(self.kind, self.chunks, self.plan.output_limit)
        self.place.progress(self.plan.prompt_tokens + int(whole.mean) + 1, int(whole.variance))
