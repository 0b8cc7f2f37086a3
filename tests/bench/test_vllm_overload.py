"""The overload benchmark's own arithmetic; the engines it is for are elsewhere."""

import os
from pathlib import Path

import pytest

from bench import traces
from bench.vllm_overload import (
    ATTAINED,
    LOADS,
    NUMBERS,
    SCALE,
    STEP,
    Bench,
    Found,
    Turn,
    apart,
    ratio,
    report,
    scaled_trace,
)
from bench.vllm_servers import signalbox, vllm_server
from gateway.config import load
from policies.types import Objective


def turn(server: str, load: float, good: float, seed: int = 1) -> Turn:
    return Turn(server, load, seed, {name: 0.5 for _, name in NUMBERS} | {"goodput_rps": good}, "")


TURNS = [turn(server, load, good) for load in LOADS for server, good in (("signalbox", 4.0), ("vllm", 5.0 - load))]


class Carrying(Bench):
    """Servers that attain everything up to a rate, and little beyond it."""

    def __init__(self, most_rps: float) -> None:
        super().__init__((), Path(), 1.0)
        self._most_rps = most_rps

    async def turn(self, server: str, load: float, rate: float, aim: Objective, seed: int) -> Turn:
        attained = ATTAINED if rate <= self._most_rps else ATTAINED - 0.01
        return Turn(server, load, seed, {"attained": attained}, "")


@pytest.mark.parametrize("guess_rps", [8.5, 3.0, 20.0])
async def test_the_capacity_is_the_highest_rate_that_is_carried(guess_rps: float) -> None:
    found = await Carrying(8.0).capacity(guess_rps, Objective())
    assert 8.0 / STEP < found <= 8.0


async def test_a_capacity_far_from_the_guess_is_not_found() -> None:
    for most_rps in (0.1, 1000.0):
        with pytest.raises(SystemExit, match="no end found"):
            await Carrying(most_rps).capacity(8.0, Objective())


def test_ratios_are_of_means_over_the_seeds() -> None:
    turns = [
        turn("signalbox", 2.0, 4.0),
        turn("signalbox", 2.0, 6.0, 2),
        turn("vllm", 2.0, 1.0),
        turn("vllm", 2.0, 3.0, 2),
    ]
    assert ratio(turns, 2.0) == 2.5
    assert ratio([turn("signalbox", 1.0, 1.0), turn("vllm", 1.0, 0.0)], 1.0) == float("inf")
    assert ratio([turn("signalbox", 1.0, 0.0), turn("vllm", 1.0, 0.0)], 1.0) == 0.0


def test_the_report_says_what_was_met(capsys: pytest.CaptureFixture[str]) -> None:
    report(Found(5.0, 6.0, Objective(3000, 100), TURNS, {f"{load:g}": ratio(TURNS, load) for load in LOADS}))
    said = capsys.readouterr().out
    assert "at 1 times, over vLLM's: at least 0.97  measured 1.00  met" in said
    assert "at 2 times, over vLLM's: at least 3.0  measured 1.33  NOT MET" in said


def test_the_trace_is_azures_in_small(tmp_path: Path) -> None:
    small, whole = traces.read(str(scaled_trace(tmp_path))).rows, traces.read("azure-chat").rows
    assert len(small) == len(whole)
    assert sum(row.output_tokens for row in small) == pytest.approx(
        sum(row.output_tokens for row in whole) / SCALE, rel=0.05
    )


def test_both_servers_get_the_same_flags(tmp_path: Path) -> None:
    flags = {"max-num-seqs": 16, "enforce-eager": True, "dtype": "bfloat16"}
    command, port = signalbox(tmp_path, tmp_path / "tiny", flags, {"chunk_tokens": 512})
    (pool,) = load(tmp_path / "config.toml").pools
    (backend,) = pool.backends
    assert (getattr(backend, "args", None), backend.limits.chunk_tokens) == (flags, 512)
    assert str(port) in command
    command, _ = vllm_server(tmp_path / "tiny", flags)
    assert {"--max-num-seqs=16", "--enforce-eager", "--dtype=bfloat16"} <= set(command)


def test_servers_and_load_have_cores_of_their_own() -> None:
    mine = os.sched_getaffinity(0)
    threads = os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
    try:
        with apart():
            theirs = os.sched_getaffinity(0)
        assert os.sched_getaffinity(0) | theirs == mine
        assert len(mine) == 1 or not os.sched_getaffinity(0) & theirs
    finally:
        os.sched_setaffinity(0, mine)
        os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
        if threads is not None:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = threads
