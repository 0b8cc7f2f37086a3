"""Quotas of tenants over all processes: never over, refunds and settlements, what a client is told."""

import random

import pytest

from gateway.queue.place import Phase, Place, Quota
from policies.quota import MINUTE_MS, TenantLimits
from policies.reasons import Reason
from tests.queue import ledgers
from tests.queue.conftest import pool, ticket
from tests.queue.ledgers import check
from tests.queue.procs import Clock, Process
from tests.support.store import StoreServer

Pair = tuple[Process, Process]


def limit(pair: Pair, name: str = "t", n: int = 100, **limits: int) -> Process:
    for process in pair:
        process.declare(pool(n))
        process.book.declare_tenant(name, TenantLimits(**limits))
        process.settle()
    return pair[0]


def one(process: Process, **changes: object) -> Place:
    place = process.submit(ticket(**changes))
    process.settle()
    return place


def told(place: Place) -> tuple[Reason, float]:
    assert place.refusal is not None
    return place.refusal.reason, place.refusal.retry_after_s


def test_requests_a_minute_over_two_processes(pair: Pair, server: StoreServer, clock: Clock) -> None:
    a = limit(pair, requests_per_min=3)
    places = [one(process) for process in (*pair, *pair)]
    assert [p.phase for p in places] == [Phase.HELD] * 3 + [Phase.REFUSED]
    reason, wait_s = told(places[3])
    assert reason is Reason.RATE_LIMITED
    assert 60 <= wait_s <= 65
    for _ in range(int(wait_s)):  # logical time follows by two seconds a turn at most
        clock.advance(1000)
        a.beat()
    assert one(a).phase is Phase.HELD
    check(server)


def test_a_window_that_was_not_looked_at_for_long_is_empty(pair: Pair, clock: Clock) -> None:
    a = limit(pair, requests_per_min=13)
    for _ in range(13):
        one(a).end(1, ran=True)
        for _ in range(5):
            clock.advance(1000)
            a.beat()
    for _ in range(80):
        clock.advance(1000)
        a.beat()
    place = one(a)
    assert place.quota is not None
    assert place.quota.requests_left == 12


def test_tokens_are_reserved_and_settled_to_the_truth(pair: Pair) -> None:
    a = limit(pair, tokens_per_min=400)
    first, second = one(a), one(a)
    assert told(one(a))[0] is Reason.RATE_LIMITED  # 150 and 150 are reserved
    first.end(0, ran=True)  # 100 were needed
    a.settle()
    assert one(a, prompt_tokens=50, output_tokens=50).phase is Phase.HELD
    second.end(150, ran=True)  # 250: a hundred more than reserved
    a.settle()
    assert told(one(a, prompt_tokens=1, output_tokens=0))[0] is Reason.RATE_LIMITED


def test_the_long_end_is_reserved(pair: Pair) -> None:
    a = limit(pair, tokens_per_min=400)
    first = one(a, output_high=200)
    assert first.quota is not None
    assert first.quota.tokens_left == 100  # 100 and 200, not 100 and 50
    assert told(one(a))[0] is Reason.RATE_LIMITED
    first.end(60, ran=True)
    a.settle()
    second = one(a)
    assert second.quota is not None
    assert second.quota.tokens_left == 400 - 160 - 150


@pytest.mark.parametrize("how", ["withdrawn", "not run", "expired", "full", "impossible"])
def test_what_never_ran_costs_nothing(pair: Pair, clock: Clock, how: str) -> None:
    a, b = pair
    limit(pair, n=1, requests_per_min=1, tokens_per_min=150)
    if how in ("withdrawn", "expired", "full"):
        one(b, tenant="other")
    if how == "impossible":
        place = one(a, prompt_tokens=140, output_tokens=1, waits_ms=1)
        assert told(place)[0] is Reason.DEADLINE_IMPOSSIBLE
    elif how == "full":
        a.book._max_queued = b.book._max_queued = 0
        limit(pair, n=1, requests_per_min=1, tokens_per_min=150)
        place = one(a)
        assert told(place)[0] is Reason.QUEUE_FULL
        a.book._max_queued = b.book._max_queued = 10
        limit(pair, n=1, requests_per_min=1, tokens_per_min=150)
    else:
        place = one(a, waits_ms=1000)
        assert place.phase is (Phase.HELD if how == "not run" else Phase.WAITING)
        if how == "expired":
            clock.advance(1100)
            a.book.expire(clock.now_s)
        else:
            place.end()
    a.settle()
    again = one(a)
    assert again.phase in (Phase.HELD, Phase.WAITING)
    assert told(one(a))[0] is Reason.RATE_LIMITED


def test_a_retry_is_not_held_against_the_quota_but_counts(pair: Pair) -> None:
    a = limit(pair, requests_per_min=1, tokens_per_min=150)
    first = one(a)
    first.end(0, ran=False)
    assert one(a, retry=True, billed=False).phase is Phase.HELD
    assert one(a, billed=False).phase is Phase.HELD
    assert told(one(a))[0] is Reason.RATE_LIMITED


