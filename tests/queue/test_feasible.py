"""Feasibility: what is let in, what is refused early and with which word, and what an engine is given at a time."""

import pytest

from gateway.queue.place import Phase, Place
from gateway.queue.share import BackendShare, PoolShare
from policies.reasons import Reason
from tests.queue.conftest import ticket
from tests.queue.ledgers import check
from tests.queue.procs import Clock, Process
from tests.support.store import StoreServer

Pair = tuple[Process, Process]
WAITING, HELD, REFUSED = Phase.WAITING, Phase.HELD, Phase.REFUSED


def share(name: str = "a", limit: int = 50, chunk: int = 0, kv: int = 0, **step: int) -> BackendShare:
    """1,000 prompt tokens a second unless the step says more; no safety, so that numbers can be told by heart."""
    return BackendShare(name, limit, 1000, kv, chunk, True, safety_milli=1000, **step)


def declare(pair: Pair, *shares: BackendShare) -> Process:
    for process in pair:
        process.declare(PoolShare("m", shares))
        process.settle()
    return pair[0]


def asked(process: Process, n: int = 1, **changes: object) -> list[Place]:
    places = [process.submit(ticket(**{"waits_ms": 10**9, **changes})) for _ in range(n)]
    process.settle()
    return places


def reason(place: Place) -> Reason:
    assert place.refusal is not None
    return place.refusal.reason


def retry_s(place: Place) -> float:
    assert place.refusal is not None
    return place.refusal.retry_after_s


def phases(places: list[Place]) -> str:
    return "".join(p.phase.name[0] for p in places)


# the window on outstanding prompts


def test_two_chunks_may_be_outstanding(pair: Pair, server: StoreServer) -> None:
    a = declare(pair, share(chunk=100))
    places = asked(a, 3, prompt_tokens=100)
    assert phases(places) == "HHW"
    places[0].first_token()
    a.settle()
    assert phases(places) == "HHH"
    check(server)


def test_a_prompt_longer_than_the_window_goes_when_nothing_is_outstanding(pair: Pair) -> None:
    a = declare(pair, share(chunk=100))
    (first,), (long,) = asked(a, prompt_tokens=10), asked(a, prompt_tokens=500)
    assert long.phase is WAITING
    first.first_token()
    a.settle()
    assert long.phase is HELD


def test_cached_tokens_are_no_work(pair: Pair) -> None:
    a = declare(pair, share(chunk=100))
    assert phases(asked(a, 5, prompt_tokens=1000, uncached_tokens=40)) == "HHHHH"


# KV


def test_the_expected_peak_is_a_sum_of_means_and_variances(pair: Pair, server: StoreServer) -> None:
    """950 may be planned: three of 200 with deviation 50 need 600 + 2 · 87, four 800 + 2 · 100."""
    a = declare(pair, share(kv=1000))
    places = asked(a, 4, prompt_tokens=100, output_tokens=100, output_variance=2500)
    assert phases(places) == "HHHW"
    places[0].progress(150, 0)
    a.settle()
    assert phases(places) == "HHHH"
    check(server)


def test_what_is_too_large_for_the_plan_goes_alone(pair: Pair) -> None:
    a = declare(pair, share(kv=1000))
    (small,), (large,) = asked(a), asked(a, prompt_tokens=2000)
    assert large.phase is WAITING
    small.end(1, ran=True)
    a.settle()
    assert large.phase is HELD


# pace


def paced() -> BackendShare:
    """10 ms a step, and 1 ms for each that decodes."""
    return share(step_us=10_000, running_us=1000)


def test_one_more_must_keep_the_tightest_pace(pair: Pair, server: StoreServer) -> None:
    """Within 0.95 of 15 ms: four."""
    a = declare(pair, paced())
    places = asked(a, 5, tpot_ms=15)
    (other,) = asked(a)
    assert phases([*places, other]) == "HHHHWW"
    for place in places[:4]:
        place.end(1, ran=True)
    a.settle()
    assert phases([*places[4:], other]) == "HH"
    check(server)


def test_a_pace_that_no_idle_backend_has_is_impossible(pair: Pair) -> None:
    a = declare(pair, paced())
    (place,) = asked(a, tpot_ms=10)
    assert (reason(place), retry_s(place)) == (Reason.DEADLINE_IMPOSSIBLE, 0)


