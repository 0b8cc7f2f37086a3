"""What vLLM's errors are to the gateway: the request's fault, no room, a failure, or a dead engine."""

import logging
from types import SimpleNamespace
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from vllm.entrypoints.anthropic.api_router import translate_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler
from vllm.v1.engine.exceptions import EngineDeadError

from backends.protocol import BackendBusy, BackendError, BackendLost, Kind, Refused

log = logging.getLogger(__name__)

Fault = Refused | BackendBusy | BackendError | BackendLost

DEAD = "the vLLM engine process is dead"
_TOO_LONG = ("input_tokens", "input_text", "max_tokens", "max_completion_tokens", "max_output_tokens")


def while_planning(kind: Kind, exc: Exception) -> Fault:
    """The fault in an exception out of vLLM's checks. The engine has no part in them: what is left is the request's."""
    fault = of_exception(kind, exc)
    if not isinstance(fault, BackendError):
        return fault
    log.warning("vLLM's checks broke on a request", exc_info=exc)
    return Refused(400, "invalid_request", f"vLLM cannot prepare this request: {exc}")


def of_exception(kind: Kind, exc: Exception) -> Fault:
    """The fault in anything that vLLM raised."""
    if isinstance(exc, (BackendBusy, BackendError, BackendLost)):
        return type(exc)(str(exc))  # one object may have gone to many streams, and each raises its own
    if isinstance(exc, EngineDeadError):
        return BackendLost(DEAD)
    if isinstance(exc, ValidationError):
        return _malformed(exc)
    return of_answer(kind, create_error_response(exc))


def of_answer(kind: Kind, answer: ErrorResponse) -> Fault:
    """The fault in an error that vLLM's serving layer returned; the client gets vLLM's own body."""
    status, message, param = int(answer.error.code), answer.error.message, answer.error.param
    if status == 501:
        return Refused(400, "unsupported_feature", message, param)
    if status == 503:
        return BackendBusy(message)
    if status >= 500:
        return BackendError(message)
    body = answer.model_dump_json().encode()
    if kind is Kind.MESSAGES:
        body = bytes(translate_error_response(answer).body)
    return Refused(status, _code(status, message, param), message, _field(param), body)


def _code(status: int, message: str, param: str | None) -> str:
    if status == 404:
        return "unknown_model"
    if param in _TOO_LONG and ("maximum context length" in message or "max_model_len" in message):
        return "context_length_exceeded"
    return "invalid_request"


def _field(param: str | None) -> str | None:
    return param.removeprefix("body.") if param else None


def _malformed(exc: ValidationError) -> Refused:
    """The answer of vLLM's server to a body that pydantic refuses, made by its own handler without a server."""
    errors = [error | {"loc": ("body", *error["loc"])} for error in exc.errors(include_url=False)]
    quiet = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(log_error_stack=False))))
    handling: Any = validation_exception_handler(quiet, RequestValidationError(errors))
    try:
        handling.send(None)
    except StopIteration as done:
        body = bytes(done.value.body)
        error = msgspec.json.decode(body)["error"]
        status = int(done.value.status_code)
        return Refused(status, "invalid_request", error["message"], _field(error.get("param")), body)
    handling.close()
    raise RuntimeError("vLLM's validation handler waits for something")
