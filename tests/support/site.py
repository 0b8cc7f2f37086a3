"""A whole gateway under test: the real server on a loopback port, in the test's own event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from gateway.app import build
from gateway.config import Config, decode
from gateway.exchange import Exchange
from gateway.server import Server, uvicorn_config
from gateway.trunk import Trunk

POOL = """
[[pool]]
model = "demo"
[[pool.backend]]
kind = "simulated"
name = "one"
a0_ms = 1.0
limits = { max_running = 4 }
"""


class Site:
    """A running gateway and a client for it."""

    def __init__(self, trunk: Trunk, url: str, client: aiohttp.ClientSession) -> None:
        self.trunk, self.url, self.client = trunk, url, client

    def chat(self, text: str = "Hello there", headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """A chat request as aiohttp's context manager."""
        body = {"model": "demo", "messages": [{"role": "user", "content": text}], **fields}
        return self.client.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)

    def live(self) -> list[Exchange]:
        """The exchanges between their first byte and their end."""
        return [request.exchange for request in self.trunk.ticker.members()]

    async def until(self, condition: Any, within_s: float = 10.0) -> None:
        """Wait until `condition()` holds. Looks every few milliseconds: what is watched has no event of its own."""
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running(config: Config | str = POOL) -> AsyncIterator[Site]:
    """A gateway of this configuration, ready to serve; drained and checked for leftovers at the end."""
    app = build(decode(config.encode()) if isinstance(config, str) else config)
    trunk: Trunk = app.state.trunk
    server = Server(uvicorn_config(app, trunk.config.server), trunk)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]

    def crashed() -> None:
        server.should_exit = True

    trunk.supervisor.on_crash = crashed
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(20):
            while not (server.started and trunk.ready):
                if serving.done():
                    serving.result()
                await asyncio.sleep(0.01)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as client:
            yield Site(trunk, f"http://127.0.0.1:{port}", client)
    finally:
        server.should_exit = True
        await serving
    assert trunk.supervisor.crashed is None, f"a background task crashed: {trunk.supervisor.crashed}"
