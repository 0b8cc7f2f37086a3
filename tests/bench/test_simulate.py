"""`signalbox simulate` whole: the same bytes again, every policy, unlike engines, and what is said about options."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from bench import report, traces
from bench.__main__ import main
from bench.goodput import Outcome, Record
from bench.simulate import POLICIES
from gateway.http.errors import STATUS
from policies.reasons import Reason

GOALS = ("--goodput", "ttft:2000", "tpot:100")
BUSY = ("--cv", "1", "--rate", "20", "--requests", "140", *GOALS, "--quiet")
MIXED = """
[server]
[[pool]]
model = "m"
[[pool.backend]]
kind = "simulated"
name = "fast"
[[pool.backend]]
kind = "simulated"
name = "slow"
speed = 0.5
max_running = 8
kv_tokens = 40_000
[[tenant]]
name = "gold"
weight = 3.0
keys = ["sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"]
[[tenant]]
name = "base"
tokens_per_min = 20_000
keys = ["sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"]
"""


def simulate(*words: str) -> int:
    return main(["simulate", *words])


def made(file: Path, *words: str) -> report.Report:
    assert simulate(*words, "--json", str(file)) == 0
    return report.load(file)


def records(file: Path) -> list[Record]:
    return [msgspec.json.decode(line, type=Record) for line in file.read_bytes().splitlines()]


def in_a_process(folder: Path, hash_seed: str, words: Sequence[str]) -> tuple[bytes, bytes, bytes]:
    """The report, the page and the records of a process with its own order of sets."""
    files = [folder / f"{hash_seed}.{kind}" for kind in ("json", "html", "jsonl")]
    command = [sys.executable, "-m", "bench", "simulate", *words]
    for option, file in zip(("--json", "--html", "--records"), files, strict=True):
        command += [option, str(file)]
    subprocess.run(
        command, check=True, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, timeout=120
    )
    one, two, three = (file.read_bytes() for file in files)
    return one, two, three


@pytest.mark.timeout(240)
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    words = (*BUSY, "--gateways", "2", "--backends", "2", "--tenant", "a=1", "--tenant", "b=2", "--leave", "0.1",
             "--retries", "1")  # fmt: skip
    first, again = (in_a_process(tmp_path, seed, words) for seed in ("1", "2"))
    assert first == again
    other = in_a_process(tmp_path, "3", (*words, "--seed", "2"))
    assert json.loads(other[0])["points"] != json.loads(first[0])["points"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_of_each_policy(policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "run.jsonl"
    more = ("--cap", "12", "--tenant-rate", "4", "--records", str(lines))
    found = made(tmp_path / "run.json", "--policy", policy, *BUSY, *more)
    assert f"{policy} (simulated)" in capsys.readouterr().out
    assert found.label == f"{policy} (simulated)"
    (point,) = found.points
    every = records(lines)
    assert [one.number for one in every] == list(range(len(every)))
    assert point.numbers["all"]["requests"] == len(every) > 60
    assert {one.outcome for one in every} <= {Outcome.DONE, Outcome.REFUSED}
    refused = sum(one.outcome is Outcome.REFUSED for one in every) / len(every)
    assert point.numbers["all"]["refused"] == pytest.approx(refused, rel=1e-5)
    assert (refused > 0.1) == (policy != "pass")
    for one in every:
        if one.outcome is Outcome.DONE:
            assert one.at_s <= one.first_s <= one.last_s == one.end_s
            assert one.output_tokens == one.asked_output_tokens
        else:
            assert (one.first_s, one.output_tokens, one.prompt_tokens) == (-1, 0, 0)
            assert one.status == STATUS[Reason(one.reason)]


@pytest.mark.timeout(120)
def test_policies_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert simulate(*BUSY, "--policy", "pass", "gate-edf", "--seeds", "2", "--html", str(page)) == 0
    text = page.read_text()
    assert "pass (simulated)" in text
    assert "gate-edf (simulated)" in text
    out = capsys.readouterr().out
    assert "pass (simulated)" in out
    assert "note: simulated" in out


@pytest.mark.timeout(120)
def test_a_simulated_run_is_compared_with_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, page = tmp_path / "one.json", tmp_path / "page.html"
    made(one, *BUSY, "--policy", "pass", "--label", "mine")
    assert main(["bench", "compare", str(one), str(one), "--html", str(page)]) == 0
    assert "mine (simulated)" in capsys.readouterr().out
    assert "Goodput side by side" in page.read_text()


@pytest.mark.timeout(120)
def test_engines_tenants_and_classes_come_from_a_configuration(tmp_path: Path) -> None:
    config, lines = tmp_path / "config.toml", tmp_path / "run.jsonl"
    config.write_text(MIXED)
    words = (*BUSY, "--config", str(config), "--tenant", "gold=1", "--tenant", "base=1", "--class", "batch=1")
    found = made(tmp_path / "run.json", *words, "--records", str(lines))
    assert [engine["name"] for engine in found.asked["engines"]] == ["fast", "slow"]
    assert set(found.points[0].numbers["tenants"]) == {"gold", "base"}
    every = records(lines)
    assert {one.klass for one in every} == {"batch"}
    assert "rate_limited" in {one.reason for one in every if one.tenant == "base"}
    assert "rate_limited" not in {one.reason for one in every if one.tenant == "gold"}


@pytest.mark.timeout(120)
def test_a_load_is_a_multiple_of_what_the_engine_alone_carries(tmp_path: Path) -> None:
    words = ("--cv", "1", "--part", "report", "--requests", "150", *GOALS, "--quiet")
    found = made(tmp_path / "run.json", *words, "--policy", "pass", "--load", "0.5", "3")
    low, high = (point.numbers["all"]["attained"] for point in found.points)
    assert low > 0.95 > 0.5 > high
    assert found.points[1].load == pytest.approx(3 * found.asked["capacity_rps"])


@pytest.mark.timeout(120)
def test_limits_that_tell_each_length(tmp_path: Path) -> None:
    """With them the gateway knows how long answers will be, as in `signalbox bench`; else it has to learn that."""
    tight = (*BUSY, "--kv-tokens", "12000")
    plain = made(tmp_path / "one.json", *tight)
    known = made(tmp_path / "two.json", *tight, "--known-lengths")
    assert plain.points[0].numbers["all"] != known.points[0].numbers["all"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--requests", "0"), "--requests must be 1 or more"),
        (("--gateways", "0"), "--gateways must be 1 or more"),
        (("--backends", "-1"), "--backends must be 0 or more"),
        (("--goodput", "tttf:1"), "--goodput: 'tttf:1'"),
        (("--trace", "no-such-file.csv"), "no-such-file.csv"),
        (("--trace", "bwb"), "--rate is needed"),
        (("--load", "0"), "--load must be above 0"),
        (("--load", "1", "--trace", "bwb", "--requests", "5"), "--load: "),
        (("--class", "vip=1"), "--class: there is no class 'vip'"),
        (("--tenant", "a"), "--tenant: 'a' is not NAME=SHARE"),
        (("--leave", "2"), "--leave"),
        (("--chunk-tokens", "8"), "--chunk-tokens must be at least --max-running"),
        (("--config", "no-such.toml"), "no-such.toml"),
        (("--policy", "pass", "cap", "--json", "x.json"), "--json holds one policy"),
    ],
)
def test_what_is_wrong_is_named(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--quiet", *words) == 2
    assert said in capsys.readouterr().err


def test_lengths_alone_come_at_a_rate(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n400,20\n800,40\n")
    assert not traces.read(str(lengths)).timed
    found = made(
        tmp_path / "run.json", "--trace", str(lengths), "--rate", "2", "--requests", "30", "--quiet", *GOALS,
        "--policy", "pass",
    )  # fmt: skip
    assert found.points[0].numbers["all"]["attained"] == 1.0
