"""Directed cases of death and return: who is reaped, who rejoins, and what is true afterwards.

Random walks miss the first of them: a failover that loses *another* process's turn.
"""

import pytest

from gateway.queue import wire
from gateway.queue.place import Phase
from gateway.queue.session import STRIKES
from tests.queue.conftest import pool, ticket
from tests.queue.ledgers import check, tickets
from tests.queue.procs import KEYS, Clock, Process, advance_until_reaped, load
from tests.support.store import StoreServer


def test_a_failover_that_loses_another_processs_turn(
    pair: tuple[Process, Process], server: StoreServer, clock: Clock
) -> None:
    """A's end granted B's ticket; the store then forgets that turn. Turn numbers alone would grant B twice."""
    a, b = pair
    first, second = a.submit(ticket()), b.submit(ticket())
    a.turn()
    b.turn()
    server("SAVE")
    first.end()
    a.turn()
    b.mail()
    assert second.phase is Phase.HELD
    server("DEBUG", "RELOAD", "NOSAVE")
    second.first_token()
    b.connect("two")
    b.settle()
    assert [t[0] for (p, _), t in check(server).items() if p == b.session.name] == [2]
    a.connect("two")
    for _ in range(30):
        clock.advance(100)
        for process in pair:
            process.turn()
            process.mail()
    assert [t[0] for t in check(server).values()] == [2]
    second.end()
    b.settle()
    assert check(server) == {}


def test_a_gap_leads_to_a_rejoin_with_everything_that_is_true(
    pair: tuple[Process, Process], server: StoreServer
) -> None:
    a, b = pair
    held, waiting = a.submit(ticket()), a.submit(ticket())
    a.turn()
    held.first_token()
    held.progress(77)
    a.session.number += 1  # the store has lost one turn of ours
    assert a.turn().status is wire.Status.GAP
    assert a.session.name == "A.1"
    a.settle()
    assert advance_until_reaped(server, b, "A.0") < 1000  # sooner than one that is silent
    (mine,) = [t for (p, _), t in check(server).items() if p == "A.1" and t[0] == 2]
    assert mine[12:14] == [0, 77]
    assert (held.phase, waiting.phase) == (Phase.HELD, Phase.WAITING)
    held.end()
    a.settle()
    assert waiting.phase is Phase.HELD


def test_a_sleeper_that_was_reaped_hears_it_and_keeps_its_streams(
    pair: tuple[Process, Process], server: StoreServer, clock: Clock
) -> None:
    a, b = pair
    streaming = a.submit(ticket())
    a.turn()
    mine = b.submit(ticket())
    b.turn()
    for _ in range(7):
        clock.advance(1000)
        b.beat()
        b.mail()
    assert mine.phase is Phase.HELD
    assert a.turn().status is wire.Status.UNKNOWN
    a.settle()
    assert streaming.phase is Phase.HELD
    assert len(check(server)) == 2  # above the limit, which binds grants and not leases that run already
    streaming.end()
    mine.end()
    a.settle()
    b.settle()
    assert check(server) == {}


@pytest.mark.parametrize("with_data", [True, False])
def test_a_restarted_store(own_server: StoreServer, clock: Clock, with_data: bool) -> None:
    a, b = Process(own_server, "A", clock), Process(own_server, "B", clock)
    for process in (a, b):
        process.declare(pool(2, 1))
        process.settle()
    places = [process.submit(ticket()) for process in (a, b) for _ in range(3)]
    a.settle()
    b.settle()
    a.mail()
    if with_data:
        own_server("SAVE")
    own_server.kill()
    own_server.start()
    for process in (a, b):
        process.connect("two")
        process.settle()
    for _ in range(40):
        clock.advance(100)
        for process in (a, b):
            process.beat()
            process.mail()
    found = check(own_server)
    assert len(found) == 6
    assert sum(t[0] == 2 for t in found.values()) == 3
    assert [p.phase for p in places].count(Phase.HELD) == 3
    for place in places:
        place.end()
    for process in (a, b):
        process.settle()
        process.book.bye()
        process.settle()
    assert own_server.keys() == []


def test_a_differing_count_leads_to_a_rejoin(pair: tuple[Process, Process], server: StoreServer) -> None:
    a, _ = pair
    held = a.submit(ticket())
    a.turn()
    server("DEL", KEYS.tickets("A.0"))
    for strike in range(STRIKES):
        assert a.session.name == "A.0", strike
        assert a.beat().live == 0
    assert a.session.name == "A.1"
    a.settle()
    assert a.beat().live == a.book.known == 1
    assert held.phase is Phase.HELD


