"""Directed cases of a turn: applied once whatever is lost, doubled, poisoned or late, on any clock."""

import pytest
import redis

from gateway.queue import wire
from gateway.queue.place import Phase
from gateway.queue.session import STRIKES, SchemaMismatch
from policies.reasons import Reason
from tests.queue.conftest import pool, ticket
from tests.queue.ledgers import check, tickets
from tests.queue.procs import KEYS, Clock, Process, call
from tests.support.store import StoreServer


def test_a_lost_reply_is_read_again(pair: tuple[Process, Process], server: StoreServer) -> None:
    a, _ = pair
    place = a.submit(ticket())
    a.turn(lost=3)
    assert place.phase is Phase.HELD
    place.end()
    a.turn(lost=1, doubled=True)
    assert check(server) == {}


def test_a_late_copy_of_an_old_turn_changes_nothing(pair: tuple[Process, Process], server: StoreServer) -> None:
    a, _ = pair
    a.submit(ticket())
    old = a.session.depart(0.0)
    a.turn()
    a.turn()
    before = server.keys(), check(server)
    assert wire.decode_reply(call(server, *old, b"0")).status is wire.Status.STALE
    assert (server.keys(), check(server)) == before


def test_a_poisoned_event_spoils_neither_its_turn_nor_the_retry(
    pair: tuple[Process, Process], server: StoreServer
) -> None:
    a, _ = pair
    good, bad, last = a.submit(ticket()), a.submit(ticket(output_tokens=-5)), a.submit(ticket())
    for nonsense in (99, [1, 2], "x", [wire.FINISH], [wire.POOL, "m", 1, [["a", 1]]], [wire.HELLO, 3]):
        a.book._pending.append((1000, nonsense))
    reply = a.turn(lost=1)
    errors = [outcome for outcome in reply.outcomes if outcome[1] == wire.ERROR]
    assert len(errors) == 7
    assert (good.phase, bad.phase, last.phase) == (Phase.HELD, Phase.REFUSED, Phase.WAITING)
    assert bad.refusal is not None
    assert bad.refusal.reason is Reason.INTERNAL
    check(server)
    assert a.beat().live == a.book.known == 2


def test_a_batch_that_is_too_long_or_no_batch_changes_nothing(
    pair: tuple[Process, Process], server: StoreServer
) -> None:
    a, _ = pair
    for batch in (wire.encode_batch([[wire.BEAT]] * 33), b"\xff\xff", wire.encode_batch(5)):
        with pytest.raises(redis.ResponseError):
            call(server, b"A.0", b"%d" % (a.session.number + 1), b"", batch, b"0")
    a.submit(ticket())
    assert a.turn().status is wire.Status.OK


def test_a_refusal_unread_in_the_mailbox_is_no_differing_count(pair: tuple[Process, Process], clock: Clock) -> None:
    a, b = pair
    a.submit(ticket())
    a.turn()
    late = b.submit(ticket(waits_ms=500))
    b.turn()
    clock.advance(600)
    next(iter(a.book.held.values())).end()
    a.turn()
    assert b.beat().live == 0
    b.mail()
    assert late.phase is Phase.REFUSED
    for _ in range(STRIKES):
        b.beat()
    assert b.session.rejoins == 0


def test_at_the_memory_limit_leases_still_end(own_server: StoreServer, clock: Clock) -> None:
    a = Process(own_server, "A", clock)
    a.declare(pool(1))
    first, second = a.submit(ticket()), a.submit(ticket())
    a.settle()
    own_server("CONFIG", "SET", "maxmemory", "1mb")
    with pytest.raises(redis.ResponseError, match="maxmemory"):
        own_server("SET", "x", "1")
    first.end()
    a.turn()
    assert second.phase is Phase.HELD
    second.end()
    a.turn()
    assert tickets(own_server) == {}


