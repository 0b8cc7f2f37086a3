"""A client on a bare socket, for what no library would send."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct

from tests.support.site import Site

PATH = "/v1/chat/completions"


class Answer(Struct):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The reason in an error body."""
        found: str = self.json()["error"]["code"]
        return found


def chat_body(text: str = "Hello there", **fields: Any) -> bytes:
    return json.dumps({"model": "demo", "messages": [{"role": "user", "content": text}], **fields}).encode()


def request(body: bytes, *lines: str, path: str = PATH, version: str = "1.1") -> bytes:
    """A POST with this body and its length; `lines` are further header lines."""
    head = [f"POST {path} HTTP/{version}", "host: test", "content-type: application/json", *lines]
    return "\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode("latin-1") + body


class Wire:
    """One connection. Reads time out after 10 s, so that a test that waits for nothing fails."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Answer:
        """The next answer's head; its body stays unread."""
        async with asyncio.timeout(10):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return Answer(int(first.split()[1]), headers, b"")

    async def answer(self) -> Answer:
        """The next answer, whole."""
        answer = await self.head()
        async with asyncio.timeout(10):
            if "content-length" in answer.headers:
                answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
            elif answer.headers.get("transfer-encoding") == "chunked":
                answer.body = b"".join([part async for part in self.parts()])
        return answer

    async def parts(self) -> AsyncIterator[bytes]:
        """The chunks of a chunked body."""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    async def part(self) -> bytes:
        """The next chunk of a chunked body, empty at its end."""
        async with asyncio.timeout(10):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def closed(self) -> bytes:
        """Wait until the other side has closed; what came before it."""
        async with asyncio.timeout(10):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    def leave(self) -> None:
        """Be gone at once, as a killed client is."""
        self.writer.transport.abort()


@asynccontextmanager
async def wire(site: Site, receive_bytes: int = 0) -> AsyncIterator[Wire]:
    """A connection to the site; `receive_bytes` bounds what it takes in without being read."""
    host, port = site.url.removeprefix("http://").split(":")
    limit = receive_bytes or 2**16
    reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def events(body: bytes) -> list[Any]:
    """The data of the SSE events of a whole stream, decoded; `[DONE]` and comments as they are."""
    found: list[Any] = []
    for block in body.split(b"\n\n"):
        for line in block.split(b"\n"):
            if line.startswith(b"data: "):
                data = line[6:].decode()
                found.append(data if data == "[DONE]" else json.loads(data))
    return found
