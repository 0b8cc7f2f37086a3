"""For operators and clients that look around: liveness, readiness, models."""

from typing import Any

from litestar import Request, Response, get
from litestar.handlers import BaseRouteHandler
from litestar.openapi import ResponseSpec
from litestar.params import FromPath
from msgspec import Struct

from backends.protocol import Kind
from gateway.clock import wall
from gateway.http.problems import respond
from gateway.pool import Pool
from gateway.tenants import Tenant
from gateway.trunk import Trunk
from policies.reasons import Reason, Refusal


class Ready(Struct):
    """Who is up. `ready` is what the status says: 200 or 503."""

    ready: bool
    store: str
    pools: dict[str, dict[str, str]]


class ModelList(Struct):
    """What `GET /v1/models` answers."""

    data: list[dict[str, Any]]
    object: str = "list"


class Problem(Struct):
    """What a refusal says, in OpenAI's shape: `message`, `type`, `param`, `code`."""

    error: dict[str, str | None]


_UNAUTHENTICATED = ResponseSpec(Problem, description=Reason.UNAUTHENTICATED.value)
_UNKNOWN_MODEL = ResponseSpec(Problem, description=Reason.UNKNOWN_MODEL.value)
_NOT_READY = ResponseSpec(Ready, description="something is down")


def ops_routes(trunk: Trunk) -> list[BaseRouteHandler]:
    """The handlers, bound to this process's trunk."""
    return [*_health(trunk), *_models(trunk)]


def _health(trunk: Trunk) -> list[BaseRouteHandler]:
    @get("/livez", sync_to_thread=False, media_type="text/plain", summary="The process is alive", security=[])
    def livez() -> str:
        return "ok"

    @get(
        "/readyz",
        sync_to_thread=False,
        summary="The store and a backend of every pool are up",
        security=[],
        responses={503: _NOT_READY},
    )
    def readyz() -> Response[Ready]:
        pools = {
            pool.model: {m.config.name: "up" if m.backend else (m.trouble or "down") for m in pool.members}
            for pool in trunk.pools.values()
        }
        ready = Ready(trunk.ready, trunk.queue.state, pools)
        return Response(ready, status_code=200 if ready.ready else 503)

    return [livez, readyz]


def _models(trunk: Trunk) -> list[BaseRouteHandler]:
    created = int(wall())

    @get(
        "/v1/models",
        sync_to_thread=False,
        summary="The models this key may use",
        responses={401: _UNAUTHENTICATED},
    )
    def models(request: Request[Any, Any, Any]) -> Response[Any]:
        tenant = tenant_of(trunk, request)
        if tenant is None:
            return _unknown_key()
        return Response(ModelList([card(name, pool, created) for name, pool in trunk.may_see(tenant)]))

    @get(
        "/v1/models/{model:path}",
        sync_to_thread=False,
        summary="One model",
        responses={401: _UNAUTHENTICATED, 404: _UNKNOWN_MODEL},
    )
    def model(request: Request[Any, Any, Any], model: FromPath[str]) -> Response[Any]:
        tenant = tenant_of(trunk, request)
        if tenant is None:
            return _unknown_key()
        name = model.removeprefix("/")
        for known, pool in trunk.may_see(tenant):
            if known == name:
                return Response(card(known, pool, created))
        return respond(Refusal(Reason.UNKNOWN_MODEL, f"the model {name!r} does not exist", "model"))

    return [models, model]


def tenant_of(trunk: Trunk, request: Request[Any, Any, Any]) -> Tenant | None:
    """The tenant of a Litestar request, by either header."""
    given = request.headers.get("authorization")
    tenant = trunk.tenants.of(given.encode() if given else None)
    if tenant is None and (key := request.headers.get("x-api-key")):
        return trunk.tenants.of_key(key.encode())
    return tenant


def card(name: str, pool: Pool, created: int) -> dict[str, Any]:
    """OpenAI's model object, with the context length that clients of vLLM look for."""
    lengths = [m.backend.bundle.context_tokens for m in pool.members if m.backend and m.backend.bundle.context_tokens]
    out: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": "signalbox"}
    if lengths:
        out["max_model_len"] = min(lengths)
    if name != pool.model:
        out["root"] = pool.model
    out["apis"] = sorted({kind for m in pool.members if m.backend for kind in m.backend.bundle.kinds} & set(Kind))
    return out


def _unknown_key() -> Response[bytes]:
    return respond(Refusal(Reason.UNAUTHENTICATED, "a known key is needed: Authorization: Bearer KEY"))
