"""The HTTP client on real sockets: kept and stale connections, deadlines, back pressure, leaving."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.http1 import Pool, Timing
from backends.http1_errors import Broken, HttpError, NotConnected, TooLate
from backends.http1_wire import HIGH_BYTES
from tests.contract.remote.conftest import settled
from tests.contract.remote.wire import GET, fetch, post
from tests.support.fault_server import Answer, Do, FaultServer, chunked, closing, sized

MakePool = Callable[..., Pool]


OK = (sized(b"{}"),)


async def test_a_connection_is_used_again_the_last_one_first(pool_to: MakePool) -> None:
    async with FaultServer(OK) as server:
        pool = pool_to(server.url)
        await asyncio.gather(*(fetch(pool) for _ in range(3)))
        assert (pool.made, pool.reused, pool.idle) == (3, 0, 3)
        for _ in range(5):
            assert await fetch(pool) == (200, b"{}")
        assert (pool.made, pool.reused, pool.idle) == (3, 5, 3)
        assert sorted(map(len, server.requests)) == [1, 1, 6]
        assert repr(pool) == f"<Pool {server.url}: 3 open, 3 idle, 0 retried>"


async def test_a_stale_connection_costs_one_retry(pool_to: MakePool) -> None:
    for how in (Do.FIN, Do.RST):
        async with FaultServer(OK, (how,), OK) as server:
            pool = pool_to(server.url)
            await fetch(pool)
            assert await fetch(pool, post(b"body"), b"body") == (200, b"{}")
            assert (pool.made, pool.reused, pool.retried) == (2, 1, 1)
            assert [len(heard) for heard in server.requests] == [2, 1]


async def test_a_second_failure_is_not_retried(pool_to: MakePool) -> None:
    async with FaultServer(OK, (Do.FIN,), (Do.FIN,)) as server:
        pool = pool_to(server.url)
        await fetch(pool)
        with pytest.raises(Broken):
            await fetch(pool)
        assert server.heard == 3
        assert pool.retried == 1


async def test_a_fresh_connection_is_not_retried(pool_to: MakePool) -> None:
    async with FaultServer((Do.FIN,)) as server:
        pool = pool_to(server.url)
        with pytest.raises(Broken, match="before any answer"):
            await fetch(pool)
        assert (server.heard, pool.retried) == (1, 0)


async def test_not_after_a_byte_of_the_answer(pool_to: MakePool) -> None:
    async with FaultServer(OK, (b"HTTP/1.1 2", Do.TICK, Do.FIN)) as server:
        pool = pool_to(server.url)
        await fetch(pool)
        with pytest.raises(Broken, match="middle"):
            await fetch(pool)
        assert (server.heard, pool.retried) == (2, 0)


async def test_a_connection_closed_while_idle_is_dropped_without_a_retry(pool_to: MakePool) -> None:
    for end in ((sized(b"{}"), Do.TICK, Do.FIN), (sized(b"{}"), Do.TICK, b"HTTP/1.1 408 Bye\r\n\r\n", Do.FIN)):
        async with FaultServer(end, OK) as server:
            pool = pool_to(server.url)
            await fetch(pool)
            async with asyncio.timeout(2):
                while len(pool):
                    await asyncio.sleep(0.001)
            assert await fetch(pool) == (200, b"{}")
            assert pool.retried == 0


async def test_connection_close_is_obeyed(pool_to: MakePool) -> None:
    for answer in (sized(b"{}", more=b"connection: close\r\n"), b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}"):
        async with FaultServer((answer,)) as server:
            pool = pool_to(server.url)
            assert await fetch(pool) == (200, b"{}")
            assert pool.idle == 0
            assert await fetch(pool) == (200, b"{}")
            assert len(server.requests) == 2


async def test_idle_connections_are_closed_in_time(pool_to: MakePool) -> None:
    async with FaultServer(OK) as server:
        pool = pool_to(server.url, Timing(keep_s=0.1))
        await asyncio.gather(*(fetch(pool) for _ in range(3)))
        assert len(pool) == 3
        await server.until(lambda: server.gone == 3)
        assert len(pool) == 0


async def test_an_idle_connection_past_its_time_is_not_used(pool_to: MakePool) -> None:
    async with FaultServer(OK) as server:
        pool = pool_to(server.url, Timing(keep_s=4.0))
        await fetch(pool)
        pool._idle[0].idle_since -= 4.5
        await fetch(pool)
        assert (pool.made, pool.reused) == (2, 0)


async def test_no_answer_in_time(pool_to: MakePool) -> None:
    for start in ((), (b"HTTP/1.1 200",), (chunked(end=b""),)):
        async with FaultServer((*start, Do.HANG)) as server:
            pool = pool_to(server.url, Timing(first_byte_s=0.1))
            with pytest.raises(TooLate):
                await fetch(pool)
            await server.until(lambda: server.gone == 1)


async def test_a_head_that_trickles_is_too_late(pool_to: MakePool) -> None:
    trickle: Answer = [step for byte in sized(b"{}")[:-2] * 40 for step in (bytes([byte]), Do.TICK)]
    async with FaultServer((b"HTTP/1.1 200 OK\r\nx: ", *(s for s in trickle if s not in (b"\r", b"\n")))) as server:
        pool = pool_to(server.url, Timing(first_byte_s=0.15))
        with pytest.raises(TooLate, match=r"within 0\.1 s|within 0\.2 s"):
            await fetch(pool)


async def test_one_request_may_have_less_time(pool_to: MakePool) -> None:
    async with FaultServer((Do.HANG,)) as server:
        pool = pool_to(server.url, Timing(first_byte_s=60.0, idle_s=0.2))
        with pytest.raises(TooLate):
            await fetch(pool, first_byte_s=0.1)


async def test_silence_between_chunks(pool_to: MakePool) -> None:
    async with FaultServer((chunked(b"a", end=b""), Do.HANG)) as server:
        pool = pool_to(server.url, Timing(idle_s=0.1))
        with pytest.raises(TooLate, match="middle"):
            await fetch(pool)


async def test_a_long_answer_is_fine_while_it_moves(pool_to: MakePool) -> None:
    parts = [step for _ in range(150) for step in (b"1\r\nx\r\n", Do.TICK)]
    async with FaultServer((chunked(end=b""), *parts, b"0\r\n\r\n")) as server:
        pool = pool_to(server.url, Timing(first_byte_s=0.12, idle_s=0.12))
        started = asyncio.get_running_loop().time()
        assert await fetch(pool) == (200, b"x" * 150)
        assert asyncio.get_running_loop().time() - started > 0.12


async def test_nothing_but_framing_does_not_count_as_moving(pool_to: MakePool) -> None:
    parts = [step for _ in range(2000) for step in (b"e", Do.TICK)]
    async with FaultServer((chunked(b"a", end=b"1;"), *parts)) as server:
        pool = pool_to(server.url, Timing(idle_s=0.1))
        with pytest.raises(TooLate):
            await fetch(pool)


async def test_a_large_body_arrives_whole(pool_to: MakePool) -> None:
    body = bytes(range(256)) * 16384  # 4 MiB
    async with FaultServer(OK) as server:
        pool = pool_to(server.url)
        assert await fetch(pool, post(body), body) == (200, b"{}")
        assert await fetch(pool, post(body), body) == (200, b"{}")
        assert server.requests[0] == [post(body) + body] * 2


async def test_a_large_body_is_written_again_after_a_stale_connection(pool_to: MakePool) -> None:
    body = b"x" * (1 << 20)
    async with FaultServer(OK, (Do.FIN,), OK) as server:
        pool = pool_to(server.url)
        await fetch(pool)
        assert await fetch(pool, post(body), body) == (200, b"{}")
        assert server.requests[1] == [post(body) + body]


async def test_an_engine_that_does_not_take_a_body_holds_it_back(pool_to: MakePool) -> None:
    body = b"x" * (64 << 20)
    async with FaultServer((Do.HANG,), reads=False) as server:
        pool = pool_to(server.url, Timing(first_byte_s=0.3))
        task = asyncio.ensure_future(fetch(pool, post(body), body))
        await server.until(lambda: server.heard == 1)
        (connection,) = pool._open
        assert connection.transport is not None
        assert connection.transport.get_write_buffer_size() <= 2 * HIGH_BYTES
        with pytest.raises((TooLate, Broken)):
            await task


async def test_an_early_answer_to_a_large_body(pool_to: MakePool) -> None:
    body = b"x" * (32 << 20)
    async with FaultServer((sized(b"{}", b"413 Too Large"), Do.HANG), reads=False) as server:
        pool = pool_to(server.url)
        assert await fetch(pool, post(body), body) == (413, b"{}")
        assert pool.idle == 0


async def test_a_reader_that_does_not_read_holds_the_engine_back(pool_to: MakePool) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(1024):
            writer.write(b"x" * 65536)
            sent += 65536
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    pool = pool_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    asked = await pool.ask(GET)
    answer = await asked.answered()
    before = -1
    while before != sent:
        before = sent
        await asyncio.sleep(0.05)
    assert sent < 16 << 20  # what the kernel's buffers take, and a little
    assert len(await answer.read()) <= HIGH_BYTES + (256 << 10)
    total = HIGH_BYTES
    while data := await answer.read():
        total += len(data)
    assert total >= (63 << 20)
    asked.release()
    server.close()


@pytest.mark.parametrize("start", [(), (chunked(b"a", end=b""),), (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab",)])
async def test_the_engine_hears_of_a_leaver_at_once(pool_to: MakePool, start: Answer) -> None:
    async with FaultServer((*start, Do.HANG)) as server:
        pool = pool_to(server.url)
        task = asyncio.ensure_future(fetch(pool))
        await server.until(lambda: server.heard == 1)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.until(lambda: server.gone == 1, 0.1)


async def test_closing_the_pool_ends_everything(pool_to: MakePool) -> None:
    async with FaultServer(OK, (Do.HANG,)) as server:
        pool = pool_to(server.url)
        await fetch(pool)
        task = asyncio.ensure_future(fetch(pool))
        await server.until(lambda: server.heard == 2)
        pool.close()
        pool.close()
        with pytest.raises(Broken, match="closed"):
            await task
        with pytest.raises(NotConnected, match="closed"):
            await fetch(pool)


async def test_giving_up_a_request_that_is_being_written_again(pool_to: MakePool) -> None:
    async with FaultServer(OK, (Do.FIN,), (Do.HANG,)) as server:
        pool = pool_to(server.url)
        await fetch(pool)
        asked = await pool.ask(GET)
        waiter = asyncio.ensure_future(asked.answered())
        await server.until(lambda: server.heard == 3)
        asked.release()
        with pytest.raises(Broken, match="given up"):
            await waiter


@st.composite
def faulty(draw: st.DrawFn) -> tuple[Answer, bytes, bool]:
    """The steps of an answer, its true body, and whether the client must get it."""
    body = draw(st.binary(max_size=400))
    kind = draw(st.sampled_from(["sized", "chunked", "closing"]))
    if kind == "sized":
        data = sized(body)
    elif kind == "closing":
        data = closing(body)
    else:
        size = draw(st.integers(1, 100))
        data = chunked(*(body[i : i + size] for i in range(0, len(body), size)))
    cut = draw(st.none() | st.integers(0, len(data) - 1))
    whole = cut is None and kind != "closing"
    data = data[:cut]
    at = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    steps: list[bytes | Do] = []
    for start, end in zip([0, *at], [*at, len(data)], strict=True):
        steps += [Do.TICK, data[start:end]] if end > start else []
    if whole and isinstance(last := steps[-1], bytes):
        # garbage, in one piece with the end: what came later could be taken for the answer to the next request
        steps[-1] = last + draw(st.binary(max_size=30))
    if not whole or draw(st.booleans()):
        steps.append(Do.FIN if kind == "closing" or draw(st.booleans()) else Do.RST)
    return steps, body, whole


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(faulty(), min_size=1, max_size=4))
async def test_either_the_body_or_one_of_our_errors(
    pool_to: MakePool, answers: list[tuple[Answer, bytes, bool]]
) -> None:
    async with FaultServer(*(steps for steps, _, _ in answers)) as server, asyncio.timeout(10):
        pool = pool_to(server.url)
        for _ in range(len(answers) + 1):
            heard = server.heard
            try:
                status, got = await fetch(pool)
            except HttpError:
                got, status = b"", 0
            steps, body, whole = answers[min(max(server.heard - 1, heard), len(answers) - 1)]
            if status:
                assert status == 200
                assert got == body if whole else body.startswith(got)
            elif whole:
                assert Do.RST in steps  # may overtake what was sent before it
        await settled(pool)