@pytest.mark.parametrize("jump_ms", [3_600_000, -3_600_000])
def test_an_hour_on_the_wall_clock_kills_nobody_and_expires_nothing(
    pair: tuple[Process, Process], server: StoreServer, clock: Clock, jump_ms: int
) -> None:
    a, b = pair
    held, waiting = a.submit(ticket()), b.submit(ticket(waits_ms=10_000))
    a.turn()
    before = b.turn().now_ms
    clock.wall_ms += jump_ms
    assert 0 <= b.beat().now_ms - before <= 2000
    clock.wall_ms += 100
    assert a.beat().status is wire.Status.OK
    held.end()
    a.turn()
    b.mail()
    assert waiting.phase is Phase.HELD


def test_a_grant_by_mail_before_the_reply_of_the_submit(pair: tuple[Process, Process]) -> None:
    a, b = pair
    first, second = a.submit(ticket()), b.submit(ticket())
    a.turn()
    raw = b.send()  # applied; the reply is on its way
    first.end()
    a.turn()
    b.mail()
    assert second.phase is Phase.HELD
    b.session.arrive(raw, 0.0)
    assert second.phase is Phase.HELD
    assert b.beat().live == b.book.known == 1


def test_mail_is_read_again_until_it_is_acknowledged(pair: tuple[Process, Process], server: StoreServer) -> None:
    a, b = pair
    for _ in range(5):
        first, second = a.submit(ticket()), b.submit(ticket())
        a.settle()
        b.turn()
        first.end()
        a.turn()
        b.mail()
        assert second.phase is Phase.HELD
        second.end()
        b.turn()
    assert server("XLEN", KEYS.mailbox("B.0")) == 1


def test_another_schema_stops_a_running_process(pair: tuple[Process, Process], server: StoreServer) -> None:
    server("HSET", KEYS.meta, "schema", 99)
    with pytest.raises(SchemaMismatch, match="schema 99"):
        pair[0].turn()


def test_a_deadline_that_passed_while_waiting_is_not_dispatched(
    pair: tuple[Process, Process], server: StoreServer, clock: Clock
) -> None:
    a, b = pair
    first = a.submit(ticket())
    a.turn()
    late, good = b.submit(ticket(waits_ms=1000)), b.submit(ticket(waits_ms=5000))
    b.turn()
    clock.advance(1001)
    first.end()
    a.turn()
    b.mail()
    assert (late.phase, good.phase) == (Phase.REFUSED, Phase.HELD)
    assert late.refusal is not None
    assert late.refusal.reason is Reason.EXPIRED
    check(server)


def test_a_grant_that_comes_too_late_by_the_owners_clock_is_given_back(
    pair: tuple[Process, Process], server: StoreServer, clock: Clock
) -> None:
    a, b = pair
    first, second = a.submit(ticket()), b.submit(ticket(waits_ms=1000))
    a.turn()
    b.turn()
    first.end()
    a.turn()
    clock.now_s += 1.5  # B's alone: it slept while the mail came
    b.mail()
    assert second.phase is Phase.REFUSED
    assert second.refusal is not None
    assert second.refusal.reason is Reason.EXPIRED
    b.turn()
    assert check(server) == {}


def test_what_a_turn_had_no_time_for_the_next_one_does(pair: tuple[Process, Process], server: StoreServer) -> None:
    """A turn looks at so many tickets only, whatever there is; then a bare turn of anybody goes on."""
    a, b = pair
    a.declare(pool(1))
    holder = a.submit(ticket())
    lost = [b.submit(ticket(waits_ms=100, prompt_tokens=1, tenant=f"t{i}")) for i in range(150)]
    waiting = b.submit(ticket(tenant="z"))
    for process in pair:
        process.settle()
    b.clock.advance(200)
    holder.end()
    replies = [a.turn()]
    while replies[-1].due_ms == 1:
        replies.append(a.turn())
    b.mail()
    assert len(replies) == 3
    assert {place.phase for place in lost} == {Phase.REFUSED}
    assert waiting.phase is Phase.HELD
    check(server)