def test_what_a_client_is_told(pair: Pair) -> None:
    a = limit(pair, requests_per_min=10, tokens_per_min=1000)
    place = one(a)
    assert place.quota is not None
    assert (place.quota.requests, place.quota.requests_left) == (10, 9)
    assert (place.quota.tokens, place.quota.tokens_left) == (1000, 850)
    assert 60 <= place.quota.tokens_reset_s <= 65
    assert place.quota.requests_reset_s == place.quota.tokens_reset_s
    refused = one(a, prompt_tokens=900)
    assert told(refused)[0] is Reason.RATE_LIMITED
    assert isinstance(refused.quota, Quota)
    assert refused.quota.requests_left == 9
    assert one(a, tenant="unlimited").quota is None


def test_a_granted_ticket_of_another_process_brings_the_quota_along(pair: Pair) -> None:
    a, b = pair
    limit(pair, n=1, requests_per_min=5)
    holder, waiting = one(a), one(b)
    holder.end(1, ran=True)
    a.settle()
    b.mail()
    assert waiting.phase is Phase.HELD
    assert waiting.quota is not None
    assert (waiting.quota.requests, waiting.quota.requests_left, waiting.quota.tokens) == (5, 3, 0)


def test_a_tenants_own_queue_is_bounded(pair: Pair, server: StoreServer) -> None:
    a, b = pair
    limit(pair, n=1, max_queued=2)
    one(a)
    waiting = [one(process) for process in pair]
    refused = one(b)
    assert told(refused)[0] is Reason.QUEUE_FULL
    assert told(refused)[1] >= 1
    assert one(b, tenant="other").phase is Phase.WAITING
    waiting[0].end()
    a.settle()
    assert one(b).phase is Phase.WAITING
    check(server)


def test_limits_change_while_they_are_in_use(pair: Pair, server: StoreServer) -> None:
    a = limit(pair, requests_per_min=1)
    one(a)
    assert told(one(a))[0] is Reason.RATE_LIMITED
    limit(pair, requests_per_min=3)
    assert [one(a).phase, one(a).phase, one(a).phase] == [Phase.HELD, Phase.HELD, Phase.REFUSED]
    limit(pair)
    assert one(a).phase is Phase.HELD
    check(server)


def test_leases_from_before_the_declaration_are_not_counted(pair: Pair, server: StoreServer) -> None:
    a, _ = pair
    a.declare(pool(10))
    early = one(a)
    limit(pair, n=10, tokens_in_flight=200)
    late = one(a)
    assert late.phase is Phase.HELD
    check(server)
    early.end(1, ran=True)
    late.end(1, ran=True)
    a.settle()
    check(server)
    assert ledgers.limits(server)["t"][4] == 0


def test_a_rejoin_neither_bills_again_nor_refunds(pair: Pair, server: StoreServer, clock: Clock) -> None:
    a, b = pair
    limit(pair, n=1, requests_per_min=3, tokens_per_min=10_000)
    held, waiting = one(a), one(a)
    a.session.rejoin("test")
    a.settle()
    for _ in range(20):
        clock.advance(100)
        for process in pair:
            process.beat()
            process.mail()
    assert (held.phase, waiting.phase) == (Phase.HELD, Phase.WAITING)
    assert sum(ledgers.limits(server)["t"][7]) == 2
    assert one(b).phase is Phase.WAITING
    assert told(one(b))[0] is Reason.RATE_LIMITED
    for place in (held, waiting):
        place.end(1, ran=True)
    a.settle()
    assert sum(ledgers.limits(server)["t"][7]) == 3
    check(server)


def test_never_over_with_many_clients_and_obeyed_waits_succeed(server: StoreServer, clock: Clock) -> None:
    """200 clients over three processes ask for 6,000 tokens a minute, and come back when they are told."""
    from tests.queue.procs import load

    load(server)
    processes = [Process(server, name, clock) for name in "ABC"]
    for process in processes:
        process.declare(pool(1000))
        process.book.declare_tenant("t", TenantLimits(tokens_per_min=6000))
        process.settle()
    chance = random.Random(1)
    due = [chance.randint(0, 3000) for _ in range(200)]  # when each client asks next
    waited = [False] * 200
    spent: list[tuple[int, int]] = []
    came_back = succeeded = 0
    for now_ms in range(0, 400_000, 250):
        clock.advance(250)
        asking = [i for i, at in enumerate(due) if at <= now_ms]
        places = {}
        for i in asking:
            asked = ticket(prompt_tokens=chance.randint(20, 100), output_tokens=50)
            places[i] = processes[i % 3].submit(asked)
        for process in processes:
            process.book.beat()
            process.settle()
        for i, place in places.items():
            came_back += waited[i]
            if place.phase is Phase.HELD:
                succeeded += waited[i]
                output = chance.randint(20, 50)
                spent.append((now_ms, place.ticket.prompt_tokens + output))
                place.end(output, ran=True)
                due[i], waited[i] = now_ms + chance.randint(60_000, 180_000), False
            else:
                reason, wait_s = told(place)
                assert reason is Reason.RATE_LIMITED
                due[i], waited[i] = now_ms + int(wait_s * 1000), True
        assert sum(tokens for at, tokens in spent if at > now_ms - MINUTE_MS) <= 6000
    minutes = 400_000 / MINUTE_MS
    assert sum(tokens for _, tokens in spent) > 0.85 * 6000 * minutes
    assert came_back > 100
    assert succeeded / came_back >= 0.9, (succeeded, came_back)