def test_a_lease_granted_twice_leads_to_a_rejoin(pair: tuple[Process, Process], server: StoreServer) -> None:
    """As by a failover behind a proxy that hides the run id."""
    a, b = pair
    first, second = a.submit(ticket()), b.submit(ticket())
    a.turn()
    b.turn()
    server("SAVE")
    first.end()
    a.turn()
    b.mail()
    server("DEBUG", "RELOAD", "NOSAVE")
    b.turn()
    a.turn()
    a.settle()
    assert a.session.rejoins == 1  # a gap: its end was lost
    advance_until_reaped(server, a, "A.0")
    b.mail()
    b.settle()
    assert b.session.rejoins == 1
    b.settle()
    assert second.phase is Phase.HELD
    assert [t[0] for (p, _), t in check(server).items() if p == "B.1"] == [2]


def test_mail_for_a_former_name_is_void(pair: tuple[Process, Process]) -> None:
    a, b = pair
    first, second = a.submit(ticket()), b.submit(ticket())
    a.turn()
    b.turn()
    b.session.rejoin("test")
    b.session.mail("B.0", "5-0", wire.encode_batch([[second.number, wire.GRANT, "a", 0]]), 0.0)
    assert second.phase is Phase.WAITING
    assert b.session.cursor == ""
    b.settle()
    first.end()
    a.settle()
    b.mail()
    assert second.phase is Phase.HELD


def test_what_waited_keeps_its_place_over_a_rejoin_and_the_bound(server: StoreServer, clock: Clock) -> None:
    load(server)
    a, b = (Process(server, name, clock, max_queued=2) for name in "AB")
    for process in (a, b):
        process.declare(pool(1))
        process.settle()
    holder, early = b.submit(ticket()), a.submit(ticket())
    b.turn()
    a.turn()
    clock.advance(20)
    late = b.submit(ticket())
    b.turn()
    clock.advance(20)
    a.session.rejoin("test")
    a.settle()
    assert early.phase is Phase.WAITING  # though two wait, and its old self too
    advance_until_reaped(server, b, "A.0")
    holder.end()
    b.settle()
    a.mail()
    assert (early.phase, late.phase) == (Phase.HELD, Phase.WAITING)


def test_reaping_many_takes_small_pieces(own_server: StoreServer, clock: Clock) -> None:
    dead, alive = Process(own_server, "D", clock, max_queued=5000), Process(own_server, "A", clock)
    for process in (dead, alive):
        process.declare(pool(100))
        process.settle()
    for i in range(1000):
        dead.submit(ticket(tenant=f"t{i % 10}", rank=i % 3, waits_ms=90_000))
    dead.settle()
    mine = alive.submit(ticket(waits_ms=60_000))
    alive.turn()
    left = [1001]
    while left[-1] > 1:
        clock.advance(1000 if left[-1] == 1001 else 10)
        reply = alive.beat()
        left.append(len(check(own_server)) if left[-1] % 100 < 40 else len(tickets(own_server)))
        assert left[-2] - left[-1] <= 32 + 64  # a piece, and what the dispatch pass met of the dead
        if left[-1] < 1001:
            assert reply.due_ms > 0 or left[-1] == 1
    alive.mail()
    assert mine.phase is Phase.HELD
    advance_until_reaped(own_server, alive, "D.0")
    left_over = own_server.keys()
    assert not [key for key in left_over if ":D.0" in key]


def test_nobody_is_mailed_who_is_gone(pair: tuple[Process, Process], server: StoreServer) -> None:
    a, b = pair
    first, _ = a.submit(ticket()), b.submit(ticket())
    a.turn()
    b.turn()
    server("DEL", KEYS.process("B.0"))  # as reaping begins
    mine = a.submit(ticket())
    first.end()
    a.turn()
    assert mine.phase is Phase.HELD  # B's ticket was ahead
    assert not server("EXISTS", KEYS.mailbox("B.0"))
    check(server)


def test_a_process_that_leaves_without_ending_is_reaped(pair: tuple[Process, Process], server: StoreServer) -> None:
    a, b = pair
    a.submit(ticket())
    a.turn()
    a.book.leaving = True
    a.book._pending.append((wire.BYE, None))
    a.turn()
    assert advance_until_reaped(server, b, "A.0") < 1000
    assert check(server) == {}
