"""SIGKILL of the process that holds the engine: the engine and its workers go too. It is one for embeddings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import ROOT

pytestmark = pytest.mark.engines

GONE_S = 5.0


@pytest.fixture(scope="module")
def host(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("host")
    log = folder / "host.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.host", str(tiny)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    assert process.stdout is not None
    lines = (line for line in process.stdout if line.startswith(b"{"))
    told = next(lines, None)
    assert told is not None, log.read_text()[-3000:]
    yield process, json.loads(told)
    process.kill()
    process.wait()
    process.stdout.close()


def test_embeddings_come_from_a_pooling_model(host: tuple[Any, dict[str, Any]]) -> None:
    _, told = host
    assert told["kinds"] == ["embeddings", "tokenize"]
    assert [len(one["embedding"]) for one in told["answer"]["data"]] == [128, 128]
    assert told["planned"] == told["used"] == told["answer"]["usage"]["prompt_tokens"]
    assert told["more"] is False


def test_engine_ends_with_its_killed_host(host: tuple[subprocess.Popen[bytes], dict[str, Any]]) -> None:
    process, told = host
    (engine,) = told["engines"]
    family = [engine, *children(engine)]
    assert len(family) > 1, "the engine has no worker process: look at what this test should watch"
    assert all(alive(pid) for pid in family)
    os.kill(process.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    while any(alive(pid) for pid in family):
        assert time.monotonic() - killed_at < GONE_S, f"still there: {[pid for pid in family if alive(pid)]}"
        time.sleep(0.02)


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
