"""The images: pinned, without root, with everything in them that the product needs."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docker.files import DOCKER, ROOT, argv, last, stages

IMAGES = ("slim", "vllm", "triton")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def hadolint() -> str | None:
    beside = Path(sys.executable).with_name("hadolint")
    return str(beside) if beside.exists() else shutil.which("hadolint")


def test_hadolint_finds_nothing() -> None:
    tool = hadolint()
    if tool is None:
        pytest.skip("hadolint is not here: its package has no binary for this machine")
    found = subprocess.run([tool, str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    tool = hadolint()
    if tool is None:
        pytest.skip("hadolint is not here: its package has no binary for this machine")
    (tmp_path / "Dockerfile").write_text("FROM python:latest\nRUN cd /tmp\nUSER root\n")
    assert subprocess.run([tool, str(tmp_path / "Dockerfile")], capture_output=True, check=False).returncode == 1


def test_what_they_come_from_is_pinned() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    pins = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    own = set(stages())
    for source in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        if source not in own:
            tag = source.replace("${PYTHON}", pins["PYTHON"]).partition(":")[2]
            assert re.match(r"\d+\.\d+\.\d+", tag), f"{source} is not pinned"


@pytest.mark.parametrize("name", IMAGES)
def test_they_run_as_nobody_in_particular(name: str) -> None:
    stage = stages()[name]
    assert last(stage, "USER") == "10001:10001"
    assert stage[-1][0] == "USER", "nothing is done as root after it"
    assert argv(stage, "ENTRYPOINT") == ["signalbox"]
    assert argv(stage, "CMD")[0] == "serve"


@pytest.mark.parametrize("name", IMAGES)
def test_they_have_what_was_built_for_them(name: str) -> None:
    assert ("COPY", f"--from=build-{name} /opt/signalbox /opt/signalbox") in stages()[name]
    install = last(stages()[f"build-{name}"], "RUN")
    wanted = re.search(r"\.\[([a-z,]+)\]", install)
    assert wanted is not None
    assert wanted[1].split(",") == ["otlp"] + ([] if name == "slim" else [name]), "traces go to Jaeger over gRPC"
    assert set(wanted[1].split(",")) <= SETTINGS["project"]["optional-dependencies"].keys()
    constraints = re.search(r"--constraint (\S+)", install)
    assert constraints is not None
    assert (ROOT / constraints[1]).exists()


def test_the_whole_product_is_copied_and_nothing_keeps_it_out() -> None:
    copied = " ".join(rest for word, rest in stages()["source"] if word == "COPY").split()
    sources = {one for one in copied if (ROOT / one).exists() and one != "./"}
    packages = {name.partition(".")[0] for name in SETTINGS["tool"]["setuptools"]["packages"]}
    assert packages <= sources
    project = SETTINGS["project"]
    licences = [one for one in project["license-files"] if one.partition("/")[0] not in packages]
    assert {project["readme"], *licences, "pyproject.toml"} <= sources
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().split()
    assert {one.removeprefix("!") for one in ignored if one.startswith("!")} == sources
    assert ignored[0] == "*"
