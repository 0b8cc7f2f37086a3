"""A store that is there and not well: slow, full. Its clock jumps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis

from gateway.queue.place import Phase
from policies.lifecycle import State
from tests.faults.test_store import status, streaming
from tests.queue.conftest import pool, ticket
from tests.queue.procs import Clock, Process, load
from tests.support.quiet import zero
from tests.support.site import Site, running
from tests.support.store import StoreServer, own_server, server, shared_server

__all__ = ["own_server", "server", "shared_server"]

HOUR_MS = 3_600_000

ONE = """
[store]
url = "%s"

[[pool]]
model = "demo"
[[pool.backend]]
kind = "simulated"
name = "one"
a0_ms = 20.0
limits = { max_running = 1 }
"""


@asynccontextmanager
async def site_on(server: StoreServer) -> AsyncIterator[Site]:
    async with running(ONE % server.url) as site:
        yield site
        await zero(site)


async def test_a_store_that_pauses_is_waited_for(server: StoreServer) -> None:
    async with site_on(server) as site:
        await asyncio.to_thread(server, "CLIENT", "PAUSE", 900, "ALL")
        assert await asyncio.gather(*(status(site) for _ in range(4))) == [(200, "")] * 4
        assert site.trunk.queue.session.rejoins == 0


async def test_a_full_store_still_takes_turns(server: StoreServer) -> None:
    """Turns may go over `maxmemory`: one that was refused could not give a lease back either."""
    async with site_on(server) as site, streaming(site, tokens=250) as line:
        server("CONFIG", "SET", "maxmemory", 1)
        try:
            with pytest.raises(redis.ResponseError, match="maxmemory"):
                server("SET", "any", "thing")
            waiting = [asyncio.ensure_future(status(site)) for _ in range(3)]
            await site.until(lambda: [one.state for one in site.live()][1:] == [State.QUEUED] * 3)
            line.leave()
            assert await asyncio.gather(*waiting) == [(200, "")] * 3
            assert site.trunk.queue.session.rejoins == 0
        finally:
            server("CONFIG", "SET", "maxmemory", 0)


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS])
def test_a_clock_that_jumps_ends_no_lease_and_no_wait(server: StoreServer, jump_ms: int) -> None:
    clock = Clock()
    load(server)
    one, other = Process(server, "A", clock), Process(server, "B", clock)
    for process in (one, other):
        process.declare(pool(1))
        process.settle()
    held = one.submit(ticket(waits_ms=60_000))
    one.settle()
    waits = other.submit(ticket(waits_ms=60_000))
    other.settle()
    clock.wall_ms += jump_ms
    for process in (one, other, one):
        process.beat()
    assert (held.phase, waits.phase) == (Phase.HELD, Phase.WAITING)
    assert (one.session.rejoins, other.session.rejoins) == (0, 0)
    held.end(1, True)
    one.settle()
    other.settle()
    assert waits.phase is Phase.HELD
