"""`/admin/tenants`: tenants and their keys at run time, for whoever has an admin key."""

from typing import Any

from litestar import Controller, Request, Response, delete, get, patch, post
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.handlers import BaseRouteHandler
from litestar.openapi import ResponseSpec
from litestar.params import FromPath

from gateway.http.admin_forms import (
    KeyList,
    KeyView,
    NewKey,
    NewKeyView,
    NewTenant,
    Rotation,
    TenantChanges,
    TenantList,
    TenantView,
    asks,
    read,
)
from gateway.http.desk import Desk
from gateway.http.ops import Problem
from gateway.http.problems import respond
from gateway.queue.channel import StoreAway, StoreUnfit
from gateway.ring import Denied
from gateway.tenants import bearer
from gateway.trunk import Trunk
from policies.reasons import Reason, Refusal

MOST_BYTES = 65_536
OFF = "the admin API is off: configure server.admin_keys, server.admin_key_env or server.admin_key_file"

_NOT_HERE = ResponseSpec(Problem, description="not_found: no such tenant or key, or the admin API is off")
_CLOSED = {
    401: ResponseSpec(Problem, description=Reason.UNAUTHENTICATED.value),
    403: ResponseSpec(Problem, description="forbidden: a tenant's key; or the configuration's, not to be changed here"),
    404: _NOT_HERE,
}
_WRITES = {
    **_CLOSED,
    400: ResponseSpec(Problem, description="invalid_request: names the field"),
    413: ResponseSpec(Problem, description=Reason.TOO_LARGE.value),
    503: ResponseSpec(Problem, description="store_lost: nothing can be changed now"),
}


def admin_guard(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Lets an admin key pass, in either header. Raises Denied."""
    trunk: Trunk = connection.app.state.trunk
    tenants = trunk.tenants
    if not tenants.admin:
        raise Denied(Reason.NOT_FOUND, OFF)
    given = connection.headers.get("authorization")
    key = bearer(given.encode()) if given else None
    if key is None and (bare := connection.headers.get("x-api-key")):
        key = bare.encode()
    if key is not None and tenants.admin.let_in(key):
        return
    if key is not None and tenants.of_key(key) is not None:
        raise Denied(Reason.FORBIDDEN, "this is a tenant's key; an admin key is needed")
    raise Denied(Reason.UNAUTHENTICATED, "an admin key is needed: Authorization: Bearer KEY")


def _denied(_: Request[Any, Any, Any], error: Denied) -> Response[bytes]:
    return respond(error.refusal)


def _store_away(_: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    return respond(Refusal(Reason.STORE_LOST, str(error)))


def _too_large(_: Request[Any, Any, Any], __: Exception) -> Response[bytes]:
    return respond(Refusal(Reason.TOO_LARGE, f"the body is larger than {MOST_BYTES} bytes"))


class TenantRoutes(Controller):
    """Each call is one change or one look, made by the desk."""

    path = "/admin/tenants"
    guards = (admin_guard,)
    tags = ("admin",)
    security = ({"admin": []},)
    request_max_body_size = MOST_BYTES
    response_headers = {"cache-control": "no-store"}  # noqa: RUF012 - Litestar's own form
    exception_handlers = {  # noqa: RUF012 - Litestar's own form
        Denied: _denied,
        StoreAway: _store_away,
        StoreUnfit: _store_away,
        RequestEntityTooLarge: _too_large,
    }

    @get(summary="All tenants", responses=_CLOSED)
    async def tenants(self, state: State) -> TenantList:
        return TenantList(await _desk(state).tenants())

    @post(
        summary="Make a tenant; 200 if there is the same one already",
        operation_class=asks(NewTenant),
        responses=_WRITES | {200: ResponseSpec(TenantView, description="it is there already")},
    )
    async def make(self, state: State, request: Request[Any, Any, Any]) -> Response[TenantView]:
        view, is_new = await _desk(state).make(read(await request.body(), NewTenant))
        return Response(view, status_code=201 if is_new else 200)

    @get("/{name:str}", summary="One tenant", responses=_CLOSED)
    async def tenant(self, state: State, name: FromPath[str]) -> TenantView:
        return await _desk(state).tenant(name)

    @patch("/{name:str}", summary="Change some settings", operation_class=asks(TenantChanges), responses=_WRITES)
    async def alter(self, state: State, name: FromPath[str], request: Request[Any, Any, Any]) -> TenantView:
        return await _desk(state).alter(name, read(await request.body(), TenantChanges))

    @delete("/{name:str}", summary="Remove a tenant and its keys", responses=_WRITES)
    async def remove(self, state: State, name: FromPath[str]) -> None:
        await _desk(state).remove(name)

    @get("/{name:str}/keys", summary="A tenant's keys", responses=_CLOSED)
    async def keys(self, state: State, name: FromPath[str]) -> KeyList:
        return KeyList(await _desk(state).keys(name))

    @post(
        "/{name:str}/keys",
        summary="Make a key; the answer is the only place where it ever stands",
        operation_class=asks(NewKey),
        responses=_WRITES,
    )
    async def make_key(self, state: State, name: FromPath[str], request: Request[Any, Any, Any]) -> NewKeyView:
        return await _desk(state).make_key(name, read(await request.body(), NewKey))

    @get("/{name:str}/keys/{key_id:str}", summary="One key", responses=_CLOSED)
    async def key(self, state: State, name: FromPath[str], key_id: FromPath[str]) -> KeyView:
        return await _desk(state).key(name, key_id)

    @post(
        "/{name:str}/keys/{key_id:str}/rotate",
        summary="A new key in place of this one, which may live on for a while",
        operation_class=asks(Rotation),
        responses=_WRITES,
    )
    async def rotate(
        self, state: State, name: FromPath[str], key_id: FromPath[str], request: Request[Any, Any, Any]
    ) -> NewKeyView:
        return await _desk(state).rotate(name, key_id, read(await request.body(), Rotation))

    @delete("/{name:str}/keys/{key_id:str}", summary="Revoke a key", responses=_WRITES)
    async def revoke(self, state: State, name: FromPath[str], key_id: FromPath[str]) -> None:
        await _desk(state).revoke(name, key_id)


def _desk(state: State) -> Desk:
    trunk: Trunk = state.trunk
    return Desk(trunk.config, trunk.tenants, trunk.keyring)
