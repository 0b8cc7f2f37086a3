"""Overload on the real vLLM: `python -m bench.vllm_overload [--seconds N] [--seeds N] [--model FOLDER] [--json FILE]`.

Signalbox with vLLM in its process, and vLLM's own HTTP server, on the same small model with the same flags, take turns
under the same requests: Azure's chat lengths over SCALE, Poisson arrivals at 1, 2 and 3 times the capacity, open
loop. The capacity is the highest rate at which vLLM's server still answers 95 % within the objectives.
These are scaled with the engine: the pace objective is twice its mean time per token when all its places are taken,
that of the first token FIRST times the pace, as 3 s are for 100 ms.

The engine runs MAX_SEQS at once, so that overload means waiting, as on a large one. Server and load generator have
cores of their own where there are two. Answers are as long as the trace says (`ignore_eos`), so the gateway knows each
length by its limit, and both servers get the same objectives in headers, which vLLM's ignores. Needs vLLM in this
environment (scripts/engines.sh). Compare numbers of one run only.
"""

import argparse
import asyncio
import csv
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from bench import traces
from bench.arrivals import Source
from bench.goodput import Outcome, Record, measure
from bench.prompts import Words
from bench.replay import Plan, Replayed, replay
from bench.sim_metrics import quantile
from bench.target import Target, words_for
from bench.vllm_servers import TINY, Flags, Server, running
from policies.types import Objective

SCALE = 4
MAX_SEQS, CHUNK, CONTEXT = 16, 512, 2048
FLAGS: Flags = {
    "max-model-len": CONTEXT,
    "max-num-seqs": MAX_SEQS,
    "max-num-batched-tokens": CHUNK,
    "enforce-eager": True,
    "dtype": "bfloat16",
    "no-enable-prefix-caching": True,
}
LIMITS = {"chunk_tokens": CHUNK}
LOADS = (1.0, 2.0, 3.0)
PACE, FIRST = 2.0, 30.0
STEP, TRIES = 1.15, 12
ATTAINED = 0.95
WARM_UP = 300
TARGETS = {1.0: 0.97, 2.0: 3.0, 3.0: 3.0}


class Turn(Struct, frozen=True):
    """One server under one load with one seed."""

    server: str
    load: float
    seed: int
    numbers: dict[str, float]
    pressed: str


class Found(Struct, frozen=True):
    """All of it. `ratios` are good answers a second, Signalbox's over those of vLLM's server, by load."""

    capacity_rps: float
    saturated_rps: float
    objective: Objective
    turns: list[Turn]
    ratios: dict[str, float]


class Bench:
    """Replays against the servers, each with words of its own."""

    def __init__(self, servers: Sequence[Server], trace: Path, seconds: float) -> None:
        self.servers = {server.name: server for server in servers}
        self._trace, self._seconds = trace, seconds
        self._words: dict[str, Words] = {}

    async def replayed(self, server: str, rate: float, aim: Objective, seed: int, seconds: float = 0.0) -> Replayed:
        """Requests at a rate for a time, and all of their answers."""
        target = Target(url=self.servers[server].url, model="tiny", tell=True, patience_s=600.0)
        if server not in self._words:
            pool = target.pool()
            try:
                self._words[server], _ = await words_for(target, pool)
            finally:
                pool.close()
        plan = Plan(
            target=target,
            sources=(Source(name="chat", trace=str(self._trace), objective=aim),),
            words=self._words[server],
            rate=rate,
            requests=max(1, round(rate * (seconds or self._seconds))),
            seed=seed,
            processes=1,
            context_tokens=CONTEXT - 64,
        )
        return await replay(plan)

    async def turn(self, server: str, load: float, rate: float, aim: Objective, seed: int) -> Turn:
        found = await self.replayed(server, rate, aim, seed)
        numbers = measure(found.records, {"chat": aim}, self._seconds)["all"]
        return Turn(server, load, seed, numbers, found.generator.pressed)

    async def saturated(self) -> tuple[float, float]:
        """Answers per second and median time per token (s) of vLLM's server when all of its places are taken."""
        rate = 4.0
        while True:
            found = await self.replayed("vllm", rate, Objective(), 0, 10.0)
            answers = [one for one in found.records if one.outcome is Outcome.DONE]
            last_sent = max(one.at_s for one in found.records)
            done = [one for one in answers if one.end_s <= last_sent]
            if len(done) < 0.7 * len(found.records):
                return len(done) / last_sent, quantile(sorted(one.tpot_ms for one in full(answers)), 0.5) / 1000
            rate *= 2

    async def capacity(self, guess_rps: float, aim: Objective) -> float:
        """The highest rate that vLLM's server carries, within STEP, looked for from a guess on."""
        rate, up = guess_rps, await self._carried(guess_rps, aim)
        for _ in range(TRIES):
            following = rate * STEP if up else rate / STEP
            if await self._carried(following, aim) != up:
                return rate if up else following
            rate = following
        raise SystemExit(f"vLLM's server carries {'more' if up else 'less'} than {rate:.1f} requests/s: no end found")

    async def _carried(self, rate: float, aim: Objective) -> bool:
        turn = await self.turn("vllm", 0.0, rate, aim, 0)
        say(f"{turn.numbers['attained']:.3f} attained by vllm at {rate:.1f} requests/s")
        return turn.numbers["attained"] >= ATTAINED