# the last token


def test_a_total_deadline_with_the_high_estimate(pair: Pair) -> None:
    """11 ms a token when alone: 100 tokens take 1.1 s after a step of 10 ms, whatever the expected 50 would."""
    a = declare(pair, paced())
    (place,) = asked(a, total_ms=1000, output_tokens=50, output_high=100)
    assert reason(place) is Reason.DEADLINE_IMPOSSIBLE
    (place,) = asked(a, total_ms=1200, output_tokens=50, output_high=100)
    assert place.phase is HELD


def test_a_total_deadline_that_the_load_does_not_allow(pair: Pair) -> None:
    a = declare(pair, paced())
    asked(a, 20)
    (place,) = asked(a, total_ms=1200, output_tokens=50, output_high=100)
    assert reason(place) is Reason.DEADLINE_UNREACHABLE
    assert retry_s(place) > 0


# the first token


def test_an_idle_backend_is_what_impossible_means(pair: Pair) -> None:
    a = declare(pair, share())
    (place,) = asked(a, prompt_tokens=2000, waits_ms=1900)
    assert (reason(place), retry_s(place)) == (Reason.DEADLINE_IMPOSSIBLE, 0)
    (place,) = asked(a, prompt_tokens=2000, waits_ms=2100)
    assert place.phase is HELD


def test_what_is_ahead_is_what_unreachable_means(pair: Pair, clock: Clock) -> None:
    a = declare(pair, share(limit=1))
    holder, *_ = (asked(a, prompt_tokens=1000)[0] for _ in range(3))
    (place,) = asked(a, prompt_tokens=1000, waits_ms=3500)
    assert reason(place) is Reason.DEADLINE_UNREACHABLE
    assert retry_s(place) == pytest.approx(0.5, abs=0.01)  # 4 s of prompts, 3.5 to go
    holder.first_token()
    holder.end(1, ran=True)
    a.settle()
    clock.advance(500)
    (place,) = asked(a, prompt_tokens=1000, waits_ms=3500)
    assert place.phase is WAITING


def test_safety_counts(pair: Pair) -> None:
    a = declare(pair, BackendShare("a", 1, 1000, 0, 0, safety_milli=2000))
    (place,) = asked(a, prompt_tokens=1000, waits_ms=1900)
    assert reason(place) is Reason.DEADLINE_IMPOSSIBLE


def test_a_head_that_became_too_late_is_refused_at_once(pair: Pair, clock: Clock) -> None:
    a = declare(pair, share(limit=1))
    (holder,), (late,), (behind,) = asked(a), asked(a, prompt_tokens=1000, waits_ms=2000), asked(a)
    clock.advance(1500)
    holder.end(1, ran=True)
    a.settle()
    assert late.refusal is not None
    assert reason(late) is Reason.DEADLINE_UNREACHABLE
    assert behind.phase is HELD


def test_a_flood_of_another_tenant_counts_only_with_its_share(pair: Pair) -> None:
    a = declare(pair, share(limit=1))
    asked(a)
    asked(a, 30, tenant="flood", prompt_tokens=10_000)
    (mine,) = asked(a, tenant="light", prompt_tokens=200, waits_ms=1000)
    (theirs,) = asked(a, tenant="flood", prompt_tokens=200, waits_ms=1000)
    assert mine.phase is WAITING  # 100 outstanding, 200 of its own, 200 of the flood's
    assert reason(theirs) is Reason.DEADLINE_UNREACHABLE


def test_shares_ahead_go_by_weight(pair: Pair) -> None:
    a = declare(pair, share(limit=1))
    asked(a)
    asked(a, 10, tenant="heavy", prompt_tokens=1000, prefill_price=1)
    (light,) = asked(a, tenant="light", prompt_tokens=200, prefill_price=4, waits_ms=1000)
    assert reason(light) is Reason.DEADLINE_UNREACHABLE  # four times its own 200 go first
    (light,) = asked(a, tenant="light", prompt_tokens=200, prefill_price=4, waits_ms=1300)
    assert light.phase is WAITING


def test_upper_classes_count_whole(pair: Pair) -> None:
    a = declare(pair, share(limit=1))
    asked(a)
    asked(a, 3, tenant="u", rank=0, prompt_tokens=1000)
    (place,) = asked(a, rank=1, waits_ms=3000)
    assert reason(place) is Reason.DEADLINE_UNREACHABLE
    (place,) = asked(a, rank=0, tenant="v", waits_ms=3000)
    assert place.phase is WAITING


