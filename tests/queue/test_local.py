"""`store.on_loss = "local"`: processes go on, each with its part, while the shared store is gone, and come back."""

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest

from gateway.queue import embedded, turns, watch
from gateway.queue.book import Book
from gateway.queue.client import BackendShare, Queue, Store, StoreUnfit
from gateway.queue.place import Phase
from gateway.queue.session import Session
from gateway.queue.share import backend_event, part, tenant_event
from gateway.queue.target import Target
from gateway.supervisor import Supervisor
from policies.quota import TenantLimits
from policies.reasons import Reason
from tests.queue.conftest import Join, pool, ticket
from tests.queue.ledgers import check, tickets
from tests.queue.load import Load
from tests.queue.test_client import granted, refused, told, until
from tests.support.store import StoreServer

one_kind = pytest.mark.parametrize("shared_server", ["redis"], indirect=True)
"""The stores' kinds differ in nothing that matters here."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store counts as lost after half a second, and the gateways on it are counted often."""
    monkeypatch.setattr(turns, "TURN_S", 0.5)
    monkeypatch.setattr(watch, "LOOK_S", 0.1)
    monkeypatch.setattr(watch, "RETURN_S", 0.1)


async def two(store: StoreServer, join: Join, *limits: int) -> list[Queue]:
    """Two gateways that know of each other."""
    queues = [await join(store, on_loss="local") for _ in range(2)]
    for queue in queues:
        queue.declare(pool(*limits))
    await until(lambda: all(queue._fallback is not None and queue._fallback.peers == 2 for queue in queues))
    return queues


def test_an_empty_store_shares_with_nobody() -> None:
    store, shared = SimpleNamespace(url="unix:///nowhere"), Target("unix:///nowhere", "signalbox")
    session = Session(Book(1), "x")
    alone = watch.Fallback(store, shared, turns.Turns(session, shared, ""), session.book)  # type: ignore[arg-type]
    for count in (3, *(0 for _ in range(watch.COUNTS - 1))):
        alone._counts.append(count)
        assert alone.peers == 3
    alone._counts.append(0)
    assert alone.peers == 1


def held(queue: Queue) -> int:
    return len(queue.book.held)


@one_kind
async def test_each_goes_on_with_its_part_and_declares_what_it_holds_on_return(
    own_server: StoreServer, join: Join
) -> None:
    queues = await two(own_server, join, 4)
    places = [queue.submit(ticket()) for queue in queues for _ in range(6)]
    await until(lambda: held(queues[0]) + held(queues[1]) == 4)
    await asyncio.to_thread(own_server.kill)
    await until(lambda: {queue.state for queue in queues} == {"local"})
    for queue in queues:
        assert "local" in repr(queue)
        for place in [place for place in places if place._book is queue.book and place.phase is Phase.HELD]:
            place.end()
        await until(lambda q=queue: held(q) == 2)
        await told(queue)
        assert held(queue) == 2
    running = {place.number for place in places if place.phase is Phase.HELD and place._book is queues[0].book}
    await asyncio.to_thread(own_server.start)
    await until(lambda: {queue.state for queue in queues} == {"up"})
    assert {number for number, place in queues[0].book.held.items()} == running
    await until(lambda: all(queue.session.rejoins == 2 for queue in queues))
    for queue in queues:
        await told(queue)
    live = [place for place in places if place.phase in (Phase.WAITING, Phase.HELD)]
    assert len(check(own_server)) == len(live) > len(running)
    for _ in range(len(places)):
        await until(lambda: any(held(queue) for queue in queues) or not any(queue.book.waiting for queue in queues))
        for place in places:
            if place.phase is Phase.HELD:
                place.end()
    await until(lambda: tickets(own_server) == {})
    assert check(own_server) == {}


