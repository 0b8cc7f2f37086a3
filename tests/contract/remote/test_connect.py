"""How the HTTP client gets its connections: URLs, TLS, unix sockets, bounds, and what goes wrong on the way."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.http1 import Pool, Timing, parse_url, tls_context
from backends.http1_errors import Crowded, NotConnected
from tests.contract.remote.conftest import settled
from tests.contract.remote.wire import CERTS, fetch, server_tls
from tests.support.fault_server import Do, FaultServer, chunked, sized

MakePool = Callable[..., Pool]


OK = (sized(b"{}"),)


async def test_nobody_listens(pool_to: MakePool) -> None:
    async with FaultServer(OK) as server:
        url = server.url
    pool = pool_to(url)
    with pytest.raises(NotConnected, match="cannot connect"):
        await fetch(pool)
    with pytest.raises(NotConnected, match="cannot connect"):
        await fetch(pool_to("unix:/nowhere/engine.sock"))
    with pytest.raises(NotConnected, match="cannot connect"):
        await fetch(pool_to("http://name.invalid:1"))


async def test_a_handshake_that_hangs_is_not_connected(pool_to: MakePool) -> None:
    async with FaultServer(OK, early=(Do.HANG,)) as server:
        pool = pool_to(server.url.replace("http:", "https:"), Timing(connect_s=0.1), tls=tls_context(verify=False))
        with pytest.raises(NotConnected, match=r"within 0\.1 s"):
            await fetch(pool)
        assert len(pool) == 0


async def test_leaving_while_it_connects(pool_to: MakePool) -> None:
    async with FaultServer(OK, early=(Do.HANG,)) as server:
        pool = pool_to(server.url.replace("http:", "https:"), tls=tls_context(verify=False))
        task = asyncio.ensure_future(fetch(pool))
        await server.until(lambda: len(server.requests) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.until(lambda: server.gone + (not server.live) > 0)
        assert len(pool) == 0


async def test_tls_with_our_authority(pool_to: MakePool) -> None:
    async with await FaultServer(OK, (Do.FIN,), (chunked(b"a", b"b", media=b"x/y"),)).start(server_tls()) as server:
        pool = pool_to(server.url, tls=tls_context(str(CERTS / "ca.pem")))
        assert await fetch(pool) == (200, b"{}")
        assert await fetch(pool) == (200, b"ab")
        assert pool.retried == 1


async def test_tls_with_another_authority_is_refused(pool_to: MakePool) -> None:
    async with await FaultServer(OK).start(server_tls()) as server:
        with pytest.raises(NotConnected, match="certificate"):
            await fetch(pool_to(server.url, tls=tls_context()))
        assert server.heard == 0


async def test_tls_for_another_name_is_refused(pool_to: MakePool) -> None:
    async with await FaultServer(OK).start(server_tls()) as server:
        url = server.url.replace("localhost", "127.0.0.1")
        with pytest.raises(NotConnected, match="certificate"):
            await fetch(pool_to(url, tls=tls_context(str(CERTS / "ca.pem"))))
        assert await fetch(pool_to(url, tls=tls_context(verify=False))) == (200, b"{}")


async def test_a_unix_socket(pool_to: MakePool, tmp_path: Path) -> None:
    async with await FaultServer(OK).start(unix=str(tmp_path / "s")) as server:
        pool = pool_to(server.url)
        assert await fetch(pool) == (200, b"{}")
        assert await fetch(pool) == (200, b"{}")
        assert pool.reused == 1


async def test_more_connections_than_allowed_are_refused(pool_to: MakePool) -> None:
    async with FaultServer((Do.HANG,), (Do.HANG,), OK) as server:
        pool = pool_to(server.url, most=2)
        tasks = [asyncio.ensure_future(fetch(pool)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Crowded):
            await fetch(pool)
        await server.until(lambda: server.heard == 2)
        with pytest.raises(Crowded):
            await fetch(pool)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await settled(pool)
        assert await fetch(pool) == (200, b"{}")


GOOD = [
    ("http://engine", "http://engine", "engine"),
    ("http://engine:8000/", "http://engine:8000", "engine:8000"),
    ("https://engine:443/v1", "https://engine", "engine"),
    ("https://engine/llm/v1/", "https://engine/llm", "engine"),
    ("http://[::1]:80/a", "http://[::1]/a", "[::1]"),
    ("unix:/run/e.sock", "unix:/run/e.sock", "localhost"),
    ("unix:///run/e.sock", "unix:/run/e.sock", "localhost"),
]


BAD = [
    ("engine:8000", "start with"),
    ("ftp://engine", "start with"),
    ("http://", "names no host"),
    ("http://a:b@engine", "api_key_env"),
    ("http://engine/?x=1", "query"),
    ("http://engine:99999", "ort"),
    ("http://engine:0", "port 0"),
    ("http://engine:x", "ort"),
    ("http://en gine", "not a URL"),
    ("http://engine\r\nx: y", "not a URL"),
    ("unix:run/e.sock", "unix:/path"),
    ("", "start with"),
]


@pytest.mark.parametrize(("url", "shown", "authority"), GOOD)
def test_urls(url: str, shown: str, authority: str) -> None:
    origin = parse_url(url)
    assert (str(origin), origin.authority) == (shown, authority)


@pytest.mark.parametrize(("url", "says"), BAD)
def test_bad_urls(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_url(url)
