"""A request that comes again under its key keeps its first deadline, whichever process it comes to."""

from msgspec.structs import replace

from gateway.queue.place import Phase, Place
from policies.quota import TenantLimits
from policies.reasons import Reason
from policies.types import Ticket
from tests.queue.conftest import pool, ticket
from tests.queue.ledgers import check
from tests.queue.procs import KEYS, Clock, Process
from tests.support.store import StoreServer

Pair = tuple[Process, Process]
MOST, FORGET_MS = 4096, 60_000
"""As `lua/recall.lua` has them."""


def keyed(**changes: object) -> Ticket:
    return ticket(**{"identity": "key", "waits_ms": 5000, **changes})


def ask(process: Process, asked: Ticket) -> Place:
    place = process.submit(asked)
    process.settle()
    return place


def leave(process: Process, place: Place) -> None:
    place.end()
    process.settle()


def wait(clock: Clock, process: Process, ms: int) -> None:
    """Logical time follows by two seconds a turn at most."""
    for _ in range(ms // 500):
        clock.advance(500)
        process.beat()


def hold(pair: Pair) -> Place:
    """The only place, for good."""
    return ask(pair[0], ticket(tenant="other"))


def tried_and_left(pair: Pair, clock: Clock, asked: Ticket, after_ms: int = 3000) -> Place:
    """Waited with the first process for so long, and gone."""
    hold(pair)
    place = ask(pair[0], asked)
    assert place.phase is Phase.WAITING
    wait(clock, pair[0], after_ms)
    leave(pair[0], place)
    return place


def test_it_has_its_first_deadline_with_another_process(pair: Pair, server: StoreServer, clock: Clock) -> None:
    first = tried_and_left(pair, clock, keyed())
    again = ask(pair[1], keyed())
    assert again.phase is Phase.WAITING
    assert again.nearer_s == 3.0
    assert again.deadline_s == first.deadline_s
    wait(clock, pair[1], 2500)
    pair[1].book.expire(clock.now_s)
    assert again.refusal is not None
    assert again.refusal.reason in {Reason.EXPIRED, Reason.DEADLINE_UNREACHABLE}  # whoever looks first
    check(server)


def test_others_do_not_have_it(pair: Pair, clock: Clock) -> None:
    tried_and_left(pair, clock, keyed())
    for asked in (keyed(identity="else"), keyed(tenant="other"), keyed(identity="")):
        place = ask(pair[1], asked)
        assert (place.phase, place.nearer_s) == (Phase.WAITING, 0.0)


def test_one_that_is_too_late_is_refused_and_not_urgent(pair: Pair, clock: Clock) -> None:
    tried_and_left(pair, clock, keyed())
    wait(clock, pair[1], 3000)
    for retry in (False, True):
        late = ask(pair[1], keyed(retry=retry))
        assert late.refusal is not None
        assert late.refusal.reason is Reason.EXPIRED


def test_one_that_is_too_late_gets_no_free_place_either(pair: Pair, clock: Clock) -> None:
    holder = hold(pair)
    leave(pair[0], ask(pair[0], keyed()))
    leave(pair[0], holder)
    wait(clock, pair[1], 6000)
    late = ask(pair[1], keyed())
    assert late.refusal is not None
    assert late.refusal.reason is Reason.EXPIRED
    assert ask(pair[1], keyed(identity="new")).phase is Phase.HELD


def test_it_stands_where_its_first_deadline_puts_it(pair: Pair, clock: Clock) -> None:
    holder = hold(pair)
    place = ask(pair[0], keyed(key_ms=5000))
    wait(clock, pair[0], 3000)
    leave(pair[0], place)
    fresh = ask(pair[0], ticket(waits_ms=4000, key_ms=4000))
    again = ask(pair[1], keyed(key_ms=5000))
    leave(pair[0], holder)
    pair[1].settle()
    assert (fresh.phase, again.phase) == (Phase.WAITING, Phase.HELD)


def test_the_total_comes_nearer_with_it(pair: Pair, server: StoreServer, clock: Clock) -> None:
    tried_and_left(pair, clock, keyed(total_ms=9000))
    ask(pair[1], keyed(total_ms=9000))
    (record,) = [t for t in check(server).values() if t[1] == "t"]
    assert record[10] - record[7] == 4000


def test_no_time_counts_and_a_quota_does_not(pair: Pair, clock: Clock) -> None:
    pair[0].book.declare_tenant("poor", TenantLimits(requests_per_min=1))
    hold(pair)
    leave(pair[0], ask(pair[0], keyed(tenant="poor", identity="one")))
    refused = ask(pair[0], keyed(tenant="t", prompt_tokens=300_000))
    poor = ask(pair[0], replace(keyed(), tenant="poor", identity="two")), ask(pair[0], keyed(tenant="poor"))
    assert refused.refusal is not None
    assert refused.refusal.reason is Reason.DEADLINE_IMPOSSIBLE
    assert [one.refusal and one.refusal.reason for one in poor] == [None, Reason.RATE_LIMITED]
    wait(clock, pair[0], 1000)
    assert ask(pair[0], keyed()).nearer_s == 0.0
    assert ask(pair[0], keyed(tenant="poor")).nearer_s == 0.0


def test_one_that_could_not_be_on_time_keeps_its_deadline(pair: Pair, clock: Clock) -> None:
    hold(pair)
    for n in range(5):
        ask(pair[0], ticket(waits_ms=60_000, prompt_tokens=40_000, tenant=f"big{n}"))
    refused = ask(pair[0], keyed(prompt_tokens=20_000, waits_ms=2000))
    assert refused.refusal is not None
    assert refused.refusal.reason is Reason.DEADLINE_UNREACHABLE
    wait(clock, pair[0], 1000)
    assert ask(pair[1], keyed(prompt_tokens=20_000, waits_ms=2000)).nearer_s == 1.0


def test_an_answer_in_full_ends_it_and_half_of_one_does_not(pair: Pair, server: StoreServer, clock: Clock) -> None:
    half, full = ask(pair[0], keyed(identity="half")), None
    assert half.phase is Phase.HELD
    half.end(5, ran=True)
    pair[0].settle()
    full = ask(pair[0], keyed(identity="full"))
    full.end(5, ran=True, answered=True)
    pair[0].settle()
    assert server("ZRANGE", KEYS.recalled("t"), 0, -1) == [b"half"]


def test_it_is_forgotten_a_minute_after_its_deadline(pair: Pair, server: StoreServer, clock: Clock) -> None:
    tried_and_left(pair, clock, keyed(), 0)
    key = KEYS.recalled("t")
    assert 0 < server("PTTL", key) <= 5000 + FORGET_MS
    wait(clock, pair[0], FORGET_MS + 5500)
    again = ask(pair[1], keyed())
    assert (again.phase, again.nearer_s) == (Phase.WAITING, 0.0)
    leave(pair[1], ask(pair[1], keyed(identity="else")))
    assert {name for name in server("ZRANGE", key, 0, -1)} == {b"key", b"else"}


def test_of_a_tenants_only_so_many_are_kept(pair: Pair, server: StoreServer) -> None:
    ask(pair[0], keyed(waits_ms=9000))
    key = KEYS.recalled("t")
    soon = float(server("ZSCORE", key, "key"))
    server("ZADD", key, *(part for n in range(MOST - 1) for part in (soon + n - 1000, f"other{n}")))
    ask(pair[0], keyed(identity="one more", waits_ms=9000))
    assert server("ZCARD", key) == MOST
    assert server("ZSCORE", key, "other0") is None
    assert server("ZSCORE", key, "key") is not None


def test_it_is_known_again_after_a_loss(pair: Pair, server: StoreServer, clock: Clock) -> None:
    tried_and_left(pair, clock, keyed(total_ms=9000))
    again = ask(pair[1], keyed(total_ms=9000))
    pair[1].connect("two")
    pair[1].settle()
    assert again.phase is Phase.WAITING
    (record,) = [t for (name, _), t in check(server).items() if name == pair[1].session.name]
    assert (record[10] - record[7], again.nearer_s) == (4000, 3.0)


def test_a_pool_of_no_backend_keeps_nothing(pair: Pair, server: StoreServer) -> None:
    pair[0].declare(pool(1, closed=(0,)))
    refused = ask(pair[0], keyed())
    assert refused.refusal is not None
    assert refused.refusal.reason is Reason.NO_BACKEND
    assert server("EXISTS", KEYS.recalled("t")) == 0
