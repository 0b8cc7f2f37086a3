"""The same application under another ASGI server's protocol: nothing needs ours."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.app import build
from gateway.config import decode
from gateway.trunk import Trunk
from tests.support.quiet import zero
from tests.support.site import POOL, Site


@asynccontextmanager
async def mounted(config: str = POOL) -> AsyncIterator[Site]:
    app = build(decode(config.encode()))
    trunk: Trunk = app.state.trunk
    settings = uvicorn.Config(app, http=H11Protocol, ws="none", lifespan="on", access_log=False, log_config=None)
    server = uvicorn.Server(settings)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(20):
                while not (server.started and trunk.ready):
                    await asyncio.sleep(0.01)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as client:
                yield Site(trunk, f"http://127.0.0.1:{port}", client)
        finally:
            server.should_exit = True
            await serving


async def test_whole_and_streamed_answers() -> None:
    async with mounted() as site:
        async with site.chat(max_tokens=4) as response:
            whole = await response.json()
            assert response.status == 200
            assert response.headers["content-length"] == str(len(await response.read()))
        async with site.chat(max_tokens=4, stream=True) as response:
            text = await response.text()
        assert whole["usage"]["completion_tokens"] == 4
        assert text.endswith("data: [DONE]\n\n")
        await zero(site)


async def test_a_refusal_says_why_and_closes_what_was_not_read() -> None:
    async with mounted() as site:
        async with site.chat(model="nothing") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "unknown_model")
        url = f"{site.url}/v1/chat/completions"
        async with site.client.post(url, data=b"{}", headers={"content-type": "text/plain"}) as response:
            assert (response.status, response.headers["connection"]) == (415, "close")
        await zero(site)


async def test_a_client_that_leaves_is_noticed() -> None:
    async with mounted() as site:
        async with site.chat(max_tokens=10_000, stream=True) as response:
            await response.content.readany()
            response.close()
        await site.until(lambda: not site.live())
        await zero(site)
