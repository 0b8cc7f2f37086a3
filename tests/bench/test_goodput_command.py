"""`signalbox bench` whole: load processes, report, records, and what is said about wrong options."""

import argparse
import asyncio
import json
import sys
from pathlib import Path

import msgspec
import pytest

from bench import report, traces
from bench.__main__ import main
from bench.arrivals import Source
from bench.goodput import Record
from bench.goodput_options import add_arguments, wish
from bench.prompts import Words
from bench.replay import Plan, ReplayError, fitting, generator, replay
from bench.replay_worker import Health
from bench.target import Target
from tests.support.site import POOL, running
from tests.support.upstream import Upstream

pytestmark = pytest.mark.timeout(120)
"""Processes start here, which takes its time on a busy machine."""

SMALL = ("--requests", "40", "--rate", "60", "--cv", "1", "--context", "512", "--quiet")


async def bench(url: str, *words: str) -> tuple[int, str, str]:
    """Run the command in a process of its own: the server is in this one."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench", "bench", "--url", url, *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_run_through_the_gateway(tmp_path: Path) -> None:
    page, records = tmp_path / "run.json", tmp_path / "run.jsonl"
    async with running(POOL.replace("max_running = 4", "max_running = 64")) as site:
        code, out, err = await bench(
            site.url, *SMALL, "--goodput", "ttft:20000", "--json", str(page), "--records", str(records),
            "--processes", "2", "--seeds", "2", "--label", "through the gateway", "--class", "standard=1",
            "--html", str(tmp_path / "run.html"), "--warmup", "3",
        )  # fmt: skip
    assert code == 0, err
    assert "through the gateway" in out
    assert "through the gateway" in (tmp_path / "run.html").read_text()
    found = report.load(page)
    (point,) = found.points
    assert point.load == 60
    assert point.numbers["all"]["attained"] == 1.0
    assert "attained_ci95" in point.numbers["all"]
    assert [run.seed for run in point.runs] == [1, 2]
    for run in point.runs:
        assert run.generator is not None
        assert run.generator.processes == 2
        assert run.generator.sent == run.numbers["all"]["requests"] > 20
        assert run.series is not None
        assert len(run.quantiles["ttft"]) == 101
    written = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(written) == sum(run.generator.sent for run in point.runs if run.generator)
    assert all(one["prompt_tokens"] == one["asked_prompt_tokens"] for one in written)
    assert all(one["output_tokens"] == one["asked_output_tokens"] for one in written)
    assert len(traces.read(str(records)).rows) == len(written)


async def test_refusals_and_the_servers_word_for_them(tmp_path: Path) -> None:
    page = tmp_path / "run.json"
    async with running(POOL) as site:
        code, out, err = await bench(site.url, *SMALL, "--goodput", "ttft:1", "--tell", "--json", str(page))
    assert code == 0, err
    numbers = report.load(page).points[0].numbers
    assert numbers["all"]["refused"] == 1.0
    assert set(numbers["reasons"]) <= {"deadline_impossible", "expired"}
    assert all(f"{reason}: " in out for reason in numbers["reasons"])


async def test_a_key_is_in_no_argument_and_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "run.json"
    monkeypatch.setenv("SIGNALBOX_API_KEY", "sk-very-secret")
    async with Upstream(key="sk-very-secret") as site:
        site.apis = tuple(path for path in site.apis if path != "/tokenize")
        code, _, err = await bench(site.url, *SMALL, "--json", str(page))
    assert code == 0, err
    assert report.load(page).points[0].numbers["all"]["failed"] == 0
    assert "sk-very" not in page.read_text() + err


async def test_a_source_with_a_limit_lets_the_model_end_its_answers(tmp_path: Path) -> None:
    mix, records = tmp_path / "mix.toml", tmp_path / "run.jsonl"
    sources = [("ends", "max_tokens = 64"), ("exact", "")]
    mix.write_text("".join(f'[[source]]\nname = "{name}"\ntrace = "azure-chat"\n{more}\n' for name, more in sources))
    async with Upstream() as site:
        site.apis = tuple(path for path in site.apis if path != "/tokenize")
        more = ("--requests", "40", "--rate", "60", "--context", "512", "--quiet")
        code, _, err = await bench(site.url, *more, "--mix", str(mix), "--records", str(records))
        asked = [one.json() for one in site.generations if one.json().get("stream")]
    assert code == 0, err
    assert {(one["max_tokens"] == 64, "ignore_eos" in one) for one in asked} == {(True, False), (False, True)}
    assert {json.loads(line)["source"] for line in records.read_text().splitlines()} == {"ends", "exact"}


async def test_a_load_process_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.replay.sys.executable", "/bin/false")
    source = Source(name="chat", trace="azure-chat")
    plan = Plan(target=Target(url="http://127.0.0.1:9"), sources=(source,), words=Words((" a",), 3), rate=1, requests=5)
    with pytest.raises(ReplayError, match="load process 0 ended with 1"):
        await replay(plan)


async def test_a_server_that_is_not_there_is_one_line() -> None:
    async with Upstream() as site:
        gone = site.url
    code, _, err = await bench(gone, *SMALL)
    assert code == 1
    assert err.count("\n") == 1
    assert "cannot connect" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--trace", "sharegpt"], "--rate is needed"),
        (["--trace", "nothing"], "there is no trace 'nothing'"),
        (["--rate", "0"], "--rate and --speed must be above 0"),
        (["--rate", "1", "--speed", "1"], "give one of them"),
        (["--goodput", "itl:3"], "--goodput: 'itl:3' is not one of"),
        (["--leave", "2"], "--leave: Expected `float` <= 1.0"),
        (["--cv", "-1"], "--cv: Expected `float` >= 0"),
        (["--tenant", "a"], "--tenant: 'a' is not NAME=SHARE"),
        (["--tenant", "a=1:NOT_SET"], "--tenant: the environment variable NOT_SET is not set"),
        (["--class", "a=0"], "--class: 'a=0' is not NAME=SHARE"),
        (["--requests", "0"], "--requests must be 1 or more"),
        (["--extra", "[]"], "--extra must be a JSON object"),
        (["--url", "nowhere"], "--url: 'nowhere' does not start with http://"),
        (["--mix", "/nowhere.toml"], "--mix: /nowhere.toml: No such file"),
        (["--mix", "x.toml", "--goodput", "ttft:1"], "--goodput: with --mix it is said in the file"),
        (["--mix", "x.toml", "--class", "a=1"], "--class: with --mix it is said in the file"),
    ],
)
def test_wrong_options_are_named(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_mix_of_sources(tmp_path: Path) -> None:
    file = tmp_path / "mix.toml"
    file.write_text(
        '[[source]]\nname = "chat"\ntrace = "azure-chat"\nshare = 2\nobjective = { ttft_ms = 2000 }\n'
        "tenants = { a = 1 }\n"
        '[[source]]\nname = "long"\ntrace = "sharegpt"\ncv = 2\nmax_tokens = 512\n'
    )
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    found = wish(parser.parse_args(["--mix", str(file), "--rate", "2", "1", "2", "--seconds", "30", "--seeds", "3"]))
    assert [source.name for source in found.sources] == ["chat", "long"]
    assert found.sources[0].objective.ttft_ms == 2000
    assert (found.loads, found.seeds, found.requests_at(2.0)) == ((1.0, 2.0), (1, 2, 3), 60)


def test_the_generator_says_when_it_was_the_bottleneck() -> None:
    def sent(lag_s: float) -> list[Record]:
        return [Record(i, "s", i + lag_s, i, lag_s=lag_s) for i in range(100)]

    fine = generator(sent(0.001), [Health(0.2, 1.0)])
    assert (fine.pressed, fine.sent, fine.lag_p99_ms) == ("", 100, pytest.approx(1.0))
    assert "sent 50 ms late" in generator(sent(0.05), [Health(0.2, 1.0)]).pressed
    assert "30 ms late to its answers" in generator(sent(0.001), [Health(0.2, 1.0), Health(0.2, 30.0)]).pressed
    assert "95% of a core" in generator(sent(0.001), [Health(0.95, 1.0)]).pressed


def test_processes_for_a_load() -> None:
    assert fitting(1.0, 100) == 1
    assert fitting(1e6, 1000) >= 1


def test_what_is_no_report_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(msgspec.json.encode({"kind": "other"}))
    with pytest.raises(report.ReportError, match=r"x\.json: not a report"):
        report.load(file)
