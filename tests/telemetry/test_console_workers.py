"""Whichever worker is watched, the console shows the requests of all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from gateway.telemetry.snapshot import Snapshot
from gateway.tenants import hash_key
from tests.support.fleet import until
from tests.support.process import gateway
from tests.support.watched import Watched

SLOW = f"""
[server]
workers = 2
admin_keys = ["{hash_key("admin")}"]
[[tenant]]
name = "alice"
keys = ["{hash_key("sk-alice")}"]
[[pool]]
model = "demo"
[[pool.backend]]
kind = "simulated"
name = "one"
a0_ms = 250.0
limits = {{ max_running = 2 }}
"""

pytestmark = pytest.mark.timeout(90)


@asynccontextmanager
async def only(worker: psutil.Process, workers: list[psutil.Process]) -> AsyncIterator[None]:
    """New connections go to this worker: the others stand still."""
    others = [other for other in workers if other != worker]
    try:
        for other in others:
            other.suspend()
            await until(lambda other=other: other.status() == psutil.STATUS_STOPPED)
        yield
    finally:
        for other in others:
            other.resume()


async def test_the_requests_of_all_workers_are_shown_on_each(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(SLOW)
    async with AsyncExitStack() as stack:
        one = stack.enter_context(gateway(tmp_path, "--config", str(tmp_path / "c.toml")))
        workers = [child for child in one.process.children() if "gateway.workers" in child.cmdline()]
        assert len(workers) == 2
        for nth, worker in enumerate(workers):
            async with only(worker, workers):
                before = connections(worker)
                for each in range(3):
                    await ask(stack, one.url, f"{nth}-{each}")
                await until(lambda worker=worker, before=before: connections(worker) >= before + 3)
        everyone = {f"{nth}-{each}" for nth in range(2) for each in range(3)}
        for worker in workers:
            async with AsyncExitStack() as watching:
                async with only(worker, workers):
                    viewer = await watching.enter_async_context(Watched(None, None).feed(one.url))  # type: ignore[arg-type]
                    await viewer.next()
                seen = await viewer.until(lambda seen: {request.id for request in seen.requests} == everyone)
                seen = await viewer.until(lambda seen: states(seen) == (2, 4))
                assert (seen.workers, seen.gateways) == (2, 2)
                assert [(tenant.name, tenant.waiting) for tenant in seen.tenants] == [("alice", {"batch": 4})]


def connections(worker: psutil.Process) -> int:
    """How many clients it has."""
    return sum(one.status == psutil.CONN_ESTABLISHED for one in worker.net_connections("tcp"))


def states(seen: Snapshot) -> tuple[int, int]:
    """How many run and how many wait, by the list and by the counts; (0, 0) where they differ."""
    found = [request.state for request in seen.requests]
    running, waiting = len(found) - found.count("queued"), found.count("queued")
    agree = (running, waiting) == (seen.live["granted"] + seen.live["streaming"], seen.live["queued"])
    return (running, waiting) if agree else (0, 0)


async def ask(stack: AsyncExitStack, url: str, name: str) -> None:
    """Begin a request on a connection of its own, that goes on until the end."""
    body = {
        "model": "demo", "stream": True, "max_tokens": 4000, "min_tokens": 4000,
        "messages": [{"role": "user", "content": "hello"}],
    }  # fmt: skip
    headers = {"authorization": "Bearer sk-alice", "x-request-id": name, "x-priority-class": "batch"}
    client = await stack.enter_async_context(aiohttp.ClientSession())

    async def stream() -> None:
        async with client.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            await answer.read()

    stack.push_async_callback(_ended, asyncio.get_running_loop().create_task(stream()))


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
