"""Whichever worker is watched, the console shows the requests of all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from gateway.tenants import hash_key
from tests.support.fleet import _kill, until
from tests.support.process import Gateway
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
async def only(worker: psutil.Process, others: list[psutil.Process]) -> AsyncIterator[None]:
    """New connections go to this worker: the others stand still."""
    for other in others:
        if other != worker:
            other.suspend()
            await until(lambda other=other: other.status() == psutil.STATUS_STOPPED)
    try:
        yield
    finally:
        for other in others:
            other.resume()


async def test_the_requests_of_all_workers_are_shown_on_each(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(SLOW)
    gateway = Gateway(["--config", str(tmp_path / "c.toml")], tmp_path)
    async with AsyncExitStack() as stack:
        stack.callback(_kill, gateway.process)
        await asyncio.to_thread(gateway.ready)
        workers = [one for one in gateway.process.children() if "gateway.workers" in one.cmdline()]
        assert len(workers) == 2
        for nth, worker in enumerate(workers):
            async with only(worker, workers):
                for each in range(3):
                    await ask(stack, gateway, f"{nth}-{each}")
        everyone = {f"{nth}-{each}" for nth in range(2) for each in range(3)}
        for worker in workers:
            async with AsyncExitStack() as watching:
                async with only(worker, workers):
                    viewer = await watching.enter_async_context(Watched(None, None).feed(gateway.url))  # type: ignore[arg-type]
                    await viewer.next()
                seen = await viewer.until(lambda seen: len(seen.requests) == len(everyone) and all(states(seen)))
                assert {request.id for request in seen.requests} == everyone
                assert (states(seen), seen.workers, seen.gateways) == ((2, 4), 2, 2)
                assert [(one.name, one.waiting) for one in seen.tenants] == [("alice", {"batch": 4})]


def states(seen: Any) -> tuple[int, int]:
    """How many run and how many wait, by the list and by the counts, once they agree."""
    found = [request.state for request in seen.requests]
    running, waiting = len(found) - found.count("queued"), found.count("queued")
    agree = (running, waiting) == (seen.live["granted"] + seen.live["streaming"], seen.live["queued"])
    return (running, waiting) if agree else (0, 0)


async def ask(stack: AsyncExitStack, gateway: Gateway, name: str) -> None:
    """A request on a connection of its own, that goes on until the end; returns once it is at a worker."""
    body = {"model": "demo", "stream": True, "max_tokens": 4000, "min_tokens": 4000, "messages": []}
    body["messages"] = [{"role": "user", "content": "hello"}]
    headers = {"authorization": "Bearer sk-alice", "x-request-id": name, "x-priority-class": "batch"}
    client = await stack.enter_async_context(aiohttp.ClientSession())
    sent = asyncio.Event()
    trace = aiohttp.TraceConfig()

    async def on_sent(*_: Any) -> None:
        sent.set()

    trace.on_request_headers_sent.append(on_sent)
    trace.freeze()
    client._trace_configs.append(trace)

    async def stream() -> None:
        async with client.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as answer:
            await answer.read()

    task = asyncio.get_running_loop().create_task(stream())
    stack.push_async_callback(_ended, task)
    async with asyncio.timeout(20):
        await sent.wait()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
