"""What the front end costs when vLLM runs in the gateway: `python -m bench.vllm_inprocess [--rounds N] [--json FILE]`.

Signalbox with an in-process vLLM, and vLLM's own HTTP server, on the same tiny model with the same flags, take turns
under the same load: 16 streams of 96 tokens. Front-end CPU is what the process that answers HTTP uses; the
engine's own processes cost the same in both and do not count, the gateway's store is shown apart. Needs vLLM in
this environment (scripts/engines.sh); each engine takes up to a minute to start. Compare numbers of one run only.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.vllm_servers import Flags, running

STREAMS, TOKENS, BURSTS, WARM_UP = 16, 96, 6, 4
FLAGS: Flags = {"max-model-len": 2048, "enforce-eager": True, "dtype": "bfloat16", "max-num-seqs": STREAMS}
LIMITS = {"prefill_tokens_per_s": 1_000_000}
TARGETS = {"cpu": 0.5, "tokens": 1.0, "ttft": 1.0}
SLACK = 0.03  # two medians of one machine differ by this much when nothing differs

MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Hello world, what is a list? " * 6},
]
BODY = json.dumps(
    {"model": "tiny", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "messages": MESSAGES}
).encode()


class Round(Struct):
    """One turn of one side: front-end microseconds per token, tokens per second, median first token in ms."""

    cpu_us: float
    store_us: float
    tokens_per_s: float
    ttft_ms: float


class Side(Struct):
    """A server under test."""

    name: str
    pid: int
    port: int
    rounds: list[Round] = []

    def median(self, field: str) -> float:
        values: list[float] = [getattr(one, field) for one in self.rounds]
        return statistics.median(values)


async def burst(port: int, count: int) -> list[float]:
    """`count` streams at once; their first-token times in seconds. Fails unless each brings all its tokens."""
    return await asyncio.gather(*(_stream(port) for _ in range(count)))


async def _stream(port: int) -> float:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    started_s = time.perf_counter()
    first_s = 0.0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        seen = b""
        while data := await reader.read(65_536):
            seen += data
            if not first_s and seen.count(b"data: ") >= 2:  # the first event is the role
                first_s = time.perf_counter() - started_s
    finally:
        writer.close()
    if b"data: [DONE]" not in seen or b'"finish_reason":"length"' not in seen:
        raise SystemExit(f"a stream broke off: {seen[-500:]!r}")
    return first_s


def one_round(side: Side) -> None:
    """Some bursts, one after the other, into the side's record."""
    cpu_s, store_s, start_s = _cpu_s(side.pid), _store_s(side.pid), time.perf_counter()
    firsts: list[float] = []
    for _ in range(BURSTS):
        firsts += asyncio.run(burst(side.port, STREAMS))
    seconds, tokens = time.perf_counter() - start_s, BURSTS * STREAMS * TOKENS
    side.rounds.append(
        Round(
            cpu_us=(_cpu_s(side.pid) - cpu_s) / tokens * 1e6,
            store_us=(_store_s(side.pid) - store_s) / tokens * 1e6,
            tokens_per_s=tokens / seconds,
            ttft_ms=statistics.median(firsts) * 1e3,
        )
    )


def _cpu_s(pid: int) -> float:
    """Time that the threads of one process have had on a core, children not counted."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def _store_s(pid: int) -> float:
    """The same for the stores among its children."""
    total = 0.0
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for one in child.read_text().split():
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{one}/comm").read_text().strip()
                total += _cpu_s(int(one)) if name in {"valkey-server", "redis-server"} else 0.0
    return total


def report(ours: Side, theirs: Side) -> dict[str, float]:
    """Prints both sides and the ratios; returns the ratios."""
    print(f"{STREAMS} streams of {TOKENS} tokens, medians of {len(ours.rounds)} rounds, each side in turn")
    print(f"{'':12}{'front-end CPU':>16}{'store CPU':>14}{'tokens/s':>11}{'first token':>14}")
    for side in (ours, theirs):
        print(
            f"{side.name:12}{side.median('cpu_us'):10.0f} us/tok{side.median('store_us'):8.1f} us/tok"
            f"{side.median('tokens_per_s'):11.0f}{side.median('ttft_ms'):11.1f} ms"
        )
    ratios = {
        "cpu": ours.median("cpu_us") / theirs.median("cpu_us"),
        "tokens": ours.median("tokens_per_s") / theirs.median("tokens_per_s"),
        "ttft": ours.median("ttft_ms") / theirs.median("ttft_ms"),
    }
    for name, what, good in (
        ("cpu", "front-end CPU per token, at most", ratios["cpu"] <= TARGETS["cpu"]),
        ("tokens", "tokens per second, at least", ratios["tokens"] >= TARGETS["tokens"] - SLACK),
        ("ttft", "median first token, at most", ratios["ttft"] <= TARGETS["ttft"] + SLACK),
    ):
        print(f"{what:36}{TARGETS[name]:5.2f}   measured {ratios[name]:5.2f}   {'met' if good else 'NOT MET'}")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_inprocess", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side (default 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round there")
    options = parser.parse_args()
    with running(FLAGS, LIMITS) as servers:
        ours, theirs = (Side(one.name, one.process.pid, one.port) for one in servers)
        for side in (ours, theirs):
            for _ in range(WARM_UP):
                asyncio.run(burst(side.port, STREAMS))
        for turn in range(options.rounds):
            for side in (ours, theirs) if turn % 2 else (theirs, ours):
                one_round(side)
        ratios = report(ours, theirs)
    if options.json:
        told = {side.name: side.rounds for side in (ours, theirs)}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode({"ratios": ratios, "rounds": told})))


if __name__ == "__main__":
    main()