def full(records: Sequence[Record]) -> list[Record]:
    """Answers long enough to have a pace."""
    return [one for one in records if one.output_tokens >= 8]


def scaled_trace(folder: Path) -> Path:
    """Azure's chat lengths over SCALE, as a file."""
    file = folder / "chat.csv"
    with file.open("w", newline="") as text:
        out = csv.writer(text)
        out.writerow(("input_tokens", "output_tokens"))
        for row in traces.read("azure-chat").rows:
            out.writerow((max(32, row.input_tokens // SCALE), max(2, row.output_tokens // SCALE)))
    return file


@contextmanager
def apart() -> Iterator[None]:
    """What is started within gets the first half of the cores; this process, and what it starts later, the others."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if half:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores[:half]))
        os.sched_setaffinity(0, cores[:half])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores[half:])


async def measured(bench: Bench, seeds: int) -> Found:
    """Warm up, find the capacity, then both servers in turn under each load."""
    saturated_rps, pace_s = await bench.saturated()
    tpot_ms = max(1, round(PACE * pace_s * 1000))
    aim = Objective(round(FIRST * tpot_ms), tpot_ms)
    say(f"saturated at {saturated_rps:.1f} requests/s; objectives {aim.ttft_ms} ms and {aim.tpot_ms} ms a token")
    capacity = await bench.capacity(saturated_rps, aim)
    await bench.replayed("signalbox", capacity, aim, 0, WARM_UP / capacity)
    turns = []
    for load in LOADS:
        for seed in range(1, seeds + 1):
            for server in sorted(bench.servers, reverse=bool(seed % 2)):
                turns.append(await bench.turn(server, load, load * capacity, aim, seed))
                say(line(turns[-1]))
    return Found(capacity, saturated_rps, aim, turns, {f"{load:g}": ratio(turns, load) for load in LOADS})


def mean(turns: Sequence[Turn], server: str, load: float, number: str) -> float:
    some = [turn.numbers[number] for turn in turns if (turn.server, turn.load) == (server, load)]
    return sum(some) / len(some)


def ratio(turns: Sequence[Turn], load: float) -> float:
    ours, theirs = (mean(turns, server, load, "goodput_rps") for server in ("signalbox", "vllm"))
    return ours / theirs if theirs else float("inf") if ours else 0.0


NUMBERS: tuple[tuple[str, str], ...] = (
    ("good/s", "goodput_rps"),
    ("attained", "attained"),
    ("of accepted", "attained_accepted"),
    ("refused", "refused"),
    ("after ms", "refuse_ms"),
    ("wasted", "wasted"),
    ("TTFT p50", "ttft_p50_ms"),
    ("p99", "ttft_p99_ms"),
    ("TPOT p50", "tpot_p50_ms"),
    ("p99", "tpot_p99_ms"),
)


def line(turn: Turn) -> str:
    values = " ".join(f"{turn.numbers[name]:11.3f}" for _, name in NUMBERS)
    return f"{turn.load:3g}x {turn.server:10} {values}{'  ' + turn.pressed if turn.pressed else ''}"


def report(found: Found) -> None:
    """Means over the seeds, and what was asked of them."""
    print(f"\ncapacity {found.capacity_rps:.2f} requests/s; TTFT {found.objective.ttft_ms} ms,", end=" ")
    print(f"TPOT {found.objective.tpot_ms} ms")
    print(" " * 15 + " ".join(f"{title:>11}" for title, _ in NUMBERS))
    for load in LOADS:
        for server in ("vllm", "signalbox"):
            numbers = {name: mean(found.turns, server, load, name) for _, name in NUMBERS}
            print(line(Turn(server, load, 0, numbers, "")))
    for load in LOADS:
        got, wanted = found.ratios[f"{load:g}"], TARGETS[load]
        met = "met" if got >= wanted else "NOT MET"
        print(f"good answers a second at {load:g} times, over vLLM's: at least {wanted}  measured {got:.2f}  {met}")


def say(text: str) -> None:
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_overload", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals in each run (default 40)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each server under each load (default 2)")
    parser.add_argument("--model", type=Path, default=TINY, metavar="FOLDER", help="default: the tiny model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="signalbox-bench-") as name:
        trace = scaled_trace(Path(name))
        with ExitStack() as stack:
            with apart():
                servers = stack.enter_context(running(FLAGS, LIMITS, options.model))
            found = asyncio.run(measured(Bench(servers, trace, options.seconds), options.seeds))
    report(found)
    if options.json:
        head: dict[str, Any] = {"flags": dict(FLAGS), "seconds": options.seconds, "model": options.model.name}
        encoded = msgspec.json.encode(head | msgspec.to_builtins(found))
        options.json.write_bytes(msgspec.json.format(encoded))


if __name__ == "__main__":
    main()
