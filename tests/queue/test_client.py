"""The queue as the trunk uses it: grants, order, refusals, cancels, bounds; several processes on one store."""

import asyncio

import pytest

from gateway.queue.client import Place, PoolShare, Queue, QueueRefusal
from gateway.queue.place import Phase
from policies.reasons import Reason
from tests.queue.conftest import Join, pool, ticket
from tests.support.store import StoreServer


async def until(what: object, limit_s: float = 5.0) -> None:
    """Wait for a condition given as a callable."""
    assert callable(what)
    async with asyncio.timeout(limit_s):
        while not what():
            await asyncio.sleep(0.005)


async def refused(place: Place) -> Reason:
    with pytest.raises(QueueRefusal) as caught:
        await asyncio.wait_for(place.granted(), 5)
    return caught.value.refusal.reason


async def granted(place: Place) -> int:
    return await asyncio.wait_for(place.granted(), 5)


async def told(queue: Queue) -> None:
    """Everything said so far has been answered."""
    await until(lambda: not queue.book.pending and not queue.session.flying)


async def test_grants_up_to_the_limit_and_hands_on(server: StoreServer, join: Join) -> None:
    queue = await join(server)
    queue.declare(pool(2))
    first, second, third = (queue.submit(ticket()) for _ in range(3))
    assert [await granted(first), await granted(second)] == [0, 0]
    await told(queue)
    assert third.phase is Phase.WAITING
    first.first_token()
    first.end(7, ran=True)
    assert await granted(third) == 0


async def test_candidates_come_best_first(server: StoreServer, join: Join) -> None:
    queue = await join(server)
    queue.declare(pool(1, 3, 2))
    assert await granted(queue.submit(ticket(backends=(1,)))) == 1
    assert await granted(queue.submit(ticket(backends=(2, 0)))) == 2
    assert await granted(queue.submit(ticket(backends=(0, 2)))) == 0
    assert await granted(queue.submit(ticket(backends=(0, 2)))) == 2
    assert queue.submit(ticket(backends=(0,))).phase is Phase.WAITING


async def test_class_rank_first_then_arrival_over_processes(server: StoreServer, join: Join) -> None:
    one, two = await join(server), await join(server)
    for queue in (one, two):
        queue.declare(pool(1))
    holder = one.submit(ticket())
    await granted(holder)
    places: dict[str, Place] = {}
    for name, queue, rank in (
        ("low", one, 2),
        ("first", two, 1),
        ("second", one, 1),
        ("third", two, 1),
        ("high", two, 0),
        ("fourth", one, 1),
    ):
        places[name] = queue.submit(ticket(rank=rank, tenant="t" if rank == 1 else "x"))
        await told(queue)
    for name in ("high", "first", "second", "third", "fourth", "low"):
        holder.end(50, ran=True)
        await granted(places[name])
        assert [n for n, p in places.items() if p.phase is Phase.HELD] == [name]
        holder = places[name]


async def test_a_tenants_order_holds_within_one_turn(server: StoreServer, join: Join) -> None:
    queue = await join(server)
    queue.declare(pool(1))
    places = [queue.submit(ticket()) for _ in range(30)]
    for place in places:
        await granted(place)
        assert sum(p.phase is Phase.HELD for p in places) == 1
        place.end()


async def test_a_retry_goes_ahead_of_its_class_only(server: StoreServer, join: Join) -> None:
    queue = await join(server, max_queued=3)
    queue.declare(pool(1))
    holder, waiting, upper = (queue.submit(ticket(rank=r)) for r in (1, 1, 0))
    third = queue.submit(ticket())
    assert await refused(queue.submit(ticket())) is Reason.QUEUE_FULL
    again = queue.submit(ticket(retry=True))  # not subject to the bound: it was let in before
    for place in (holder, upper, again, waiting, third):
        await granted(place)
        place.end()


