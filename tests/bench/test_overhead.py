"""The overhead benchmark cannot rot: its upstream, its load, its arithmetic, and the whole of it in short."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from bench.load import Mark, Wish, call, hold
from bench.mock_openai import Connection, Stats
from bench.overhead import judge, judge_traces, medians, table
from tests.contract.bench import events

ASK = {"model": "mock", "messages": [], "max_tokens": 3}


@asynccontextmanager
async def upstream() -> AsyncIterator[tuple[str, Stats]]:
    stats = Stats()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(stats, 0.0, 0.0), "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/chat/completions", stats


async def exchange(url: str, *pieces: bytes) -> bytes:
    """What the upstream answers to a request sent in pieces, until it is silent."""
    port = int(url.split(":")[2].split("/", maxsplit=1)[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.01)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def post(**fields: object) -> bytes:
    body = msgspec.json.encode({**ASK, **fields})
    return b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def dechunked(answer: bytes) -> bytes:
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b"".join(parts)


async def test_the_upstream_answers_whole_and_streamed() -> None:
    async with upstream() as (url, stats):
        whole = msgspec.json.decode((await exchange(url, post())).partition(b"\r\n\r\n")[2])
        assert whole["choices"][0]["message"]["content"] == " token token token"
        assert whole["usage"]["completion_tokens"] == 3
        told = events(dechunked(await exchange(url, post(stream=True, stream_options={"include_usage": True}))))
        assert told[-1] == "[DONE]"
        assert told[-2]["usage"]["completion_tokens"] == 3
        assert len(told) == 1 + 3 + 1 + 1 + 1
        assert (stats.requests, stats.completed, stats.aborted) == (2, 2, 0)


async def test_the_upstream_reads_bodies_in_pieces_and_in_chunks() -> None:
    async with upstream() as (url, _):
        data = post()
        for cut in range(1, len(data), 17):
            assert (await exchange(url, data[:cut], data[cut:])).startswith(b"HTTP/1.1 200")
        body = msgspec.json.encode(ASK)
        head = b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:])) + b"0\r\n\r\n"
        whole = await exchange(url, head + chunks[:20], chunks[20:])
        assert b'" token token token"' in whole


async def test_the_upstream_counts_those_who_leave() -> None:
    async with upstream() as (url, stats):
        await exchange(url, post(stream=True, user="itl_ms=1000", max_tokens=50)[:-1])
        assert stats.requests == 0
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2].split("/")[0]))
        writer.write(post(stream=True, user="itl_ms=1000", max_tokens=50))
        assert (await reader.readuntil(b" token")).startswith(b"HTTP/1.1 200")
        writer.close()
        async with asyncio.timeout(5):
            while not stats.aborted:
                await asyncio.sleep(0.005)
        assert stats.completed == 0


async def test_callers_count_every_answer() -> None:
    async with upstream() as (url, stats):
        result = await call(Wish(url, concurrency=3, seconds=0.2))
        assert result.errors == 0
        assert 0 < result.requests <= stats.completed <= result.requests + 3  # in flight at the end
        assert 0 < result.p50_ms <= result.p99_ms


async def test_callers_count_errors() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 Oh no\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        result = await call(Wish(url, concurrency=2, seconds=0.1))
    assert result.errors >= 2


async def test_paced_streams_are_marked_at_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    async with upstream() as (url, stats):
        await hold(Wish(url, concurrency=4, stream=True, tokens=1_000, itl_ms=10.0, seconds=0.3, warm_up_s=0.1))
        lines = capsys.readouterr().out.splitlines()
        begin, end = (msgspec.json.decode(line.split(" ", 1)[1], type=Mark) for line in lines)
        assert [line.split()[0] for line in lines] == ["BEGIN", "END"]
        assert (begin.errors, end.errors) == (0, 0)
        assert 20 < end.chunks - begin.chunks < 400  # about 120: 4 streams, 100 a second each, 0.3 s
        assert stats.requests == 4


def test_verdicts_go_by_the_median_of_each_rounds_ratio() -> None:
    fields = ("requests_per_s", "request_cpu_us", "streams_per_s", "stream_cpu_us")
    ours = dict(zip(fields, ([20.0, 30.0, 400.0], [10.0] * 3, [17.0] * 3, [10.0] * 3), strict=True))
    theirs = dict(zip(fields, ([10.0, 10.0, 100.0], [30.0] * 3, [10.0] * 3, [10.0] * 3), strict=True))
    ours |= {"paced_chunk_cpu_us": [80.0, 60.0, 100.0], "added_p50_ms": [0.5, 0.6, 0.7]}
    samples = {"signalbox": ours, "relay": theirs, "smg": theirs}
    verdicts = judge(samples)
    assert [(verdict.measured, verdict.met) for verdict in verdicts] == [
        (3.0, True),
        (1.7, True),
        (80.0, False),
        (0.6, True),
        (3.0, True),
        (1.7, True),
    ]
    assert [verdict.by_cpu for verdict in verdicts] == [3.0, 1.0, None, None, 3.0, 1.0]
    text = table(medians(samples), verdicts)
    assert "MISSED" in text
    assert text.count(": met") == 5


def test_what_traces_may_cost() -> None:
    def rounds(*rates: float) -> dict[str, list[float]]:
        return {"requests_per_s": [*rates], "request_cpu_us": [1e6 / rate for rate in rates]}

    samples = {"untraced": rounds(100, 200), "at_1": rounds(97, 194), "at_100": rounds(79, 158)}
    one, every = judge_traces(samples)
    assert (one.measured, one.met) == (pytest.approx(0.97), True)
    assert (every.measured, every.met, every.by_cpu) == (pytest.approx(0.79), False, pytest.approx(0.79))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_measurement_of_traces_in_short() -> None:
    argv = [sys.executable, "-m", "bench.overhead", "--traces", "--quick", "--no-wrk"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "requests_per_s at_100, times untraced" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_whole_benchmark_in_short(tmp_path: Path) -> None:
    out = tmp_path / "overhead.json"
    argv = [sys.executable, "-m", "bench.overhead", "--quick", "--no-wrk", "--json", str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = msgspec.json.decode(out.read_bytes())
    assert {"direct", "signalbox", "relay"} <= told["numbers"].keys()
    for name in ("requests_per_s", "streams_per_s", "paced_chunk_cpu_us", "alone_p50_ms", "memory_mib"):
        assert told["numbers"]["signalbox"][name] > 0
    assert "CPU per paced chunk" in done.stdout
