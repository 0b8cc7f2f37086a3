"""Two gateways under load while their store fails over, again and again. Needs time: `SIGNALBOX_SOAK_S` says how much.

SIGNALBOX_SOAK_S=120 python -m pytest tests/faults/test_soak.py
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.queue.ledgers import check, tickets
from tests.support.fleet import fleet, until
from tests.support.topology import SERVICE, Clustered, Node, Watched, clustered, wait, watched

__all__ = ["clustered", "watched"]

SOAK_S = float(os.environ.get("SIGNALBOX_SOAK_S", "0"))

pytestmark = [
    pytest.mark.skipif(not SOAK_S, reason="a soak takes minutes: set SIGNALBOX_SOAK_S to the seconds for each store"),
    pytest.mark.slow,
    pytest.mark.timeout(SOAK_S + 120),
]


async def _soak(url: str, directory: Path, fail: Callable[[], Node]) -> None:
    """`fail` kills the primary, waits for another, which it returns, and brings the dead one back as a replica."""
    async with fleet(url, directory, limit=4) as site:
        loop = asyncio.get_running_loop()
        ends, failures = loop.time() + SOAK_S, 0
        async with site.load(16) as load:
            while loop.time() < ends:
                await load.goes_on(200)
                primary = await asyncio.to_thread(fail)
                failures += 1
                await load.goes_on(200)
        site.nothing_lost_or_doubled()
        await until(lambda: not tickets(primary))
        check(primary)
        whole = sum(status == 200 for status, _ in site.answers.values())
        print(f"{failures} failovers, {len(site.answers)} requests, {whole} whole")
        assert failures
        for gateway in site.gateways:
            assert "Traceback" not in gateway.log


def _primary(nodes: list[Node]) -> Node:
    return next(node for node in nodes if b"role:master" in node("INFO", "replication"))


async def test_sentinels(watched: Watched, tmp_path: Path) -> None:
    nodes = [watched.primary, watched.replica]

    def fail() -> Node:
        dead = _primary(nodes)
        heir = next(node for node in nodes if node is not dead)
        dead.kill()
        wait(lambda: b"role:master" in heir("INFO", "replication"), 30)
        wait(lambda: all(_names(one, heir) for one in watched.sentinels), 30)
        dead.start()
        wait(lambda: b"state=online" in heir("INFO", "replication"), 30)
        wait(lambda: all(_has_an_heir(one) for one in watched.sentinels), 30)
        return heir

    await _soak(watched.url, tmp_path, fail)


def _names(sentinel: Node, primary: Node) -> bool:
    return int(sentinel("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1]) == primary.port


def _has_an_heir(sentinel: Node) -> bool:
    replicas = [dict(zip(one[::2], one[1::2], strict=True)) for one in sentinel("SENTINEL", "REPLICAS", SERVICE)]
    return any(one[b"flags"] == b"slave" and one[b"master-link-status"] == b"ok" for one in replicas)


async def test_a_cluster(clustered: Clustered, tmp_path: Path) -> None:
    nodes = [clustered.owner, clustered.replica]

    def fail() -> Node:
        dead = _primary(nodes)
        heir = next(node for node in nodes if node is not dead)
        dead.kill()
        wait(lambda: b"role:master" in heir("INFO", "replication"), 30)
        dead.start()
        wait(lambda: b"state=online" in heir("INFO", "replication"), 30)
        return heir

    await _soak(clustered.url, tmp_path, fail)


async def test_a_slot_that_moves_to_and_fro(clustered: Clustered, tmp_path: Path) -> None:
    there = [clustered.owner, clustered.others[0]]

    def fail() -> Node:
        source, target = there
        for _ in clustered.move(source, target):
            pass
        there.reverse()
        return target

    await _soak(clustered.url, tmp_path, fail)
