"""Fixtures of the shared queue's tests: stores, queues on them, and short ways to say what is asked for."""

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from gateway.queue.client import BackendShare, PoolShare, Queue, Store
from gateway.supervisor import Supervisor
from policies.types import Ticket
from tests.queue.procs import Clock, Process, load
from tests.support.store import StoreServer, own_server, server, shared_server

__all__ = ["own_server", "server", "shared_server"]

Join = Callable[..., Coroutine[Any, Any, Queue]]


def pool(*limits: int, name: str = "m", closed: tuple[int, ...] = ()) -> PoolShare:
    """A pool with one backend per running limit, named a, b, c, …; no window on outstanding prompts."""
    shares = (
        BackendShare(chr(97 + i), limit, 50_000, 100_000, 0, open=i not in closed) for i, limit in enumerate(limits)
    )
    return PoolShare(name, tuple(shares))


def ticket(**changes: Any) -> Ticket:
    fields = {"tenant": "t", "rank": 1, "pool": "m", "prompt_tokens": 100, "output_tokens": 50, "waits_ms": 20_000}
    return Ticket(**{**fields, **changes})


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    """Holds that no task of the queue crashed."""
    parent = Supervisor(lambda: None)
    yield parent
    await parent.aclose()
    assert parent.crashed is None


@pytest.fixture
async def join(supervisor: Supervisor) -> AsyncIterator[Join]:
    """Connects queues to a server, as so many gateway processes; closes them."""
    queues: list[Queue] = []

    async def connect(store: StoreServer, **settings: Any) -> Queue:
        queue = await Queue.connect(Store(url=store.url, **settings), supervisor)
        queues.append(queue)
        return queue

    yield connect
    for queue in queues:
        await queue.aclose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pair(server: StoreServer, clock: Clock) -> tuple[Process, Process]:
    """Two processes and a pool with room for one."""
    load(server)
    processes = Process(server, "A", clock), Process(server, "B", clock)
    for process in processes:
        process.declare(pool(1))
        process.settle()
    return processes
