"""Why a request did not get its answer: a closed list."""

import enum

from msgspec import Struct


class Reason(enum.StrEnum):
    """One word per failure. `gateway.http.errors` maps each to a status; a test compares the two."""

    INVALID_REQUEST = "invalid_request"
    UNSUPPORTED_FEATURE = "unsupported_feature"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    UNKNOWN_MODEL = "unknown_model"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    DEADLINE_IMPOSSIBLE = "deadline_impossible"
    RATE_LIMITED = "rate_limited"
    QUEUE_FULL = "queue_full"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    OVERLOADED = "overloaded"
    NO_BACKEND = "no_backend"
    DRAINING = "draining"
    STORE_LOST = "store_lost"
    EXPIRED = "expired"
    ENGINE_ERROR = "engine_error"
    ENGINE_LOST = "engine_lost"
    CLIENT_GONE = "client_gone"
    INTERNAL = "internal"


class Refusal(Struct, frozen=True):
    """The answer no. `param` names the field at fault, if one is; `retry_after_s` is 0 where waiting would not help."""

    reason: Reason
    message: str
    param: str | None = None
    retry_after_s: float = 0.0
