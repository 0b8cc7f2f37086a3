"""The whole client under real faults: a store that freezes, dies and comes back, and processes killed with signal 9."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gateway.queue import turns
from gateway.queue.client import Place, Queue, QueueRefusal
from gateway.queue.place import Phase
from policies.reasons import Reason, Refusal
from tests.queue.conftest import Join, pool, ticket
from tests.queue.ledgers import check, tickets
from tests.queue.test_client import granted, refused, told, until
from tests.support.store import StoreServer

VICTIM = """
import asyncio, sys
from gateway.queue.client import Queue, Store
from gateway.supervisor import Supervisor
from tests.queue.conftest import pool, ticket
async def main():
    queue = await Queue.connect(Store(url=sys.argv[1]), Supervisor())
    queue.declare(pool(500))
    places = [queue.submit(ticket(waits_ms=60_000)) for _ in range(600)]
    for place in places[:500]:
        await place.granted()
    print("held", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


SERVED = """
import asyncio, sys
from gateway.queue.client import Queue, Store
from gateway.supervisor import Supervisor
from policies.fairness import prices
from tests.queue.conftest import pool, ticket
async def main():
    queue = await Queue.connect(Store(url=sys.argv[1]), Supervisor())
    queue.declare(pool(4))
    served, over = {"a": 0, "b": 0, "c": 0}, asyncio.Event()
    async def client(name, weight):
        cost = prices(weight)
        asked = ticket(tenant=name, waits_ms=60_000, prefill_price=cost.prefill, output_price=cost.output)
        while not over.is_set():
            place = queue.submit(asked)
            await place.granted()
            await asyncio.sleep(0.002)
            place.end(50, ran=True)
            served[name] += 1
    clients = [asyncio.ensure_future(client(n, w)) for n, w in (("a", 1), ("b", 2), ("c", 4)) for _ in range(8)]
    while min(served.values()) == 0:
        await asyncio.sleep(0.01)
    print("serving", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    before = dict(served)
    await asyncio.sleep(2.0)
    print(*(served[name] - before[name] for name in "abc"), flush=True)
    over.set()
    await asyncio.gather(*clients)
    await queue.aclose()
asyncio.run(main())
"""


def test_shares_hold_over_two_real_processes(server: StoreServer) -> None:
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SERVED, server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        for process in both:
            assert process.stdout is not None
            assert process.stdout.readline() == "serving\n"
        outputs = [process.stdin for process in both]
        for pipe in outputs:
            assert pipe is not None
            pipe.write("\n")
            pipe.flush()
        served = [[int(n) for n in (process.stdout or sys.stdin).readline().split()] for process in both]
        total = [sum(column) for column in zip(*served, strict=True)]
        for n, weight in zip(total, (1, 2, 4), strict=True):
            assert n / sum(total) == pytest.approx(weight / 7, rel=0.05), served
        assert all(min(one) > 0 for one in served)
        assert [process.wait(10) for process in both] == [0, 0]
        assert server.keys() == []
    finally:
        for process in both:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def victim(server: StoreServer) -> Iterator[subprocess.Popen[str]]:
    """A process that holds all 500 places and waits for 100 more."""
    process = subprocess.Popen([sys.executable, "-c", VICTIM, server.url], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


async def test_kill_9_of_a_process_frees_its_leases(
    victim: subprocess.Popen[str], server: StoreServer, join: Join
) -> None:
    queue = await join(server)
    queue.declare(pool(500))
    mine = [queue.submit(ticket()) for _ in range(10)]
    await told(queue)
    assert {place.phase for place in mine} == {Phase.WAITING}
    victim.kill()
    began = time.monotonic()
    await asyncio.wait_for(asyncio.gather(*(place.granted() for place in mine)), 7)
    await until(lambda: len(tickets(server)) == 10, 7 - (time.monotonic() - began))
    assert time.monotonic() - began < 6.0
    await told(queue)
    assert len(check(server)) == 10


async def test_a_frozen_store_refuses_who_waits_and_keeps_who_runs(
    own_server: StoreServer, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.5)
    queue = await join(own_server)
    queue.declare(pool(1))
    held, waiting = queue.submit(ticket()), queue.submit(ticket())
    await granted(held)
    await told(queue)
    own_server.freeze()
    try:
        began = time.monotonic()
        fresh = queue.submit(ticket())
        assert await refused(waiting) is Reason.STORE_LOST
        assert await refused(fresh) is Reason.STORE_LOST
        assert time.monotonic() - began < 1.5
        assert queue.lost
        assert "lost" in repr(queue)
        await until(lambda: queue.turns.link is None)
        refusal = await refusal_of(queue.submit(ticket()))
        assert (refusal.reason, refusal.retry_after_s) == (Reason.STORE_LOST, 1.0)
        assert held.phase is Phase.HELD
    finally:
        own_server.thaw()
    await until(lambda: not queue.lost)
    again = queue.submit(ticket())
    held.end()
    assert await granted(again) == 0
    await until(lambda: queue.book.known == 1)
    await told(queue)
    assert len(check(own_server)) == 1


async def refusal_of(place: Place) -> Refusal:
    with pytest.raises(QueueRefusal) as caught:
        await place.granted()
    return caught.value.refusal


async def test_a_wait_ends_at_its_deadline_even_if_the_store_is_silent(own_server: StoreServer, join: Join) -> None:
    queue = await join(own_server)
    queue.declare(pool(0))
    await told(queue)
    own_server.freeze()
    try:
        began = time.monotonic()
        assert await refused(queue.submit(ticket(waits_ms=300))) is Reason.EXPIRED
        assert 0.25 < time.monotonic() - began < 0.9
    finally:
        own_server.thaw()
    await until(lambda: not queue.book.pending and not queue.session.flying)
    assert tickets(own_server) == {}


@pytest.mark.parametrize("with_data", [True, False])
async def test_a_store_killed_under_load_loses_and_doubles_nothing(
    own_server: StoreServer, join: Join, with_data: bool
) -> None:
    queues = [await join(own_server) for _ in range(2)]
    for queue in queues:
        queue.declare(pool(4, 4))
    running, over = 0, False
    outcomes: list[str] = []

    async def worker(queue: Queue) -> None:
        nonlocal running
        while not over:
            place = queue.submit(ticket(tenant=f"t{len(outcomes) % 5}"))
            try:
                await place.granted()
                running += 1
                await asyncio.sleep(0.001)
                running -= 1
                outcomes.append("done")
            except QueueRefusal as refusal:
                outcomes.append(refusal.refusal.reason)
                await asyncio.sleep(0.01)
            finally:
                place.end()

    workers = [asyncio.ensure_future(worker(queue)) for queue in queues for _ in range(12)]
    await until(lambda: len(outcomes) > 100)
    if with_data:
        own_server("SAVE")
    await asyncio.to_thread(own_server.kill)
    await asyncio.sleep(0.2)
    await asyncio.to_thread(own_server.start)
    so_far = len(outcomes)
    await until(lambda: len(outcomes) > so_far + 200, 10)
    over = True
    await asyncio.wait_for(asyncio.gather(*workers), 10)
    assert running == 0
    assert set(outcomes) <= {"done", Reason.STORE_LOST}
    for queue in queues:
        assert queue.session.rejoins >= 1
        await until(lambda q=queue: q.book.known == 0)
        await told(queue)
    await until(lambda: tickets(own_server) == {}, 10)
    assert check(own_server) == {}


async def test_both_processes_wake_each_other_by_mail(server: StoreServer, join: Join) -> None:
    one, two = await join(server), await join(server)
    for queue in (one, two):
        queue.declare(pool(1))
    places = [queue.submit(ticket()) for _ in range(20) for queue in (one, two)]
    for _ in places:
        await until(lambda: any(p.phase is Phase.HELD for p in places), 2)
        (holder,) = (p for p in places if p.phase is Phase.HELD)
        holder.end()
    assert {p.phase for p in places} == {Phase.ENDED}


async def test_a_process_that_stood_still_blames_itself_not_the_store(own_server: StoreServer, join: Join) -> None:
    queue = await join(own_server)
    queue.declare(pool(1))
    await granted(queue.submit(ticket()))
    own_server.freeze()
    try:
        waiting = queue.submit(ticket())
        await until(lambda: queue.session.flying)
        time.sleep(turns.TURN_S + 0.3)
        await asyncio.sleep(0.3)
        assert not queue.lost
    finally:
        own_server.thaw()
    await told(queue)
    assert waiting.phase is Phase.WAITING


async def test_mail_comes_at_once_after_a_rejoin(server: StoreServer, join: Join) -> None:
    one, two = await join(server), await join(server)
    for queue in (one, two):
        queue.declare(pool(1))
    holder = one.submit(ticket())
    await granted(holder)
    waiting = two.submit(ticket())
    await told(two)
    two.session.rejoin("test")
    await told(two)
    await until(lambda: server("ZSCORE", "{signalbox}:procs", f"{two.session.base}.0") is None)
    holder.end()
    assert await asyncio.wait_for(waiting.granted(), 1) == 0
