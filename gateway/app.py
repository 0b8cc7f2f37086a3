"""Puts the parts together: a Litestar application around a Trunk."""

import gc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from litestar import Litestar, Router
from litestar.datastructures import State
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import SwaggerRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme

from backends.protocol import PATHS, Kind
from gateway import __version__
from gateway.config import Config
from gateway.http.admin import TenantRoutes
from gateway.http.console_routes import console_routes
from gateway.http.ops import ops_routes
from gateway.http.problems import HANDLERS
from gateway.http.relay import Relay
from gateway.http.routes import api_routes
from gateway.http.scrape import scrape_route
from gateway.telemetry.metrics_sheet import Board
from gateway.trunk import Trunk


def build(config: Config, board: Board | None = None) -> Litestar:
    """The application for one process: `app.state.trunk` is its Trunk, `app.state.relays` the inference APIs by path.

    `board` is where it counts together with the gateway's other processes.

    The lifespan starts and ends the trunk.
    """
    trunk = Trunk(config, board)
    relays = {PATHS[kind]: Relay(trunk, kind) for kind in Kind}

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncGenerator[None, None]:
        await trunk.start()
        settle()
        try:
            yield
        finally:
            await trunk.aclose()

    admin = Router("/", route_handlers=[TenantRoutes], include_in_schema=bool(trunk.tenants.admin))
    ops = [*ops_routes(trunk), scrape_route(trunk), *console_routes(trunk)]
    return Litestar(
        route_handlers=[*api_routes(trunk, relays), *ops, admin],
        lifespan=[lifespan],
        exception_handlers=HANDLERS,
        state=State({"trunk": trunk, "relays": relays}),
        openapi_config=_openapi(trunk.tenants.open is None),
        logging_config=None,
        request_max_body_size=config.server.max_body_bytes,
    )


def settle() -> None:
    """What is loaded by now stays: keep the collector from walking it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _openapi(keys_needed: bool) -> OpenAPIConfig:
    scheme = SecurityScheme(type="http", scheme="bearer")
    return OpenAPIConfig(
        title="Signalbox",
        version=__version__,
        description="An OpenAI-compatible gateway and scheduler in front of LLM inference engines.",
        path="/docs",
        render_plugins=[SwaggerRenderPlugin()],
        components=Components(security_schemes={"key": scheme, "admin": scheme}),
        security=[{"key": []}] if keys_needed else None,
    )
