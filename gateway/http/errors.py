"""Every reason's status, and the error bodies of the APIs we speak."""

import random
from typing import Any

import msgspec

from backends.protocol import Kind, Usage
from gateway.queue.client import Quota
from policies.reasons import Reason, Refusal

STATUS: dict[Reason, int] = {
    Reason.INVALID_REQUEST: 400,
    Reason.UNSUPPORTED_FEATURE: 400,
    Reason.CONTEXT_LENGTH_EXCEEDED: 400,
    Reason.UNAUTHENTICATED: 401,
    Reason.FORBIDDEN: 403,
    Reason.UNKNOWN_MODEL: 404,
    Reason.NOT_FOUND: 404,
    Reason.METHOD_NOT_ALLOWED: 405,
    Reason.TOO_SLOW: 408,
    Reason.TOO_LARGE: 413,
    Reason.UNSUPPORTED_MEDIA_TYPE: 415,
    Reason.DEADLINE_IMPOSSIBLE: 422,
    Reason.RATE_LIMITED: 429,
    Reason.QUEUE_FULL: 429,
    Reason.DEADLINE_UNREACHABLE: 429,
    Reason.OVERLOADED: 429,
    Reason.CLIENT_GONE: 499,
    Reason.INTERNAL: 500,
    Reason.ENGINE_ERROR: 502,
    Reason.ENGINE_LOST: 502,
    Reason.NO_BACKEND: 503,
    Reason.DRAINING: 503,
    Reason.STORE_LOST: 503,
    Reason.EXPIRED: 504,
}

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC = {400: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
_NO_RETRY = frozenset({Reason.EXPIRED, Reason.CLIENT_GONE, Reason.TOO_SLOW})
_DEFAULT_WAIT_S = 1.0

Headers = list[tuple[bytes, bytes]]


def error_type(status: int) -> str:
    """OpenAI's `error.type` for a status."""
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")


def body_of(kind: Kind | None, refusal: Refusal) -> bytes:
    """The JSON body of a refusal, in the shape of the API it came in by."""
    status = STATUS[refusal.reason]
    if kind is Kind.MESSAGES:
        name = _ANTHROPIC.get(status) or _TYPES.get(status) or "api_error"
        return msgspec.json.encode({"type": "error", "error": {"type": name, "message": refusal.message}})
    return msgspec.json.encode({"error": _fields(refusal, status)})


def headers_of(refusal: Refusal, again: bool = True) -> Headers:
    """Whether and when to come back. Waiting times carry up to 25 % of jitter, so that clients do not return as one.

    `again` false tells clients to stay away where they would else be welcome. The waiting time of a quota is passed
    on as it is: the queue has spread it already and keeps room for then.
    """
    status = STATUS[refusal.reason]
    retry = status in (429, 503) or (status >= 500 and refusal.reason not in _NO_RETRY)
    out = [
        (b"x-signalbox-reason", refusal.reason.encode()),
        (b"x-should-retry", b"true" if retry and again else b"false"),
    ]
    if status in (429, 503):
        wait_s = refusal.retry_after_s or _DEFAULT_WAIT_S
        if refusal.reason is not Reason.RATE_LIMITED:
            wait_s *= random.uniform(1.0, 1.25)  # noqa: S311 - jitter, not a secret
        out.append((b"retry-after", b"%d" % max(1, -int(-wait_s // 1))))
        out.append((b"retry-after-ms", b"%d" % int(wait_s * 1000)))
    if refusal.reason is Reason.UNAUTHENTICATED:
        out.append((b"www-authenticate", b"Bearer"))
    return out


def quota_headers(quota: Quota) -> Headers:
    """OpenAI's `x-ratelimit-*`: what the tenant may use a minute, has left, and when all of it is back."""
    out: Headers = []
    if quota.requests:
        out += _quota(b"requests", quota.requests, quota.requests_left, quota.requests_reset_s)
    if quota.tokens:
        out += _quota(b"tokens", quota.tokens, quota.tokens_left, quota.tokens_reset_s)
    return out


def _quota(what: bytes, limit: int, left: int, reset_s: float) -> Headers:
    return [
        (b"x-ratelimit-limit-" + what, b"%d" % limit),
        (b"x-ratelimit-remaining-" + what, b"%d" % max(0, left)),
        (b"x-ratelimit-reset-" + what, b"%dms" % max(0, round(reset_s * 1000))),
    ]


def terminal_event(kind: Kind, refusal: Refusal, usage: Usage) -> bytes:
    """The last SSE event of a stream that cannot go on: the error and what was used up to it. No `[DONE]` follows."""
    fields = _fields(refusal, STATUS[refusal.reason])
    if kind is Kind.MESSAGES:
        what: dict[str, Any] = {"type": "error", "error": {"type": "api_error", "message": refusal.message}}
        return b"event: error\ndata: " + msgspec.json.encode(what) + b"\n\n"
    spent = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if kind is Kind.RESPONSES:
        what = {**fields, "type": "error", "usage": spent}
        return b"event: error\ndata: " + msgspec.json.encode(what) + b"\n\n"
    return b"data: " + msgspec.json.encode({"error": fields, "usage": spent}) + b"\n\n"


def _fields(refusal: Refusal, status: int) -> dict[str, str | None]:
    return {
        "message": refusal.message,
        "type": error_type(status),
        "param": refusal.param,
        "code": refusal.reason.value,
    }