# places


def test_with_long_outputs_it_is_places_that_are_waited_for(pair: Pair) -> None:
    """Two may run, each 1,000 tokens of 10 ms: a place comes free every 5 s, though prompts take no time at all."""
    a = declare(pair, share(limit=2, step_us=10_000))
    asked(a, 2, output_tokens=1000)
    (soon,) = asked(a, output_tokens=1000, waits_ms=4000)
    assert reason(soon) is Reason.DEADLINE_UNREACHABLE
    assert retry_s(soon) == pytest.approx(1.0, abs=0.1)
    (later,) = asked(a, output_tokens=1000, waits_ms=6000)
    assert later.phase is WAITING
    (more,) = asked(a, output_tokens=1000, waits_ms=6000)
    assert reason(more) is Reason.DEADLINE_UNREACHABLE


def test_memory_may_be_what_limits_the_places(pair: Pair) -> None:
    a = declare(pair, share(limit=50, kv=2000, step_us=10_000))
    asked(a, 2, output_tokens=800)
    (soon,) = asked(a, output_tokens=800, waits_ms=3000)
    assert reason(soon) is Reason.DEADLINE_UNREACHABLE


# who goes


def test_the_largest_goes_rather_than_the_newcomer(pair: Pair, server: StoreServer) -> None:
    a, b = pair
    declare(pair, share(limit=1))
    asked(a)
    small = asked(a, 2, prompt_tokens=200, waits_ms=10_000, key_ms=0)
    (large,) = asked(b, prompt_tokens=5000, waits_ms=10_000, key_ms=0)
    (new,) = asked(a, prompt_tokens=100, waits_ms=1000, key_ms=500)
    b.mail()
    assert reason(large) is Reason.DEADLINE_UNREACHABLE
    assert phases([*small, new]) == "WWW"
    check(server)


def test_a_newcomer_that_is_the_largest_goes_itself(pair: Pair) -> None:
    a = declare(pair, share(limit=1))
    asked(a)
    small = asked(a, 5, prompt_tokens=200, key_ms=0)
    (new,) = asked(a, prompt_tokens=300, waits_ms=1200, key_ms=500)
    assert reason(new) is Reason.DEADLINE_UNREACHABLE
    assert phases(small) == "WWWWW"


def test_long_prompts_are_not_always_the_ones_that_go(pair: Pair) -> None:
    a = declare(pair, share(limit=1))
    asked(a)
    gone = []
    for _ in range(100):
        (large,) = asked(a, prompt_tokens=900, waits_ms=10_000, key_ms=0)
        (new,) = asked(a, prompt_tokens=100, waits_ms=1000, key_ms=500)
        gone.append(large.phase is REFUSED)
        assert large.phase is REFUSED or new.phase is REFUSED
        large.end()
        new.end()
        a.settle()
    assert 0.4 < sum(gone) / len(gone) < 0.8
    assert gone[0]


# passing


def test_a_head_is_passed_a_few_times_and_then_served(pair: Pair, server: StoreServer) -> None:
    """A large one needs nearly all of the KV cache; small ones keep coming."""
    a = declare(pair, share(kv=1000))
    running = asked(a, 3, tenant="s", prompt_tokens=100, output_tokens=50)
    (large,) = asked(a, tenant="l", prompt_tokens=800, output_tokens=50)
    waiting = asked(a, 30, tenant="s", prompt_tokens=100, output_tokens=50)
    passed = sum(p.phase is HELD for p in waiting)
    while large.phase is WAITING:
        running.pop(0).end(1, ran=True)
        a.settle()
        fresh = [p for p in waiting if p.phase is HELD and p not in running]
        running += fresh
        passed += len(fresh)
        assert passed < 20
    assert 8 <= passed <= 16
    check(server)


def test_what_is_kept_for_a_head_is_only_what_it_could_use(pair: Pair) -> None:
    a = declare(pair, share("a", limit=1), share("b", limit=1))
    (on_a,), (on_b,) = asked(a, backends=(0,)), asked(a, backends=(1,))
    (narrow,) = asked(a, backends=(0,))
    others = asked(a, 12, backends=(1,))
    for place in [on_b, *others[:-1]]:
        place.end(1, ran=True)
        a.settle()
    assert others[-1].phase is HELD
    assert narrow.phase is WAITING
    on_a.end(1, ran=True)
    a.settle()
    assert narrow.phase is HELD