async def test_a_head_that_fits_nowhere_is_passed(server: StoreServer, join: Join) -> None:
    queue = await join(server)
    queue.declare(pool(1, 1))
    only_a, holder_b = queue.submit(ticket(backends=(0,))), queue.submit(ticket(backends=(1,)))
    stuck = [queue.submit(ticket(backends=(0,))) for _ in range(3)]
    behind = queue.submit(ticket())
    await granted(only_a)
    await granted(holder_b)
    holder_b.end()
    assert await granted(behind) == 1
    assert {p.phase for p in stuck} == {Phase.WAITING}


async def test_pools_do_not_share_limits(server: StoreServer, join: Join) -> None:
    queue = await join(server)
    for name in ("a:1", "a"):
        queue.declare(pool(1, name=name))
    a = [queue.submit(ticket(pool="a", tenant="1:t")) for _ in range(2)]
    b = [queue.submit(ticket(pool="a:1", tenant="t")) for _ in range(2)]
    assert [await granted(a[0]), await granted(b[0])] == [0, 0]
    a[0].end()
    await granted(a[1])
    assert b[1].phase is Phase.WAITING


async def test_refusals_are_of_the_closed_list(server: StoreServer, join: Join) -> None:
    queue = await join(server, max_queued=1)
    assert await refused(queue.submit(ticket(pool="unheard"))) is Reason.NO_BACKEND
    queue.declare(pool(1, 1, closed=(1,)))
    assert await refused(queue.submit(ticket(backends=(1,)))) is Reason.NO_BACKEND
    assert await refused(queue.submit(ticket(waits_ms=0))) is Reason.EXPIRED
    holder, waiting = queue.submit(ticket()), queue.submit(ticket(waits_ms=300))
    assert await refused(queue.submit(ticket())) is Reason.QUEUE_FULL
    await granted(holder)
    assert await refused(waiting) is Reason.EXPIRED
    assert await refused(queue.submit(ticket(prompt_tokens=-1))) is Reason.INTERNAL


async def test_what_waits_hears_that_the_last_backend_closed(server: StoreServer, join: Join) -> None:
    queue = await join(server)
    queue.declare(pool(1))
    holder, waiting = queue.submit(ticket()), queue.submit(ticket())
    await granted(holder)
    queue.declare(pool(1, closed=(0,)))
    assert await refused(waiting) is Reason.NO_BACKEND
    holder.end()
    queue.declare(pool(1))
    assert await granted(queue.submit(ticket())) == 0


async def test_a_declaration_moves_closes_and_drops_backends_by_name(server: StoreServer, join: Join) -> None:
    queue = await join(server)
    full = pool(1, 1, 1, 1, 1, 1)  # more than are read together with their pool
    queue.declare(full)
    held = [queue.submit(ticket(backends=(i,))) for i in range(6)]
    for place in held:
        await granted(place)
    waiting = queue.submit(ticket())
    queue.declare(PoolShare("m", (full.backends[5], full.backends[2])))
    held[0].end()  # its backend is not declared any more: no room comes of it
    await told(queue)
    assert waiting.phase is Phase.WAITING
    held[2].end()
    assert await granted(waiting) == 1
    for place in (*held, waiting):
        place.end()
    await until(lambda: server("HKEYS", "{signalbox}:o:m") and not queue.book.known)
    await told(queue)
    fields = {f.decode() for f in server("HKEYS", "{signalbox}:o:m")}
    assert fields == {"pool", "names", "sizes", "b3", "b6"}


async def test_end_from_any_phase_is_once_and_synchronous(server: StoreServer, join: Join) -> None:
    queue = await join(server)
    queue.declare(pool(1))
    await told(queue)  # a rejoin would tidy up
    unsent = queue.submit(ticket())
    unsent.end()
    holder, waiting, third = (queue.submit(ticket()) for _ in range(3))
    await granted(holder)
    waiting.end()
    waiting.end()
    for _ in range(3):
        holder.end()
    await granted(third)
    third.end()
    third.end()
    with pytest.raises(QueueRefusal):
        await third.granted()
    await told(queue)
    assert (queue.book.known, queue.session.rejoins) == (0, 0)
    assert server("HLEN", f"{{signalbox}}:p:{queue.session.name}:l") == 0