@one_kind
async def test_a_store_that_only_stood_still_hears_that_what_it_had_is_void(
    own_server: StoreServer, join: Join
) -> None:
    queue = await join(own_server, on_loss="local")
    queue.declare(pool(1))
    first, second = queue.submit(ticket()), queue.submit(ticket())
    await granted(first)
    await told(queue)
    own_server.freeze()
    try:
        await until(lambda: queue.state == "local")
        assert held(queue) == 1
        first.end()
        await granted(second)
    finally:
        own_server.thaw()
    await until(lambda: queue.state == "up" and queue.book.known == 1)
    await told(queue)
    names = {name.decode() for name in own_server("ZRANGEBYSCORE", "{signalbox}:procs", "0", "+inf")}
    assert names == {queue.session.name}
    await until(lambda: len(tickets(own_server)) == 1, 4)  # sooner than one that is silent is reaped
    assert [t[0] for t in check(own_server).values()] == [2]


@one_kind
async def test_a_load_goes_on_through_a_loss_and_back(own_server: StoreServer, join: Join) -> None:
    load = Load(*await two(own_server, join, 4, 4))
    await load.goes_on(100)
    await asyncio.to_thread(own_server.kill)
    await until(lambda: {queue.state for queue in load.queues} == {"local"})
    await load.goes_on(200)
    await asyncio.to_thread(own_server.start)
    await until(lambda: {queue.state for queue in load.queues} == {"up"})
    await load.goes_on(100)
    await load.settle(own_server)
    assert set(load.outcomes) == {"done"}


@one_kind
async def test_a_second_loss_begins_with_an_empty_local_store(own_server: StoreServer, join: Join) -> None:
    queue = await join(own_server, on_loss="local")
    queue.declare(pool(2))
    for _ in range(2):
        held_now = queue.submit(ticket())
        await granted(held_now)
        own_server.freeze()
        await until(lambda: queue.state == "local" and queue.book.known == 1)
        own_server.thaw()
        await until(lambda: queue.state == "up")
        held_now.end()
    own_server.freeze()
    try:
        both = [queue.submit(ticket()) for _ in range(2)]
        for place in both:
            await granted(place)
        assert queue.state == "local"
    finally:
        own_server.thaw()


@one_kind
async def test_where_the_local_store_is_gone_too_requests_are_refused(
    own_server: StoreServer, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "ANSWER_S", 0.2)
    queue = await join(own_server, on_loss="local")
    queue.declare(pool(0))
    waiting = queue.submit(ticket())
    await until(lambda: queue.joined)
    await told(queue)
    local = queue._embedded
    assert local is not None
    assert local.pid is not None
    os.kill(local.pid, signal.SIGSTOP)
    try:
        own_server.freeze()
        assert await refused(waiting) is Reason.STORE_LOST
        assert queue.state == "lost"
        os.kill(local.pid, signal.SIGCONT)
        await until(lambda: queue.state == "local")
        assert not queue.lost
    finally:
        own_server.thaw()
    await until(lambda: queue.state == "up")


@one_kind
async def test_local_needs_a_store_to_go_on_with(
    server: StoreServer, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_candidates", list)
    with pytest.raises(StoreUnfit, match=r"store\.on_loss: `local` needs .* found none"):
        await Queue.connect(Store(url=server.url, on_loss="local"), supervisor)


def test_a_part_of_a_backend_has_a_part_of_its_room_and_more_beside_it() -> None:
    whole = BackendShare("a", 10, 9000, 100_000, 2048, False, 5000, 80_000, 100, 7, 1150, 2000)
    assert backend_event(whole, 1) == ["a", 10, 9000, 100_000, 2048, 0, 5000, 80_000, 100, 7, 1150, 2000]
    assert backend_event(whole, 3) == ["a", 3, 3000, 33_333, 682, 0, 5000, 240_000, 300, 21, 1150, 2000]
    limits = TenantLimits(requests_per_min=60, tokens_per_min=0, tokens_in_flight=2, max_queued=9)
    assert tenant_event("t", limits, 4) == [10, "t", 15, 0, 1, 2]
    assert [part(limit, 4) for limit in (0, 1, 8)] == [0, 1, 2]
