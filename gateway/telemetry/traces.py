"""Which ended requests become spans. The decision comes before any work for it."""

from typing import TYPE_CHECKING

from gateway.clock import now, wall
from gateway.telemetry.outbox import Outbox
from gateway.telemetry.settings import Keep
from gateway.telemetry.spans import Spans
from policies.lifecycle import State
from policies.reasons import Reason

if TYPE_CHECKING:
    from gateway.exchange import Exchange

_FAULTS_OF_CLIENTS = frozenset(
    {
        Reason.INVALID_REQUEST,
        Reason.UNSUPPORTED_FEATURE,
        Reason.CONTEXT_LENGTH_EXCEEDED,
        Reason.UNAUTHENTICATED,
        Reason.FORBIDDEN,
        Reason.UNKNOWN_MODEL,
        Reason.TOO_LARGE,
        Reason.TOO_SLOW,
        Reason.UNSUPPORTED_MEDIA_TYPE,
    }
)
"""Refusals that say nothing about this service: anyone can make as many of them as they like."""


class Budget:
    """At most so many a second, as many at once."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._left, self._at = per_s, 0.0

    def take(self, at: float) -> bool:
        self._left = min(self._per_s, self._left + (at - self._at) * self._per_s)
        self._at = at
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Tracer:
    """Turns an ended request into spans, if it is sampled or worth keeping, and hands them to the outbox."""

    def __init__(self, keep: frozenset[Keep], keep_per_s: float, spans: Spans, outbox: Outbox) -> None:
        self._keep, self._budget = keep, Budget(keep_per_s)
        self._spans, self._outbox = spans, outbox

    def __repr__(self) -> str:
        return f"<Tracer {self._outbox!r}>"

    def ended(self, exchange: "Exchange") -> None:
        if not exchange.stopping:
            self.stopped(exchange)

    def stopped(self, exchange: "Exchange") -> None:
        context = exchange.trace
        if context is None:
            return
        kept = ""
        if not context.sampled:
            kept = self._why(exchange)
            if not kept or not self._budget.take(exchange.ended_at):
                return
        self._outbox.offer(self._spans.of(exchange, context, kept, wall() - now()))

    def _why(self, x: "Exchange") -> str:
        """The rule by which an unsampled request is kept; empty for none."""
        if x.refusal is None:
            return "slow" if "slow" in self._keep and late(x) else ""
        reason = x.refusal.reason
        if reason is Reason.CLIENT_GONE or reason in _FAULTS_OF_CLIENTS:
            return ""
        word: Keep = "refused" if x.state is State.REFUSED else "failed"
        return word if word in self._keep else ""


def late(x: "Exchange") -> bool:
    """Whether an answer missed an objective of its own: first token, pace, or whole."""
    job = x.job
    if job is None:
        return False
    if (job.first_by and x.started_at > job.first_by) or (job.end_by and x.ended_at > job.end_by):
        return True
    after = x.usage_so_far().completion_tokens - 1
    return bool(job.tpot_ms and after > 0 and (x.ended_at - x.started_at) * 1000 > job.tpot_ms * after)
