"""What an answer that is not 200 means: whose fault it is, and whether to come back."""

import email.utils
from typing import Any

import msgspec

from backends.openai_frames import error_text
from backends.protocol import BackendBusy, BackendError, Refused

WAIT_MOST_S = 3600.0
_BUSY = frozenset({429, 503, 529})
_CODES = {404: "unknown_model", 413: "too_large", 415: "unsupported_media_type"}
_TOO_LONG = (
    "context_length_exceeded",
    "maximum context length",
    "exceeds the available context",
    "exceed_context_size",
)


def failure_of(status: int, headers: dict[bytes, bytes], body: bytes) -> Exception:
    """The exception for an answer of this status. A 4xx is the client's, but for those about our key, load or time."""
    detail = _detail(body)
    text = error_text(detail) if detail else f"the engine answered {status}"
    if status in _BUSY:
        return BackendBusy(text, retry_after_s(headers))
    if status in (401, 403, 407):
        return BackendError(f"the engine refuses our key ({status}: {text}): check api_key_env or api_key_file")
    if status == 501:
        return Refused(400, "unsupported_feature", text, _param(detail))
    if not 400 <= status < 500 or status == 408:
        return BackendError(f"the engine answered {status}: {text}")
    if status == 404 and (not detail or detail == "Not Found"):
        return BackendError("the engine has no such path (404): is the url right, and does it serve this API?")
    low = body[:65536].decode("utf-8", "replace").lower()
    code = _CODES.get(status, "invalid_request")
    if status == 400 and any(phrase in low for phrase in _TOO_LONG):
        code = "context_length_exceeded"
    return Refused(status, code, text, _param(detail), body if detail else None)


def retry_after_s(headers: dict[bytes, bytes]) -> float:
    """Seconds that the engine asks to wait, 0 if it does not say; at most an hour."""
    for name, unit in ((b"retry-after-ms", 1000.0), (b"retry-after", 1.0)):
        value = headers.get(name, b"").decode("latin-1").strip()
        try:
            wait_s = float(value) / unit
        except ValueError:
            wait_s = _until(value, headers.get(b"date", b"").decode("latin-1"))
        if wait_s > 0:
            return min(wait_s, WAIT_MOST_S)
    return 0.0


def _until(date: str, its_now: str) -> float:
    """Seconds to an HTTP date, by the engine's own clock."""
    try:
        return (email.utils.parsedate_to_datetime(date) - email.utils.parsedate_to_datetime(its_now)).total_seconds()
    except (TypeError, ValueError):
        return 0.0


def _detail(body: bytes) -> Any:
    """The error in a body: OpenAI's `error`, FastAPI's `detail`, or the object itself; None where it is not JSON."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    if not isinstance(answer, dict):
        return None
    return answer.get("error") or answer.get("detail") or answer or None


def _param(detail: Any) -> str | None:
    param = detail.get("param") if isinstance(detail, dict) else None
    return param if isinstance(param, str) else None
