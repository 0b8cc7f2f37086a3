"""Two gateway processes on one store: what holds over both, and what is left when one of them or the store dies."""

import asyncio
import itertools
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.queue.ledgers import HELD, STATE, check, tickets
from tests.support.fleet import WEIGHTS, Fleet, fleet, until
from tests.support.store import StoreServer, own_server, server, shared_server
from tests.support.upstream_frames import Script

__all__ = ["own_server", "server", "shared_server"]

LIVE = 500
FREED_S = 6.0
SLACK_S = 1.5
"""What a busy machine may add."""

valkey = pytest.mark.parametrize("shared_server", ["valkey"], indirect=True)
redis = pytest.mark.parametrize("shared_server", ["redis"], indirect=True)


async def _queued(site: Fleet, store: StoreServer, asked: list[tuple[str, str, str]]) -> list["asyncio.Future[object]"]:
    """Requests (tag, tenant, class) to either gateway in turn, each in the queue before the next comes."""
    tasks: list[asyncio.Future[object]] = []
    before = len(tickets(store))
    for gateway, one in zip(itertools.cycle(site.gateways), asked, strict=False):
        tasks.append(asyncio.ensure_future(site.ask(gateway, *one)))
        await until(lambda: len(tickets(store)) == before + len(tasks))
    return tasks


@redis
async def test_order_and_shares_hold_over_both(server: StoreServer, tmp_path: Path) -> None:
    async with fleet(server.url, tmp_path, limit=1) as site:
        site.engine.script = Script(hold_at=0)
        first = asyncio.ensure_future(site.ask(site.gateways[0], "first"))
        await until(lambda: len(site.engine.generations) == 1)
        classes = [(rank, "a", rank) for rank in ("batch", "standard", "interactive")]
        tasks = await _queued(site, server, classes)
        crowd = [(f"{name}{i}", name, "batch") for i in range(10) for name in WEIGHTS]
        tasks += await _queued(site, server, crowd)
        site.engine.script = Script()
        site.engine.release()
        await asyncio.gather(first, *tasks)
        served = site.served()
        assert served[:3] == ["first", "interactive", "standard"]
        shares = Counter(tag[0] for tag in served[3 : 3 + 14] if tag != "batch")
        for name, weight in WEIGHTS.items():
            assert abs(shares[name] - 2 * weight) <= 1, served
        site.nothing_lost_or_doubled()
        await until(lambda: not tickets(server))
        check(server)


@pytest.mark.timeout(60)
@valkey
async def test_kill_9_with_500_live_requests_frees_them_all(server: StoreServer, tmp_path: Path) -> None:
    async with fleet(server.url, tmp_path, limit=LIVE) as site:
        victim, other = site.gateways
        site.engine.script = Script(hold_at=1)
        doomed = [asyncio.ensure_future(site.ask(victim, f"doomed {i}")) for i in range(LIVE)]
        await until(lambda: len(site.engine.generations) == LIVE)
        site.engine.script = Script()
        waiting = [asyncio.ensure_future(site.ask(other, f"waits {i}")) for i in range(20)]
        await until(lambda: Counter(t[STATE] for t in tickets(server).values())[HELD] == LIVE < len(tickets(server)))
        loop = asyncio.get_running_loop()
        victim.process.kill()
        began = loop.time()
        assert await asyncio.gather(*waiting) == [(200, "whole")] * 20
        await until(lambda: not tickets(server))
        freed_s = loop.time() - began
        print(f"freed after {freed_s:.1f} s")
        assert freed_s < FREED_S + SLACK_S
        assert set(await asyncio.gather(*doomed)) <= {(0, ""), (200, "broken")}
        check(server)
        assert await site.ask(other, "after") == (200, "whole")
        assert site.engine.running == 0


@pytest.mark.timeout(60)
@redis
async def test_a_store_killed_under_load_comes_back_with_its_data_and_without(
    shared_server: StoreServer, tmp_path: Path
) -> None:
    store = StoreServer(shared_server.binary, "--appendonly", "yes")
    try:
        async with fleet(store.url, tmp_path, limit=4) as site:
            async with site.load(12) as load:
                for with_data in (True, False):
                    await load.goes_on(100)
                    await asyncio.to_thread(store.kill)
                    if not with_data:
                        shutil.rmtree(store.home / "appendonlydir")
                    await asyncio.sleep(0.3)
                    await asyncio.to_thread(store.start)
                await load.goes_on(100)
            site.nothing_lost_or_doubled()
            await until(lambda: not tickets(store))
            check(store)
    finally:
        store.close()
