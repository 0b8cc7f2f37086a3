"""The page opens from a file, says every number in a table, and takes no word of a label for HTML."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from bench import report
from bench.__main__ import main
from bench.goodput import Outcome, Record
from bench.replay import Generator
from bench.report import Report
from bench.report_page import page
from policies.types import Objective

AIM = Objective(1000, 100)
VOID = {"meta", "link", "br"}


class Nesting(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def records(late: int) -> list[Record]:
    """Ten answers, `late` of them too late, and a refusal."""
    found = []
    for i in range(10):
        first = i + (2.0 if i < late else 0.2)
        ends = {"outcome": Outcome.DONE, "status": 200, "first_s": first, "last_s": first + 0.5, "end_s": first + 0.5}
        sizes = {"asked_prompt_tokens": 100 + i, "asked_output_tokens": 11, "prompt_tokens": 100, "output_tokens": 11}
        found.append(Record(i, "chat", i, i, "a" if i % 2 else "b", **sizes, **ends))  # type: ignore[arg-type]
    refused = Record(10, "chat", 5.0, 5.0, reason="queue_full", outcome=Outcome.REFUSED, refused_s=5.1, end_s=5.1)
    return [*found, refused]


def made(label: str, *loads: float, pressed: str = "") -> Report:
    aims = {"chat": AIM}
    health = Generator(1, 2, 11, 0.5, 1.0, 2.0, 1.0, 0.1, pressed)
    points = []
    for load in loads:
        runs = [report.run_of(records(round(load) + seed), aims, 10.0, seed, health) for seed in (1, 2)]
        points.append(report.point_of(load, runs))
    return report.report_of(label, aims, {"model": "m", "goodput": ["ttft:1000"]}, points)


def data(text: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def test_the_page_is_whole_and_asks_nobody() -> None:
    text = page([made("one", 1.0, 2.0, 4.0)])
    nesting = Nesting()
    nesting.feed(text)
    assert nesting.open == []
    assert nesting.addresses == []
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", text)
    assert "The MIT License" in text
    assert 'name="viewport"' in text


def test_labels_are_no_html() -> None:
    text = page([made("</script><script>alert(1)</script>", 1.0, 2.0)])
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_figures_have_the_numbers_and_their_confidence() -> None:
    reports = [made("one", 1.0, 4.0), made("two", 2.0)]
    found = data(page(reports))
    curves = found["goodput_rps"]["curves"]  # type: ignore[index]
    assert [curve["label"] for curve in curves] == ["one", "two"]
    assert curves[0]["x"] == [1.0, 4.0]
    assert curves[0]["y"] == pytest.approx([0.75, 0.45])
    assert curves[0]["ci"][0] == pytest.approx(0.635, rel=0.01)
    by_load = found["ttft_cdf"]["byLoad"]  # type: ignore[index]
    assert list(by_load) == ["1", "2", "4"]
    assert [curve["label"] for curve in by_load["2"]["curves"]] == ["two, seed 1", "two, seed 2"]
    assert by_load["2"]["lines"] == [{"at": 1000, "label": "1000 ms"}]
    assert by_load["2"]["curves"][0]["y"][-1] == 1.0


def test_one_load_has_no_curve_over_loads() -> None:
    text = page([made("one", 2.0)])
    assert "Over the load" not in text
    assert "goodput_rps" not in data(text)
    assert "2 requests/s offered" in text


def test_every_group_and_reason_has_its_table() -> None:
    text = page([made("one", 1.0, 2.0)])
    for said in ("By tenant, at 2/s", "By prompt quartile", "queue_full, at 1/s", "Prefill, decode, waste"):
        assert said in text


def test_the_bottleneck_is_said_once_a_load() -> None:
    found = made("one", 1.0, 2.0, pressed="too slow")
    assert found.notes == tuple(
        f"at {load} requests/s the load generator was the bottleneck in 2 of 2 runs (too slow)" for load in (1, 2)
    )
    assert page([found]).count("in 2 of 2 runs (too slow)") == 2


def test_reports_are_compared_from_their_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for label in ("one", "two"):
        files.append(tmp_path / f"{label}.json")
        files[-1].write_bytes(report.encoded(made(label, 1.0, 2.0)))
    assert report.load(files[0]) == replace(made("one", 1.0, 2.0), made=report.load(files[0]).made)
    target = tmp_path / "both.html"
    assert main(["bench", "compare", *map(str, files), "--html", str(target)]) == 0
    assert "Goodput side by side" in target.read_text()
    assert "one" in capsys.readouterr().out
    assert main(["bench", "compare", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
