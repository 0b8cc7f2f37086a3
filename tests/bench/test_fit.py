"""Step times found again from what a simulated engine recorded, and from a recording of vLLM."""

from pathlib import Path

import msgspec
import pytest

from bench import fit as fitting
from bench.__main__ import main
from bench.fit import Fit, FitError
from bench.simulate_options import ENGINE
from policies.steptime import Coefficients, Work

TRUE = Coefficients(a0_s=22e-3, a1_s=60e-6, a2_s=300e-6, a3_s=0.4e-6, a4_s=0.2e-6)
TRAFFIC = (
    "--trace", "azure-chat", "--cv", "1", "--rate", "3", "--requests", "200", "--context", "2048", "--known-lengths",
    "--policy", "pass", "--step-times", "22,60,300,0.4,0.2", "--quiet",
)  # fmt: skip


def recorded(file: Path, *words: str) -> Path:
    assert main(["simulate", *TRAFFIC, "--records", str(file), *words]) == 0
    return file


@pytest.mark.timeout(120)
def test_a_fit_finds_the_step_times_of_what_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, unseen = recorded(tmp_path / "one"), recorded(tmp_path / "two", "--seed", "2")
    result = tmp_path / "fit.json"
    assert main(["simulate", "--fit", str(run), str(unseen), "--json", str(result)]) == 0
    found = msgspec.json.decode(result.read_bytes(), type=Fit)
    assert found.ttft_error < 0.15
    assert found.tpot_error < 0.05
    assert found.judged == len(fitting.heard(unseen))
    for work in (Work(1, 0, 4, 4_000), Work(1, 0, 16, 16_000), Work(1, 400, 8, 8_000), Work(1, 500, 0, 0)):
        assert found.engine.times.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.15)
    assert "--step-times" in capsys.readouterr().out


@pytest.mark.timeout(120)
def test_one_recording_is_judged_by_what_was_not_fitted(tmp_path: Path) -> None:
    run = fitting.heard(recorded(tmp_path / "one"))
    found = fitting.fit(run, (), ENGINE)
    assert found.fitted == int(0.6 * len(run))
    assert found.judged == len(run) - found.fitted
    assert found.tpot_error < 0.05


def test_what_a_fit_cannot_use_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, short = tmp_path / "broken.jsonl", tmp_path / "short.jsonl"
    broken.write_text('{"number": 1}\n')
    short.write_text('{"number": 1, "source": "a", "at_s": 0, "came_s": 0}\n')
    for words, said in (
        (("--fit", str(tmp_path / "none")), "--fit: "),
        (("--fit", str(broken)), "broken.jsonl:1: not a record"),
        (("--fit", str(short)), "fewer than 20 requests"),
        (("--fit", "a", "b", "c"), "--fit: one recording"),
        (("--fit", "a", "--config", "b"), "--config: with --fit"),
    ):
        assert main(["simulate", *words]) == 2
        assert said in capsys.readouterr().err
    line = short.read_text()
    short.write_text(line * 30)
    with pytest.raises(FitError, match="several runs"):
        fitting.heard(short)
