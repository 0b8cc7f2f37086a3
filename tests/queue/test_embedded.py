"""The embedded store: starts fast, is private, ends with its parent, comes back when it dies, leaves nothing."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.queue import embedded
from gateway.queue.channel import StoreUnfit
from gateway.queue.client import Queue, Store
from gateway.queue.embedded import Embedded
from gateway.supervisor import Supervisor
from tests.queue.conftest import pool, ticket

PARENT = """
import asyncio, sys
from gateway.queue.embedded import Embedded
async def main():
    store = await Embedded.start()
    print(store.pid, store.home, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def own_tmp(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder with a short name: a unix socket's path holds 107 bytes."""
    tmp_path_factory.getbasetemp()  # pytest's own folder is made on first use, and must not be made in here
    with tempfile.TemporaryDirectory(prefix="sb-") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        monkeypatch.setenv("TMPDIR", short)
        yield Path(short)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


async def test_a_queue_on_an_embedded_store_and_nothing_after(supervisor: Supervisor, own_tmp: Path) -> None:
    began = time.perf_counter()
    queue = await Queue.connect(Store(), supervisor)
    assert time.perf_counter() - began < 1.0
    queue.declare(pool(1))
    place = queue.submit(ticket())
    assert await place.granted() == 0
    assert queue._embedded is not None
    pid, home = queue._embedded.pid, queue._embedded.home
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE(queue._embedded.socket.stat().st_mode) == 0o700
    assert os.getpgid(pid or 0) != os.getpgid(0)  # an interrupt from the terminal does not reach it
    if queue._embedded.raised:
        assert os.getpriority(os.PRIO_PROCESS, pid or 0) == embedded.NICE
    await queue.aclose()
    assert not running(pid or 0)
    assert list(own_tmp.iterdir()) == []


async def test_a_killed_store_comes_back_and_leases_live_on(supervisor: Supervisor) -> None:
    queue = await Queue.connect(Store(), supervisor)
    queue.declare(pool(2))
    held = queue.submit(ticket())
    await held.granted()
    store = queue._embedded
    assert store is not None
    os.kill(store.pid or 0, signal.SIGKILL)
    more = [queue.submit(ticket()) for _ in range(2)]
    await asyncio.wait_for(more[0].granted(), 3)
    assert queue.session.rejoins == 1
    assert queue.book.held.keys() == {held.number, more[0].number}
    held.end()
    await asyncio.wait_for(more[1].granted(), 3)
    await queue.aclose()


async def test_a_worker_gets_no_advice_on_its_parents_store(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    store = await Embedded.start()
    try:
        queue = await Queue.connect(Store(url=store.url), supervisor)
        await queue.aclose()
    finally:
        await store.aclose()
    assert not [record for record in caplog.records if "appendonly" in record.message]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_store_dies_with_its_parent(how: signal.Signals, own_tmp: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, home = parent.stdout.readline().split()
    assert running(int(pid))
    parent.send_signal(how)
    parent.wait()
    parent.stdout.close()
    limit = time.monotonic() + 5
    while running(int(pid)) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not running(int(pid))
    assert Path(home).exists()
    embedded.clean_up_after_others()
    assert not Path(home).exists()


async def test_cleaning_up_spares_what_is_in_use(own_tmp: Path) -> None:
    store = await Embedded.start()
    (own_tmp / f"{embedded.PREFIX}unlocked").mkdir()  # one that is being made
    try:
        await asyncio.to_thread(embedded.clean_up_after_others)
        assert store.socket.exists()
        assert (own_tmp / f"{embedded.PREFIX}unlocked").exists()
    finally:
        await store.aclose()


async def test_a_server_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch, own_tmp: Path) -> None:
    monkeypatch.setattr(Embedded, "_settings", lambda _: ["--no-such-setting", "1"])
    with pytest.raises(StoreUnfit, match=r"store\.url: the embedded store .* did not start: (.|\n)*no-such-setting"):
        await Embedded.start()
    assert list(own_tmp.iterdir()) == []


async def test_no_server_at_all_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "redis-server"
    fake.write_text("#!/bin/sh\necho 'Redis server v=6.2.7 sha=0'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(embedded.shutil, "which", lambda name: str(fake) if name == "redis-server" else None)
    monkeypatch.setattr(embedded, "_packaged", lambda: None)
    with pytest.raises(StoreUnfit, match=r"store\.url: `embedded` needs .* found .*redis-server \(too old\)"):
        await Embedded.start()
