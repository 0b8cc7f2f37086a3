"""A background task that crashes takes its process down, in order and with a clear log."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.reaper import Reaper
from gateway.supervisor import Supervisor

ROOT = Path(__file__).parent.parent.parent

SABOTAGED = """
import sys
from gateway.app import build
from gateway.config import decode
from gateway.serving import listen, run
from gateway.telemetry import logs
from tests.support.site import POOL

async def saboteur():
    raise RuntimeError("a bug in a background task")

logs.configure()
config = decode(b"[server]\\nport = 0\\n" + POOL.encode())
app = build(config)
ready = lambda: app.state.trunk.supervisor.start("saboteur", saboteur())
sys.exit(run(app, listen(config.server), ready))
"""


def test_a_crashed_background_task_stops_the_process_with_a_clear_log() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SABOTAGED], cwd=ROOT, capture_output=True, text=True, timeout=25, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "background task saboteur crashed; the process stops" in done.stderr
    assert "RuntimeError: a bug in a background task" in done.stderr
    assert "Traceback" in done.stderr


async def test_a_supervisor_tells_once_and_ends_the_rest() -> None:
    told: list[str] = []
    supervisor = Supervisor(lambda: told.append("crashed"))

    async def fails() -> None:
        raise ValueError("no")

    async def waits() -> None:
        await asyncio.Event().wait()

    waiting = supervisor.start("waits", waits())
    await asyncio.wait([supervisor.start("first", fails()), supervisor.start("second", fails())])
    await asyncio.sleep(0)
    assert (told, supervisor.crashed) == (["crashed"], "first")
    assert repr(supervisor) == "<Supervisor waits, crashed: first>"
    await supervisor.aclose()
    assert waiting.cancelled()


async def test_a_reaper_bounds_what_it_is_given_and_counts_what_failed(caplog: pytest.LogCaptureFixture) -> None:
    reaper = Reaper(limit_s=0.05)
    ended: list[str] = []

    async def good() -> None:
        ended.append("good")

    async def stuck() -> None:
        await asyncio.Event().wait()

    async def broken() -> None:
        raise OSError("no")

    for what in (good, stuck, broken):
        reaper.close(what)
    assert len(reaper) == 3
    await reaper.drain()
    assert (ended, len(reaper), reaper.failed) == (["good"], 0, 2)
    assert caplog.text.count("a clean-up failed") == 2
