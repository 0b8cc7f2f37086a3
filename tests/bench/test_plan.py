"""Profiles and plans: their numbers by hand, their commands whole, and what a running gateway tells."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from bench import traces, workload
from bench.__main__ import main
from bench.costs import Engine
from bench.live import LiveError, Samples, of, watched
from bench.plan_engines import times
from bench.traces import LENGTHS_ONLY, Row, Trace
from policies.steptime import START
from tests.bench.test_report_page import Nesting
from tests.support.site import POOL, Site, running
from tests.support.upstream import Upstream


def test_the_shape_of_a_trace() -> None:
    rows = tuple(
        Row(float(i), 100 + 100 * (i % 2), 10 + 10 * (i % 2), "ab"[i % 4 == 0], "", (1_000, i)) for i in range(200)
    )
    found = workload.profile(Trace(name="t", rows=rows))
    assert (found.requests, found.span_s, found.input.mean, found.input.largest) == (200, 200.0, 150, 200)
    assert found.together == pytest.approx(1.0)
    assert found.arrivals is not None
    assert found.arrivals.rate == pytest.approx(1.0)
    assert found.arrivals.gap_cv == 0
    assert found.arrivals.dispersion == {"1": 0.0, "10": 0.0, "60": 0.0}
    assert found.arrivals.peak == {"1": 1.0, "10": 1.0, "60": 1.0}
    assert found.reuse == pytest.approx(199 / 400)
    assert [(group.name, group.requests) for group in found.tenants] == [("a", 0.75), ("b", 0.25)]
    assert found.fairness == pytest.approx(1 / (2 * (0.75**2 + 0.25**2)))
    assert found.classes == ()
    said = workload.text(found)
    assert "50% of prompt blocks came before" in said
    assert re.search(r"^a +75\.0% ", said, re.MULTILINE)


def test_lengths_only_have_no_arrivals() -> None:
    found = workload.profile(traces.read("sharegpt"))
    assert found.arrivals is None
    assert found.input.mean == pytest.approx(2340, rel=0.01)
    assert "arrivals" not in workload.text(found)


def test_bursts_are_what_the_traces_page_says() -> None:
    found = workload.profile(traces.read("azure-code")).arrivals
    assert found is not None
    assert found.gap_cv == pytest.approx(13.2, rel=0.01)
    assert found.peak["1"] == 67
    assert found.dispersion["10"] == pytest.approx(71, rel=0.02)


# the commands


def test_a_profile_as_table_json_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data = tmp_path / "p.html", tmp_path / "p.json"
    assert main(["profile", "--trace", "azure-chat", "--html", str(page), "--json", str(data)]) == 0
    assert "variation of gaps 1.09" in capsys.readouterr().out
    assert json.loads(data.read_text())["arrivals"]["rate"] == pytest.approx(5.53, rel=0.01)
    nesting = Nesting()
    nesting.feed(page.read_text())
    assert nesting.open == []


def test_a_plan_from_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data = tmp_path / "p.html", tmp_path / "p.json"
    words = [
        "--cv",
        "1",
        "--goodput",
        "ttft:3000",
        "tpot:100",
        "--load",
        "20",
        "--html",
        str(page),
        "--json",
        str(data),
    ]
    assert main(["plan", "--config", "config.toml", *words]) == 0
    said = capsys.readouterr().out
    found = json.loads(data.read_text())
    fast, slow = found["capacities"]
    assert (fast["engine"]["name"], slow["engine"]["name"]) == ("fast", "slow")
    assert fast["engine"]["times"]["a0_s"] == pytest.approx(0.015)
    assert slow["engine"]["times"]["a0_s"] == pytest.approx(0.0375)
    assert 4.0 < fast["rate"] < 5.2
    assert fast["limits"][0]["what"] == "ttft"
    assert f"{found['needs'][0]['replicas']} of fast" in said
    assert "What breaks, and in which order" in page.read_text()


def test_a_plan_without_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "--goodput", "ttft:3000", "--cv", "1", "--trace", "bwb", "--json", "p.json"]
    assert main([*words, "--step-times", "15,81,95,0.11", "--chunk-tokens", "512", "--kv-tokens", "60000"]) == 0
    (found,) = json.loads(Path("p.json").read_text())["capacities"]
    assert (found["engine"]["chunk_tokens"], found["engine"]["kv_tokens"]) == (512, 60_000)
    assert found["limits"][1]["what"] == "kv"


def test_a_trace_without_time_is_planned_for_as_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,input_tokens,output_tokens\n1,100,1\n1,100,1\n")
    assert main(["profile", "--trace", str(file), "--html", str(tmp_path / "p.html")]) == 0
    assert main(["plan", "--trace", str(file), "--config", "config.toml", "--goodput", "ttft:500", "tpot:100"]) == 0
    assert "carries/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan"], "--goodput is needed"),
        (["plan", "--goodput", "ttft:1", "--attained", "1"], "--attained must be between 0 and 1"),
        (["plan", "--goodput", "ttft:1", "--cv", "0"], "--cv must be above 0"),
        (["plan", "--goodput", "ttft:1", "--config", "none.toml"], "none.toml: No such file"),
        (
            ["plan", "--goodput", "ttft:1", "--model", "other"],
            "--model: other must name one of the configured pools: demo",
        ),
        (["plan", "--goodput", "ttft:1", "--max-running", "-1"], "--max-running must be above 0"),
        (["profile", "--trace", "none.csv"], "there is no trace 'none.csv'"),
    ],
)
def test_wrong_options_are_named(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_an_engine_without_step_times_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        '[[pool]]\nmodel = "m"\n[[pool.backend]]\nkind = "openai"\nname = "gpu"\nurl = "http://127.0.0.1:9"\n'
    )
    assert main(["plan", "--config", str(file), "--goodput", "ttft:2000"]) == 2
    assert "the step times of 'gpu' are not in its configuration" in capsys.readouterr().err
    assert main(["plan", "--config", str(file), "--goodput", "ttft:9000", "--step-times", "15,81,95,0.11,0.76"]) == 0


def test_step_times_as_text() -> None:
    assert times("15,81,95,0.11,0.76") == START
    assert times("15,81,95,0.11") == replace(START, a4_s=0.0)
    for wrong in ("15,81", "a,b,c,d", "-1,1,1,1", "0,0,1,1", "nan,1,1,1"):
        with pytest.raises(Exception, match=r"times must not|four or five numbers"):
            times(wrong)


# a running gateway


async def traffic(site: Site, requests: int) -> None:
    async def one(i: int) -> None:
        async with site.chat("words and more words " * (5 + i % 30), max_tokens=20 + i % 20) as answer:
            assert answer.status == 200
            await answer.read()

    for i in range(0, requests, 4):
        await asyncio.gather(*(one(i + k) for k in range(4)))


@pytest.mark.timeout(120)
async def test_what_a_running_gateway_tells() -> None:
    async with running(POOL) as site:
        await traffic(site, 80)
        watching = asyncio.ensure_future(watched(site.url, "", "", 2.0))
        while not watching.done():
            await traffic(site, 8)
        live = await watching
    assert (live.model, live.without) == ("demo", ())
    (engine,) = live.engines
    assert isinstance(engine, Engine)
    assert engine.max_running == 4
    assert engine.times.a0_s == pytest.approx(1e-3, rel=0.5)
    assert live.profile.requests >= 80
    assert live.profile.arrivals is not None
    assert live.profile.arrivals.rate > 0
    assert live.profile.at_once is not None
    assert 0 <= live.profile.at_once[0] <= live.profile.at_once[1] <= 4
    assert "at once" in workload.text(live.profile)
    assert live.profile.output.mean == pytest.approx(29, rel=0.25)
    assert [group.name for group in live.profile.classes] == ["standard"]


async def test_what_is_no_gateway_is_one_line() -> None:
    async with Upstream() as site:
        site.metrics = False
        with pytest.raises(LiveError, match="answered 404: is it a gateway"):
            await watched(site.url, "", "", 1.0)
        gone = site.url
    with pytest.raises(LiveError, match="can't be asked"):
        await watched(gone, "", "", 1.0)


def look(requests: float, up: str = "demo") -> Samples:
    return {
        ("signalbox_backend_up", (("backend", "one"), ("model", up))): 1.0,
        ("signalbox_requests_total", (("class", "standard"), ("model", up), ("reason", "ok"))): requests,
    }


def test_too_little_to_tell_is_said() -> None:
    with pytest.raises(LiveError, match="fewer than 20 requests for 'demo'"):
        of([look(1), look(2)], "")
    with pytest.raises(LiveError, match="--model: other must name one of its pools: demo"):
        of([look(1), look(2)], "other")


def test_a_trace_of_lengths_is_told_from_one_with_a_clock() -> None:
    assert traces.read("bwb").rows[0].arrival_s == LENGTHS_ONLY
