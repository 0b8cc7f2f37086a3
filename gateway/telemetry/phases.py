"""Where the time of a request went."""

from gateway.exchange import Exchange


def server_timing(x: Exchange, now: float) -> bytes:
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
