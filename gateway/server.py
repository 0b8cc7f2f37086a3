"""The HTTP server of one process: uvicorn with our protocol and a drain."""

import asyncio
from typing import Any

import uvicorn
from litestar import Litestar

from gateway.config import ServerConfig
from gateway.http.protocol import FrontProtocol
from gateway.trunk import Trunk

TICK_S = 0.1  # how often the server looks, while it drains, whether it is told to go at once


class Server(uvicorn.Server):
    """On the first SIGTERM or SIGINT it refuses new work with 503 and lets streams finish; on the second it goes."""

    def __init__(self, config: uvicorn.Config, trunk: Trunk) -> None:
        super().__init__(config)
        self._trunk = trunk
        self._drain: asyncio.Task[None] | None = None

    async def on_tick(self, counter: int) -> bool:
        if not await super().on_tick(counter):
            return False
        if self._drain is None:
            limit_s = self._trunk.config.server.drain_s
            self._drain = asyncio.get_running_loop().create_task(self._trunk.drain(limit_s))
        await asyncio.wait([self._drain], timeout=TICK_S)
        return self._drain.done() or self.force_exit


def uvicorn_config(app: Litestar, server: ServerConfig) -> uvicorn.Config:
    """How uvicorn is set up for us. `FrontProtocol` takes its limit from the same section."""
    relays = {path.encode(): relay for path, relay in app.state.relays.items()}
    protocol = type("Front", (FrontProtocol,), {"header_s": server.header_s, "relays": relays})
    files: dict[str, Any] = {}
    if server.tls_cert_file:
        files = {"ssl_certfile": server.tls_cert_file, "ssl_keyfile": server.tls_key_file}
    return uvicorn.Config(
        app,
        interface="asgi3",
        host=server.host,
        port=server.port,
        http=protocol,
        loop="uvloop",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        date_header=False,
        timeout_keep_alive=max(1, int(server.idle_s)),
        timeout_graceful_shutdown=5,
        backlog=4096,
        **files,
    )
