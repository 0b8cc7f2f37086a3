"""Load for overhead measurements: callers in a closed loop, and paced streams.

`python -m bench.load WISH` takes a Wish as JSON and prints one RESULT line, in the form of `bench/chat.lua`. With a
pace it holds streams open and prints a BEGIN line after the warm-up and an END line, each with the chunks so far.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop
from msgspec import Struct

TEXT = "Say something short about rivers."


class Wish(Struct, frozen=True):
    """What the callers ask for, and for how long. `itl_ms` 0 is as fast as it goes."""

    url: str
    model: str = "mock"
    key: str = ""
    concurrency: int = 32
    stream: bool = False
    tokens: int = 16
    itl_ms: float = 0.0
    seconds: float = 2.0
    warm_up_s: float = 0.0

    def request(self) -> bytes:
        site = urlsplit(self.url)
        body: dict[str, object] = {"model": self.model, "messages": [{"role": "user", "content": TEXT}]}
        body |= {"max_tokens": self.tokens, "stream": self.stream}
        if self.itl_ms:
            body["user"] = f"itl_ms={self.itl_ms:g}"
        data = msgspec.json.encode(body)
        lines = [f"POST {site.path} HTTP/1.1", f"host: {site.netloc}", "content-type: application/json"]
        lines += [f"content-length: {len(data)}", *([f"authorization: Bearer {self.key}"] if self.key else [])]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


class Result(Struct):
    """What a run of whole requests came to."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    errors: int


class Mark(Struct):
    """Where a paced run stands: chunks received and requests failed so far, seconds since its start."""

    chunks: int
    seconds: float
    errors: int


class Tally:
    """What all callers together have seen."""

    def __init__(self) -> None:
        self.latencies_s: list[float] = []
        self.chunks = 0
        self.errors = 0
        self.ended = False


class Caller(asyncio.Protocol):
    """One connection that asks again as soon as it has its answer."""

    def __init__(self, request: bytes, tally: Tally) -> None:
        self._request, self._tally = request, tally
        self._loop = asyncio.get_running_loop()
        self._sent_s = 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._tally.ended:
            self._tally.errors += 1

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._tally.chunks += data.count(b"data: {")

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            self._tally.errors += 1
        self._tally.latencies_s.append(time.perf_counter() - self._sent_s)
        self._loop.call_soon(self._ask)

    def _ask(self) -> None:
        if self._transport.is_closing():
            return
        self._parser = httptools.HttpResponseParser(self)
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)


async def call(wish: Wish) -> Result:
    """Whole requests, one after the other on each connection."""
    tally = Tally()
    started_s = time.perf_counter()
    async with _connected(wish, tally):
        await asyncio.sleep(wish.seconds)
        seconds = time.perf_counter() - started_s
    times = sorted(tally.latencies_s) or [0.0]
    return Result(
        requests=len(tally.latencies_s),
        seconds=seconds,
        p50_ms=times[len(times) // 2] * 1e3,
        p99_ms=times[len(times) * 99 // 100] * 1e3,
        errors=tally.errors,
    )


async def hold(wish: Wish) -> None:
    """Paced streams, their beginnings spread over the first part of the warm-up."""
    tally = Tally()
    started_s = time.perf_counter()
    async with _connected(wish, tally, spread_s=wish.warm_up_s / 2):
        await asyncio.sleep(started_s + wish.warm_up_s - time.perf_counter())
        for name in ("BEGIN", "END"):
            mark = Mark(tally.chunks, time.perf_counter() - started_s, tally.errors)
            print(name, msgspec.json.encode(mark).decode(), flush=True)
            await asyncio.sleep(wish.seconds if name == "BEGIN" else 0)


@asynccontextmanager
async def _connected(wish: Wish, tally: Tally, spread_s: float = 0.0) -> AsyncIterator[None]:
    """All callers at work; cut off at the end, whatever they wait for then."""
    site, request = urlsplit(wish.url), wish.request()
    host, port = site.hostname or "127.0.0.1", site.port or 80
    loop, transports = asyncio.get_running_loop(), []
    try:
        for _ in range(wish.concurrency):
            transport, _ = await loop.create_connection(lambda: Caller(request, tally), host, port)
            transports.append(transport)
            await asyncio.sleep(spread_s / wish.concurrency)
        yield
    finally:
        tally.ended = True
        for transport in transports:
            transport.abort()
        await asyncio.sleep(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wish", help="a Wish, as JSON")
    wish = msgspec.json.decode(parser.parse_args().wish, type=Wish)
    if wish.itl_ms:
        uvloop.run(hold(wish))
    else:
        print("RESULT", msgspec.json.encode(uvloop.run(call(wish))).decode())


if __name__ == "__main__":
    main()
