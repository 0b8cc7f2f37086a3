"""`/console`: a page for operators, and the stream of server-sent events that feeds it.

The page is the same for everyone and holds nothing; the stream wants an admin key in its header, which the page asks
for and keeps. So there is no cookie that another site could use, and any worker lets it in.
"""

import asyncio
import functools
from pathlib import Path
from typing import Any

from litestar import Request, Response, get
from litestar.exceptions import NotFoundException
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath
from litestar.types import Receive, Scope, Send

from gateway.http.admin import admin_guard
from gateway.http.line import AsgiLine, Header
from gateway.http.problems import respond
from gateway.ring import Denied
from gateway.telemetry.audience import FULL, Audience, Full
from gateway.trunk import Trunk
from policies.reasons import Reason, Refusal

FILES = Path(__file__).with_name("console")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE = "index.html"
STALL_S = 10.0
"""How long a viewer may leave a snapshot unread before it is cut off."""
OFF = "the console is off: configure server.admin_keys, server.admin_key_env or server.admin_key_file"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_SSE: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def console_routes(trunk: Trunk) -> list[BaseRouteHandler]:
    """The handlers; without an admin key they answer 404."""
    there = bool(trunk.tenants.admin)

    @get("/console", include_in_schema=False)
    async def page(request: Request[Any, Any, Any]) -> Response[bytes]:
        if there and request.scope["raw_path"].endswith(b"/"):  # its parts are named from where it stands
            return Response(b"", status_code=307, headers={"location": "../console"})
        return await _file(PAGE) if there else _off()

    @get("/console/{name:str}", include_in_schema=False)
    async def part(name: FromPath[str]) -> Response[bytes]:
        return await _file(name) if there else _off()

    @get("/console/feed", guards=[admin_guard], exception_handlers={Denied: _denied}, include_in_schema=False)
    async def feed() -> Feed:
        return Feed(trunk.audience)

    return [page, part, feed]


class Feed:
    """An ASGI application: one viewer, until it leaves or the process ends."""

    def __init__(self, audience: Audience) -> None:
        self._audience = audience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._audience.seat():
                await self._watched(AsgiLine(scope, receive, send))
        except Full:
            await respond(FULL).to_asgi_response(None, Request(scope))(scope, receive, send)

    async def _watched(self, line: AsgiLine) -> None:
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(self._tell(line))
            await line.gone()
            telling.cancel()

    async def _tell(self, line: AsgiLine) -> None:
        """The head goes out with the first snapshot: what fails before it has an honest status."""
        text = await self._audience.snapshot()
        line.start(200, [*_SSE])
        while True:
            line.write(b"data: %b\n\n" % text, more=True)
            if not await _read(line):
                return
            if not await self._audience.next():
                break
            text = await self._audience.snapshot()
        line.write(b"", more=False)
        await _read(line)


async def _read(line: AsgiLine) -> bool:
    """Whether the viewer takes it in. One that does not is cut off; until then it misses snapshots, none pile up."""
    try:
        async with asyncio.timeout(STALL_S):
            await line.drain()
    except TimeoutError:
        line.abort()
        return False
    return True


async def _file(name: str) -> Response[bytes]:
    content = (await asyncio.to_thread(_files)).get(name)
    if content is None:
        raise NotFoundException
    return Response(content, media_type=TYPES[Path(name).suffix], headers=_HEADERS)


@functools.cache
def _files() -> dict[str, bytes]:
    """All that may be asked for, by name."""
    return {file.name: file.read_bytes() for file in FILES.iterdir() if file.suffix in TYPES}


def _off() -> Response[bytes]:
    return respond(Refusal(Reason.NOT_FOUND, OFF))


def _denied(_: Request[Any, Any, Any], error: Denied) -> Response[bytes]:
    return respond(error.refusal)
