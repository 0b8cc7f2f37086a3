"""What Litestar itself refuses (no such path, wrong method), in the same error shape as everything else."""

import logging
from typing import Any

from litestar import Request, Response
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from litestar.types import ExceptionHandlersMap

from gateway.http import errors
from policies.reasons import Reason, Refusal

log = logging.getLogger(__name__)


def respond(refusal: Refusal) -> Response[bytes]:
    """A refusal as a Litestar response."""
    return Response(
        errors.body_of(None, refusal),
        status_code=errors.STATUS[refusal.reason],
        media_type="application/json",
        headers={name.decode(): value.decode() for name, value in errors.headers_of(refusal)},
    )


def _not_found(request: Request[Any, Any, Any], _: Exception) -> Response[bytes]:
    return respond(Refusal(Reason.NOT_FOUND, f"there is no {request.method} {request.url.path}"))


def _wrong_method(request: Request[Any, Any, Any], error: MethodNotAllowedException) -> Response[bytes]:
    response = respond(Refusal(Reason.METHOD_NOT_ALLOWED, f"{request.method} is not allowed on {request.url.path}"))
    if error.headers and "Allow" in error.headers:
        response.headers["allow"] = error.headers["Allow"]
    return response


def _http(_: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    reason = Reason.INVALID_REQUEST if error.status_code < 500 else Reason.INTERNAL
    return respond(Refusal(reason, error.detail))


def _crashed(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("%s %s failed inside the gateway", request.method, request.url.path, exc_info=error)
    return respond(Refusal(Reason.INTERNAL, "an error inside the gateway"))


HANDLERS: ExceptionHandlersMap = {
    NotFoundException: _not_found,
    MethodNotAllowedException: _wrong_method,
    HTTPException: _http,
    Exception: _crashed,
}