# placement


def test_the_most_loaded_backend_that_fits(pair: Pair) -> None:
    a = declare(pair, *(share(name, limit=2) for name in "abc"))
    (first,) = asked(a, backends=(1,))
    places = asked(a, 4)
    assert [p.backend for p in (first, *places)] == ["b", "b", "a", "a", "c"]


def test_of_two_backends_that_with_the_earlier_first_token(pair: Pair) -> None:
    a = declare(pair, share("a"), share("b"))
    places = [asked(a, prompt_tokens=tokens)[0] for tokens in (500, 100, 100, 100, 100, 100, 100)]
    assert [p.backend for p in places] == ["a", "b", "b", "b", "b", "b", "a"]


def test_candidates_in_their_order_when_they_fit(pair: Pair) -> None:
    a = declare(pair, *(share(name, limit=9, chunk=100) for name in "abc"))
    places = [asked(a, prompt_tokens=150, backends=(2, 0, 1))[0] for _ in range(4)]
    assert [p.backend for p in places] == ["c", "a", "b", ""]


@pytest.mark.parametrize("n", [5, 50])
def test_work_finds_the_one_idle_backend_among_many(pair: Pair, n: int, server: StoreServer) -> None:
    a = declare(pair, *(share(f"b{i}", limit=4, kv=1000) for i in range(n)))
    for i in range(n - 1):
        asked(a, backends=(i,), prompt_tokens=600, output_tokens=200)
    (place,) = asked(a, prompt_tokens=600, output_tokens=200)
    assert place.backend == f"b{n - 1}"
    check(server)


# what has waited


def test_a_newcomer_does_not_put_off_what_has_been_let_in(pair: Pair) -> None:
    a = declare(pair, share(limit=1))
    asked(a)
    (early,) = asked(a, prompt_tokens=500, waits_ms=1000, key_ms=1000)
    (new,) = asked(a, prompt_tokens=500, waits_ms=1100, key_ms=500)
    assert (early.phase, reason(new)) == (WAITING, Reason.DEADLINE_UNREACHABLE)
    (small,) = asked(a, prompt_tokens=300, waits_ms=700, key_ms=500)
    assert (early.phase, small.phase) == (WAITING, WAITING)


def test_one_that_has_waited_for_long_does_not_go_for_a_newcomer(pair: Pair, clock: Clock) -> None:
    a = declare(pair, share(limit=1))
    asked(a)
    (large,) = asked(a, prompt_tokens=5000, waits_ms=10_000, key_ms=0)
    clock.advance(1500)
    (new,) = asked(a, prompt_tokens=100, waits_ms=1000, key_ms=500)
    assert (large.phase, reason(new)) == (WAITING, Reason.DEADLINE_UNREACHABLE)


def test_who_will_be_late_hears_it_before_its_turn(pair: Pair, clock: Clock) -> None:
    """The backend turns out to be slower than it was when the ticket came."""
    a = declare(pair, share(limit=1))
    asked(a)
    asked(a, prompt_tokens=1000)
    (place,) = asked(a, prompt_tokens=100, waits_ms=2000)
    assert place.phase is WAITING
    a.declare(PoolShare("m", (BackendShare("a", 1, 500, 0, 0, safety_milli=1000),)))
    clock.advance(150)
    a.settle()
    assert reason(place) is Reason.DEADLINE_UNREACHABLE


def test_a_grant_says_when_the_first_token_should_be_there(pair: Pair) -> None:
    rated = declare(pair, BackendShare("a", 2, 1000, 0, 0, safety_milli=3000))
    first, second = asked(rated, prompt_tokens=500)[0], asked(rated, prompt_tokens=100)[0]
    assert [first.expected_s, second.expected_s] == [0.5, 0.6]  # the prompt before it counts, the safety does not
    timed = declare(pair, share(step_us=10_000, prefill_ns=100_000))
    assert asked(timed, prompt_tokens=400)[0].expected_s == pytest.approx(0.01 + 0.1, abs=0.05)
