"""`signalbox explain` and the queue's script say the same of a request under the same load."""

import argparse
import random
from typing import Any

import msgspec

from gateway import explain
from gateway.config import Config, decode
from gateway.explain_options import add_arguments
from gateway.explain_text import Answer
from gateway.queue.place import Phase, Place
from gateway.queue.share import PoolShare
from policies.order import NO_DEADLINE_MS
from tests.queue.conftest import ticket
from tests.queue.procs import Clock, Process, load
from tests.support.store import StoreServer

TIMES = (15.0, 81.0, 95.0, 0.11)
CASES = 300
WORDS = {Phase.HELD: "starts", Phase.WAITING: "waits"}
OUTPUT = 100


def config(limit: int) -> Config:
    limits = f"{{ max_running = {limit}, prefill_tokens_per_s = 8000, kv_tokens = 60_000, chunk_tokens = 512 }}"
    return decode(
        f'[[pool]]\nmodel = "m"\n[[pool.backend]]\nkind = "simulated"\nname = "a"\nlimits = {limits}\n'.encode()
    )


def case(rng: random.Random) -> dict[str, int]:
    """A load and a request of which some test is near its limit, often enough."""
    running = rng.choice([0, 1, 4, 15, 16])
    window = rng.choice([0, 0, 300, 900, 1024])
    blocked = running == 16 or window == 1024
    return {
        "prompt_tokens": rng.choice([50, 400, 1500, 4000]),
        "running": min(running, 15) if window else running,
        "running_prompt_tokens": rng.choice([500, 2000, 3500]),
        "running_output_tokens": OUTPUT,
        "outstanding": window,
        "waiting_ahead": rng.choice([0, 3, 20]) if blocked else 0,
        "ttft_ms": rng.choice([60, 300, 1000, 3000, 10_000]),
        "deadline_ms": rng.choice([2_000, 4_000, 60_000]),
        "tpot_ms": rng.choice([0, 0, 14, 30]),
        "tightest_tpot_ms": rng.choice([0, 20, 40]) if running else 0,
    }


def explained(one: dict[str, int], limit: int, timed: bool) -> Answer:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in one.items()]
    words += [f"--max-tokens={OUTPUT}", f"--expected-tokens={OUTPUT - 1}", f"--longest-tokens={OUTPUT}"]
    words += ["--class=interactive"]
    if timed:
        words.append("--step-times=" + ",".join(map(str, TIMES)))
    return explain.explain(config(limit), parser.parse_args(words))


def queued(process: Process, one: dict[str, int], limit: int, timed: bool) -> Place:
    """The same load in the queue, then the request."""
    (share,) = explain._shares(config(limit), "m")
    if timed:
        step, prefill, running, kv = TIMES
        times = {"step_us": round(step * 1e3), "prefill_ns": round(prefill * 1e3), "running_us": round(running)}
        share = msgspec.structs.replace(share, **times, kv_ns=round(kv * 1e3))
    wide = msgspec.structs.replace(share, chunk_tokens=0, kv_tokens=0, step_us=0, prefill_ns=0)
    process.declare(PoolShare("m", (wide,)))
    never: dict[str, Any] = {"waits_ms": 10**9, "rank": 0, "output_tokens": OUTPUT}
    for nth in range(one["running"]):
        pace = one["tightest_tpot_ms"] if nth == 0 else 0
        process.submit(ticket(**never, prompt_tokens=one["running_prompt_tokens"], tpot_ms=pace))
    process.settle()
    for place in process.book.held.values():
        place.first_token()
    if one["outstanding"]:
        process.submit(ticket(**never, prompt_tokens=one["outstanding"]))
    process.settle()
    assert not process.book.waiting
    process.declare(PoolShare("m", (share,)))
    for _ in range(one["waiting_ahead"]):
        process.submit(ticket(**never, prompt_tokens=one["prompt_tokens"], key_ms=0))
    process.settle()
    first_ms = min(one["ttft_ms"], one["deadline_ms"])
    assert first_ms < NO_DEADLINE_MS
    place = process.submit(
        ticket(
            rank=0, prompt_tokens=one["prompt_tokens"], output_tokens=OUTPUT, output_high=OUTPUT, waits_ms=first_ms,
            total_ms=one["deadline_ms"], tpot_ms=one["tpot_ms"], key_ms=first_ms, output_variance=1,
        )
    )  # fmt: skip
    process.settle()
    return place


def said(place: Place) -> str:
    return WORDS.get(place.phase) or str(place.refusal.reason if place.refusal else place.phase)


def margin(answer: Answer) -> float:
    """How near the nearest test is to its limit, as a part of the limit."""
    return min(abs(line.predicted / line.limit - 1) for line in answer.tests if line.limit)


def compared(server: StoreServer, timed: bool) -> list[tuple[float, str, str, dict[str, int]]]:
    rng, rows = random.Random(7), []
    for _ in range(CASES):
        server("FLUSHALL")
        one = case(rng)
        answer = explained(one, 16, timed)
        place = queued(Process(server, "A", Clock()), one, 16, timed)
        rows.append((margin(answer), answer.reason or answer.verdict, said(place), one))
    return rows


def test_they_agree_where_only_the_prefill_rate_is_known(server: StoreServer) -> None:
    load(server)
    rows = compared(server, timed=False)
    assert [row for row in rows if row[1] != row[2]] == []
    assert {row[2] for row in rows} == {"starts", "waits", "deadline_impossible", "deadline_unreachable"}


def test_they_agree_on_learned_step_times_but_near_a_limit(server: StoreServer) -> None:
    """The script takes what decodes now, the forecast what will decode at the first token."""
    load(server)
    rows = compared(server, timed=True)
    apart = [row for row in rows if row[1] != row[2]]
    assert len(apart) <= 0.05 * CASES, apart
    assert [row for row in apart if row[0] > 0.15] == []
    assert {row[2] for row in rows} == {"starts", "waits", "deadline_impossible", "deadline_unreachable"}
