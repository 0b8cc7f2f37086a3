"""Clients that send too much, too slowly, or nonsense: refused at the limit, cut in time, and never given a lease."""

import asyncio
import urllib.error
import urllib.request

import pytest

from tests.faults.test_cancel_many import resident_bytes
from tests.support.quiet import held, zero
from tests.support.site import POOL, Site, running
from tests.support.wire import Answer, Wire, chat_body, request, wire

GIB = 1 << 30
MIB = 1 << 20
LIMITS = "[server]\nheader_s = 0.3\nbody_s = 0.4\nidle_s = 1\nmax_body_bytes = 1048576\n"
SHORT = chat_body(max_tokens=2)


async def sent_until_refused(line: Wire, head: bytes, block: bytes) -> tuple[int, Answer]:
    """Sends blocks until the answer comes: how many bytes that took, and the answer."""
    await line.send(head)
    answer = asyncio.ensure_future(line.answer())
    sent = 0
    try:
        while not answer.done():
            await line.send(block)
            sent += len(block)
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    return sent, await answer


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_a_gibibyte_is_refused_at_the_limit(chunked: bool) -> None:
    async with running(LIMITS + POOL) as site:
        before = resident_bytes()
        head = request(b"").replace(b"content-length: 0", f"content-length: {GIB}".encode())
        block = b" " * 65_536
        if chunked:
            head = request(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
            block = b"10000\r\n" + block + b"\r\n"
        for _ in range(5):
            async with wire(site) as line:
                sent, answer = await sent_until_refused(line, head, block)
                assert (answer.status, answer.code, answer.headers["connection"]) == (413, "too_large", "close")
                assert sent < 32 * MIB
                await line.closed()
        await zero(site)
        assert resident_bytes() - before < 24 * MIB


async def test_who_sends_the_whole_of_a_body_that_is_too_large_reads_the_refusal() -> None:
    def post(url: str) -> int:
        """With a client that writes everything before it reads anything."""
        body, headers = b" " * (32 * MIB), {"content-type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    async with running(LIMITS.replace("body_s = 0.4", "body_s = 5") + POOL) as site:
        statuses = [await asyncio.to_thread(post, f"{site.url}/v1/chat/completions") for _ in range(5)]
        assert statuses == [413] * 5
        await zero(site)


async def test_an_expectation_is_refused_before_the_body_is_sent() -> None:
    async with running(LIMITS + POOL) as site, wire(site) as line:
        head = request(b"", "expect: 100-continue").replace(b"content-length: 0", f"content-length: {GIB}".encode())
        await line.send(head)
        assert (await line.answer()).status == 413


async def test_an_expectation_is_met() -> None:
    async with running(LIMITS + POOL) as site, wire(site) as line:
        data = request(SHORT, "expect: 100-continue")
        await line.send(data[: -len(SHORT)])
        assert (await line.head()).status == 100
        await line.send(SHORT)
        assert (await line.answer()).status == 200


async def drip(line: Wire, data: bytes, pause_s: float = 0.02) -> None:
    """Sends byte by byte until the other side has had enough."""
    try:
        for at in range(len(data)):
            await line.send(data[at : at + 1])
            await asyncio.sleep(pause_s)
    except ConnectionError:
        pass


async def test_a_head_that_drips_in_is_cut_off() -> None:
    async with running(LIMITS + POOL) as site, wire(site) as line, asyncio.TaskGroup() as group:
        dripping = group.create_task(drip(line, request(SHORT)))
        assert await line.closed() == b""
        assert not site.live()
        dripping.cancel()


async def test_a_second_head_that_drips_in_is_cut_off() -> None:
    async with running(LIMITS + POOL) as site, wire(site) as line, asyncio.TaskGroup() as group:
        await line.send(request(SHORT))
        assert (await line.answer()).status == 200
        dripping = group.create_task(drip(line, request(SHORT)))
        assert await line.closed() == b""
        dripping.cancel()


@pytest.mark.parametrize("before", [b"", request(SHORT)])
async def test_a_connection_on_which_no_request_begins_is_closed(before: bytes) -> None:
    async with running(LIMITS + POOL) as site, wire(site) as line:
        if before:
            await line.send(before)
            assert (await line.answer()).status == 200
        await line.send(b"\r\n")
        assert await line.closed() == b""


async def test_a_body_that_drips_in_gets_408_and_holds_no_lease() -> None:
    async with running(LIMITS + POOL) as site, wire(site) as line, asyncio.TaskGroup() as group:
        data = request(SHORT)
        await line.send(data[: -len(SHORT)])
        dripping = group.create_task(drip(line, SHORT))
        await site.until(lambda: len(site.live()) == 1)
        assert not site.trunk.queue.book.held
        assert not site.trunk.queue.book.waiting
        answer = await line.answer()
        assert (answer.status, answer.code, answer.headers["connection"]) == (408, "too_slow", "close")
        await line.closed()
        dripping.cancel()
        await zero(site)


async def test_a_hundred_slow_clients_keep_nobody_else_waiting() -> None:
    async with running(LIMITS.replace("body_s = 0.4", "body_s = 5") + POOL) as site:
        lines = [await asyncio.open_connection(*_address(site)) for _ in range(100)]
        try:
            for _, writer in lines:
                writer.write(request(SHORT)[:-3])
            await site.until(lambda: len(site.live()) == 100)
            async with site.chat(max_tokens=2) as answer:
                assert answer.status == 200
        finally:
            for _, writer in lines:
                writer.transport.abort()
        await zero(site)


def _address(site: Site) -> tuple[str, int]:
    host, port = site.url.removeprefix("http://").split(":")
    return host, int(port)


async def test_requests_sent_at_once_are_answered_in_order() -> None:
    async with running(LIMITS + POOL) as site, wire(site) as line:
        bodies = [SHORT, b"{}", chat_body(stream=True, max_tokens=2), SHORT]
        await line.send(b"".join(request(body) for body in bodies))
        assert [(await line.answer()).status for _ in bodies] == [200, 400, 200, 200]
        await zero(site)


async def test_who_leaves_with_requests_in_the_pipe_leaves_nothing() -> None:
    async with running(POOL) as site, wire(site) as line:
        await line.send(b"".join(request(chat_body(stream=True, max_tokens=500, min_tokens=500)) for _ in range(5)))
        await site.until(lambda: bool(site.live()))
        await line.head()
        line.leave()
        await zero(site)


NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # a TLS hello
    b"GET\r\n\r\n",
    b"GARBAGE / HTTP/1.1\r\n\r\n",
    b"POST /v1/chat/completions HTTP/3.7\r\n\r\n",
    b"POST http://[::1 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    b"CONNECT example:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    request(SHORT).replace(b"content-length: ", b"content-length: -"),
    request(SHORT).replace(b"content-length: ", b"content-length: 99999999999999999999999"),
    request(SHORT, "content-length: 3"),
    request(SHORT, "transfer-encoding: chunked"),
    request(SHORT).replace(b"host: test", b"host test"),
    request(SHORT).replace(b"host: test", b"ho\0st: test"),
    request(b"").replace(b"content-length: 0", b"transfer-encoding: chunked") + b"zz\r\nhello\r\n0\r\n\r\n",
    request(b"").replace(b"content-length: 0", b"transfer-encoding: chunked") + b"FFFFFFFFFFFFFFFFF\r\n",
]


async def test_what_is_no_http_gets_400_or_is_cut_off() -> None:
    async with running(LIMITS + POOL) as site:
        for data in NO_HTTP:
            async with wire(site) as line:
                await line.send(data)
                said = await line.closed()
            assert said == b"" or said.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200 OK")), (data, said)
            async with site.chat(max_tokens=1) as answer:
                assert answer.status == 200
        await zero(site)


async def test_heads_that_never_end_are_cut_off_before_they_fill_the_memory() -> None:
    async with running(POOL) as site:
        before = resident_bytes()
        for start in (b"POST /", b"GET /livez HTTP/1.1\r\nx: ", b"GET /livez HTTP/1.1\r\n"):
            async with wire(site) as line:
                await line.send(start)
                block = b"a: b\r\n" * 10_000 if start.endswith(b"\n") else b"x" * 60_000
                sent = 0
                with pytest.raises(ConnectionError):
                    while sent < 256 * MIB:
                        await line.send(block)
                        sent += len(block)
                assert sent < 64 * MIB
        assert resident_bytes() - before < 16 * MIB


async def test_a_client_of_http_1_0_gets_its_answer_and_the_end_of_the_connection() -> None:
    async with running(POOL) as site:
        async with wire(site) as line:
            await line.send(request(SHORT, version="1.0"))
            answer = await line.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await line.closed() == b""
        await zero(site)


async def test_a_head_request_is_answered() -> None:
    async with running(POOL) as site, wire(site) as line:
        for path in ("/livez", "/v1/models", "/nothing"):
            await line.send(f"HEAD {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert (await line.head()).status in (200, 404, 405)


async def test_an_upgrade_to_another_protocol_is_not_taken_up() -> None:
    async with running(POOL) as site:
        for protocol in ("h2c", "websocket"):
            async with wire(site) as line:
                await line.send(request(SHORT, "connection: upgrade", f"upgrade: {protocol}"))
                assert (await line.answer()).status == 200
                await line.send(request(SHORT))
                assert (await line.answer()).status == 200
        await zero(site)


async def test_who_is_gone_before_the_answer_leaves_nothing() -> None:
    async with running(POOL) as site:
        for _ in range(20):
            async with wire(site) as line:
                await line.send(request(SHORT))
                line.leave()
        await site.until(lambda: not held(site))
        await zero(site)


MEANINGLESS = [
    "x-request-id: \xe4\xf6\xfc",
    "x-request-id: a\tb",
    "traceparent: 00-zz-xx-99",
    "traceparent: \xff\xfe",
    "traceparent: " + "0" * 5_000,
    "x-api-key: \xff",
    "authorization: \xff\xfe \xff",
    "authorization: Bearer",
    "x-priority-class: standard",
    "content-encoding: identity",
    "x-stainless-read-timeout: NaN",
    "cookie: " + "a=b; " * 1_000,
]


async def test_header_values_that_mean_nothing_change_nothing() -> None:
    async with running(POOL) as site, wire(site) as line:
        for header in MEANINGLESS:
            await line.send(request(SHORT, header))
            answer = await line.answer()
            assert answer.status == 200, header
            assert answer.headers["x-request-id"].isalnum(), header


async def test_a_header_that_smuggles_a_line_ends_up_nowhere() -> None:
    async with running(POOL) as site, wire(site) as line:
        await line.send(request(SHORT, "x-request-id: a\rset-cookie: b"))
        said = await line.closed()
        assert b"set-cookie" not in said.lower()