async def test_more_than_a_turn_holds_goes_on_at_once(server: StoreServer, join: Join) -> None:
    queue = await join(server)
    queue.declare(pool(200))
    await told(queue)
    first = queue.submit(ticket())
    await granted(first)
    first.first_token()  # lingers, and must not make the rest of a long batch linger with it
    linger = queue.turns._linger
    assert linger is not None
    linger.cancel()
    places = [queue.submit(ticket()) for _ in range(100)]
    await asyncio.wait_for(asyncio.gather(*(place.granted() for place in places)), 5)
    assert queue.turns.count <= 8


async def test_an_end_elsewhere_wakes_the_waiter(server: StoreServer, join: Join) -> None:
    queue = await join(server)
    queue.declare(pool(0))
    place = queue.submit(ticket())
    await told(queue)
    asyncio.get_running_loop().call_later(0.01, place.end)
    assert await refused(place) is Reason.CLIENT_GONE


async def test_a_cancel_in_the_tick_of_the_grant_gives_the_lease_back(server: StoreServer, join: Join) -> None:
    queue = await join(server)
    queue.declare(pool(1))

    async def ask() -> None:
        place = queue.submit(ticket())
        try:
            await place.granted()
        finally:
            place.end()

    deliver, places = queue.book._grant, []

    def grant_and_cancel(place: Place, backend: str, now_s: float, expected_s: float) -> None:
        deliver(place, backend, now_s, expected_s)
        places.append((place, place.phase))
        task.cancel()

    queue.book._grant = grant_and_cancel  # type: ignore[method-assign]
    task = asyncio.ensure_future(ask())
    with pytest.raises(asyncio.CancelledError):
        await task
    queue.book._grant = deliver  # type: ignore[method-assign]
    ((place, phase_then),) = places
    assert (phase_then, place.phase) == (Phase.HELD, Phase.ENDED)
    assert await granted(queue.submit(ticket())) == 0


async def test_two_thousand_random_cancels_leave_nothing(server: StoreServer, join: Join) -> None:
    queue, other = await join(server), await join(server)
    for q in (queue, other):
        q.declare(pool(5, 3))

    async def ask(i: int) -> None:
        place = (queue, other)[i % 2].submit(ticket(tenant=f"t{i % 7}", rank=i % 3))
        try:
            await place.granted()
            place.first_token()
            await asyncio.sleep(0)
        finally:
            place.end()

    tasks = [asyncio.ensure_future(ask(i)) for i in range(2000)]
    for i, task in enumerate(tasks):
        if i % 3 == 0:
            task.cancel()
        if i % 50 == 0:
            await asyncio.sleep(0.001)
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    for q in (queue, other):
        await until(lambda q=q: q.book.known == 0)
        await told(q)
    queue.submit(ticket()).end()
    await queue.aclose()
    assert await granted(other.submit(ticket())) == 0


async def test_the_last_to_leave_leaves_no_key(server: StoreServer, join: Join) -> None:
    one, two = await join(server), await join(server)
    for queue in (one, two):
        queue.declare(pool(1))
    await granted(one.submit(ticket()))
    two.submit(ticket())
    await told(two)
    await one.aclose()
    assert server("ZCARD", "{signalbox}:procs") == 1
    await two.aclose()
    assert server.keys() == []


async def test_the_status_line(server: StoreServer, join: Join) -> None:
    queue = await join(server)
    queue.declare(pool(1))
    await granted(queue.submit(ticket()))
    waiting = queue.submit(ticket())
    assert repr(queue).startswith(f"<Queue {server.url} up, turn ")
    assert repr(queue).endswith("1 waiting, 1 held>")
    assert repr(waiting) == "<Place 2 waiting>"
