"""Where the time of a request went: from its recorded times to its phases, one after the other without a gap."""

from typing import TYPE_CHECKING

from policies.lifecycle import State
from policies.reasons import Reason

if TYPE_CHECKING:
    from gateway.exchange import Exchange

_ENGINES_FAULT = frozenset({Reason.ENGINE_ERROR, Reason.ENGINE_LOST, Reason.NO_BACKEND})

BEFORE_QUEUE = ("validate", "admit")
_ATTEMPT = ("queue", "prefill")
_STARTED = ("queue", "prefill", "decode")
_ANSWERED = BEFORE_QUEUE + _STARTED


def phases(x: "Exchange", at: float = 0.0) -> tuple[tuple[str, ...], list[float]]:
    """The names of the phases of an exchange, in order, and the n + 1 times at which they meet.

    Times are seconds of the loop's clock; the first is the request's first byte, the last the end of its answer, or of
    its engine's work where that had to be stopped, or `at` for one that has not ended. The nth attempt has the nth
    `queue` and `prefill`.
    """
    ended_at = x.ended_at or at
    if x.started_at and not x.failed and not x.stopped_at:
        times = [x.received_at, x.asked_at, x.submitted_at, x.granted_at, x.started_at, ended_at]
        return _ANSWERED, times
    if not x.asked_at:
        return BEFORE_QUEUE[:1], [x.received_at, ended_at]
    submitted_at = x.failed[0].submitted_at if x.failed else x.submitted_at
    if not submitted_at:
        return BEFORE_QUEUE, [x.received_at, x.asked_at, ended_at]
    names: tuple[str, ...] = BEFORE_QUEUE
    times = [x.received_at, x.asked_at, submitted_at]
    for attempt in x.failed:
        names += _ATTEMPT
        times += (attempt.granted_at, attempt.failed_at)
    if x.started_at:
        names += _STARTED
        times += (x.granted_at, x.started_at)
    elif x.granted_at:
        names += _ATTEMPT
        times.append(x.granted_at)
    else:
        names += _ATTEMPT[:1]
    times.append(ended_at)
    if was_stopped(x):
        names += ("cancel",)
        times.append(x.stopped_at)
    return names, times


def was_stopped(x: "Exchange") -> bool:
    """Whether an engine that was at work for it had to be told to stop."""
    return bool(x.stopped_at) and (x.refusal is None or x.refusal.reason not in _ENGINES_FAULT)


def faulty(x: "Exchange") -> bool:
    """Whether the service failed. A refusal that is the client's doing, and a client that left, are no errors here."""
    return x.status >= 500 or x.state is State.FAILED or x.state is State.EXPIRED


def server_timing(x: "Exchange", now: float) -> bytes:
    """The value of a `server-timing` header: milliseconds from the first byte on, as far as it came by `now`."""
    if not x.submitted_at:
        return b"total;dur=%.1f" % ((now - x.received_at) * 1000)
    validate_ms, admit_ms = (x.asked_at - x.received_at) * 1000, (x.submitted_at - x.asked_at) * 1000
    if not x.granted_at:
        return b"validate;dur=%.2f, admit;dur=%.2f" % (validate_ms, admit_ms)
    queue_ms = (x.granted_at - x.submitted_at) * 1000
    if not x.started_at:
        return b"validate;dur=%.2f, admit;dur=%.2f, queue;dur=%.2f" % (validate_ms, admit_ms, queue_ms)
    prefill_ms = (x.started_at - x.granted_at) * 1000
    whole = b"validate;dur=%.2f, admit;dur=%.2f, queue;dur=%.2f, prefill;dur=%.2f"
    return whole % (validate_ms, admit_ms, queue_ms, prefill_ms)
