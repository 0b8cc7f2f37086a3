"""Commands of other packages: found by their entry points, and only loaded when they are meant."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from gateway import further
from gateway.cli import main

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OURS = PROJECT["entry-points"][further.GROUP]


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entry points of this source tree, as an installation would have them; returns which were loaded."""
    loaded: list[str] = []

    class Watched(EntryPoint):
        def load(self) -> object:
            loaded.append(self.name)
            return super().load()

    points = [Watched(name, value, further.GROUP) for name, value in OURS.items()]
    monkeypatch.setattr(further, "entry_points", lambda group: points)
    return loaded


def test_help_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out
    assert all(f"\n    {name} " in listed for name in OURS)
    assert "Goodput of any OpenAI-compatible server" in listed


def test_one_of_them_runs_and_nothing_else_is_loaded(declared: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--rate", "0"]) == 2
    assert "--rate and --speed must be above 0" in capsys.readouterr().err
    assert declared == ["bench"]


def test_our_own_commands_load_none(declared: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key"]) == 0
    assert declared == []


def test_an_unknown_command_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["benhc"])
    assert ended.value.code == 2
    assert "bench" in capsys.readouterr().err
