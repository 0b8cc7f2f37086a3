"""The plain relay that Signalbox is measured against: what one writes in Litestar and aiohttp in an afternoon.

No keys, no queue, no telemetry. `python -m bench.baseline_relay --port N --upstream URL`.
"""

import argparse
from collections.abc import AsyncIterator

import aiohttp
import uvicorn
from litestar import Litestar, Request, Response, post
from litestar.datastructures import State
from litestar.response import Stream


@post("/v1/chat/completions", status_code=200)
async def chat(request: Request[None, None, State]) -> Response[bytes] | Stream:
    session: aiohttp.ClientSession = request.app.state.session
    headers = {"content-type": "application/json"}
    answer = await session.post("/v1/chat/completions", data=await request.body(), headers=headers)
    if not answer.content_type.startswith("text/event-stream"):
        return Response(await answer.read(), status_code=answer.status, media_type=answer.content_type)

    async def pump() -> AsyncIterator[bytes]:
        async with answer:
            async for data in answer.content.iter_any():
                yield data

    return Stream(pump(), status_code=answer.status, media_type="text/event-stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True)
    args = parser.parse_args()

    async def connect(app: Litestar) -> None:
        app.state.session = aiohttp.ClientSession(args.upstream, connector=aiohttp.TCPConnector(limit=0))

    async def disconnect(app: Litestar) -> None:
        await app.state.session.close()

    app = Litestar([chat], on_startup=[connect], on_shutdown=[disconnect])
    uvicorn.run(app, port=args.port, loop="uvloop", http="httptools", access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
