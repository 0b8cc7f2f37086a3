"""`/metrics`: the numbers of all processes of this gateway, for Prometheus."""

from typing import Any

from litestar import Request, Response, get
from litestar.handlers import BaseRouteHandler
from litestar.openapi import ResponseSpec

from gateway.http.admin import admin_guard
from gateway.http.ops import Problem
from gateway.http.problems import respond
from gateway.ring import Denied
from gateway.trunk import Trunk

_NO_KEY = ResponseSpec(Problem, description="unauthenticated: an admin key is needed")
_NOT_ADMIN = ResponseSpec(Problem, description="forbidden: a tenant's key")


def scrape_route(trunk: Trunk) -> BaseRouteHandler:
    """The handler, with the guard that the configuration wants."""
    guarded = trunk.config.metrics.access == "admin"

    @get(
        "/metrics",
        summary="Metrics of all processes, as Prometheus or OpenMetrics text",
        media_type="text/plain",
        guards=[admin_guard] if guarded else None,
        security=[{"admin": []}] if guarded else [],
        responses={401: _NO_KEY, 403: _NOT_ADMIN} if guarded else None,
        exception_handlers={Denied: _denied},
    )
    async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
        text, media_type = await trunk.scrape.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": media_type, "cache-control": "no-store"})

    return metrics


def _denied(_: Request[Any, Any, Any], error: Denied) -> Response[bytes]:
    return respond(error.refusal)
