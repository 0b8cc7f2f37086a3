"""When those who are refused for load are told to come again: one after the other, tenant by tenant, within 90 s."""

import pytest

from gateway.queue.place import Phase, Place
from gateway.queue.share import BackendShare, PoolShare
from policies.reasons import Reason
from tests.queue import ledgers
from tests.queue.conftest import ticket
from tests.queue.ledgers import check
from tests.queue.procs import KEYS, Clock, Process
from tests.support.store import StoreServer

Pair = tuple[Process, Process]
LATE = {"prompt_tokens": 100, "output_tokens": 50, "waits_ms": 5000}
COST_S = 0.2 / 0.1  # 100 tokens, and 50 at twice the price, of 1,000 a second; a tenth of the pool is theirs


@pytest.fixture
def busy(pair: Pair) -> Pair:
    """One runs, and 10 s of a better class's prompts wait; no safety."""
    for process in pair:
        process.declare(PoolShare("m", (BackendShare("a", 1, 1000, 0, 0, True, safety_milli=1000),)))
        process.settle()
    for tokens in (100, 10_000):
        pair[0].submit(ticket(rank=0, tenant="u", prompt_tokens=tokens, waits_ms=10**9))
        pair[0].settle()
    return pair


def told_s(process: Process, **changes: object) -> float:
    place: Place = process.submit(ticket(**{**LATE, **changes}))
    process.settle()
    assert place.phase is Phase.REFUSED
    assert place.refusal is not None
    assert place.refusal.reason is Reason.DEADLINE_UNREACHABLE
    return place.refusal.retry_after_s


def test_one_after_the_other_over_both_processes(busy: Pair, server: StoreServer) -> None:
    a, b = busy
    over_s = 0.1 + 10 + 0.1 - 5  # outstanding, ahead, own
    waits = [told_s(process) for process in (a, b, a, b)]
    assert waits == pytest.approx([over_s + i * COST_S for i in range(4)], abs=0.05)
    check(server)


def test_nobody_is_told_more_than_90_s(busy: Pair) -> None:
    a, _ = busy
    waits = [told_s(a) for _ in range(120)]
    assert max(waits) <= 90
    assert min(waits[45:]) >= 45
    assert len({round(wait) // 10 for wait in waits[45:]}) == 5  # spread over it


def test_time_that_passes_makes_room(busy: Pair, clock: Clock) -> None:
    a, _ = busy
    first, *_ = [told_s(a) for _ in range(5)]
    for _ in range(20):
        clock.advance(500)
        a.beat()
    assert told_s(a) == pytest.approx(first, abs=0.1)


def test_another_tenant_does_not_stand_behind_them(busy: Pair) -> None:
    a, _ = busy
    for _ in range(10):
        told_s(a)
    wait_s = told_s(a, tenant="other", prompt_tokens=4000)
    assert wait_s == pytest.approx(0.1 + 10 + 4 - 5, abs=0.05)


def test_one_of_many_tenants_is_not_kept_in_mind_for_longer(busy: Pair, server: StoreServer) -> None:
    a, _ = busy
    for i in range(50):
        a.submit(ticket(tenant=f"w{i}", waits_ms=10**9))
    a.settle()
    told_s(a, tenant="other", prompt_tokens=4000)
    back = ledgers.accounts(server, "m")[1, "other"][ledgers.A_BACK]
    assert back - int(server("HGET", KEYS.meta, "now")) == 180_000


def test_what_was_told_does_not_keep_an_account_for_ever(busy: Pair, clock: Clock, server: StoreServer) -> None:
    a, _ = busy
    told_s(a, tenant="other", prompt_tokens=4000)
    assert (1, "other") in ledgers.accounts(server, "m")
    for _ in range(300):
        clock.advance(500)
        a.beat()
    assert (1, "other") not in ledgers.accounts(server, "m")
