"""The last defences: a class whose requests wait for too long sheds part of what comes, whatever was predicted."""

import msgspec
import pytest

from gateway.queue import scripts
from gateway.queue.place import Phase, Place
from policies.reasons import Reason
from policies.types import ServiceClass
from tests.queue import ledgers
from tests.queue.conftest import ticket
from tests.queue.ledgers import check
from tests.queue.procs import KEYS, Clock, Process
from tests.support.store import StoreServer

Pair = tuple[Process, Process]
TARGET = 2000  # ms: judged every second, late while shedding after 1 s
LEFT, LEVEL = 1, 3  # of what a class's waits were
RAISED = 262  # 0.3 of the seven of eight that are late in `overload`


def submit(process: Process, n: int = 1, **changes: object) -> list[Place]:
    """Tickets that wait for long and may, but for their target."""
    places = [process.submit(ticket(**{"waits_ms": 10**7, "target_ms": TARGET, **changes})) for _ in range(n)]
    process.settle()
    return places


def serve(process: Process, n: int = 1) -> None:
    """End one lease after the other, if there is one."""
    for _ in range(n):
        for place in [*process.book.held.values()][:1]:
            place.end(50, ran=True)
            process.settle()


def wait(process: Process, clock: Clock, ms: int) -> None:
    """Logical time gains two seconds a turn at most."""
    for step in [500] * (ms // 500) + [ms % 500]:
        clock.advance(step)
        process.beat()


def overload(process: Process, clock: Clock, **changes: object) -> None:
    """One starts at once, eight too late: with the last of them the class is judged. That one has the backend."""
    places = submit(process, 9, **changes)
    wait(process, clock, TARGET + 500)
    for place in places[:-1]:
        place.end(50, ran=True)
        process.settle()
    assert places[-1].phase is Phase.HELD


def level(process: Process, rank: int = 1) -> int:
    process.beat()
    return process.book.levels["m"][rank]


def reason(place: Place) -> Reason:
    assert place.refusal is not None
    return place.refusal.reason


def refused(places: list[Place]) -> int:
    return sum(p.phase is Phase.REFUSED for p in places)


def test_late_ones_raise_a_level_that_all_processes_hear(pair: Pair, clock: Clock, server: StoreServer) -> None:
    a, b = pair
    assert level(a) == 0
    overload(a, clock)
    assert level(b) == level(a) == RAISED
    pack = msgspec.msgpack.encode
    seen = msgspec.msgpack.decode(server("EVAL", scripts.look(), 1, KEYS.prefix, pack([0, 1, 2]), pack(["m"])))
    assert [line[-1] for line in seen[1][0][1]] == [0, RAISED, RAISED]
    check(server)


def test_a_part_of_what_would_wait_is_refused(pair: Pair, clock: Clock, server: StoreServer) -> None:
    a, b = pair
    overload(a, clock)
    places = submit(b, 20)
    assert refused(places) == 20 * RAISED // 1000
    gone = next(p for p in places if p.phase is Phase.REFUSED)
    assert reason(gone) is Reason.OVERLOADED
    assert gone.refusal is not None
    assert 1 <= gone.refusal.retry_after_s <= 60
    check(server)


def test_what_can_start_at_once_is_not_shed(pair: Pair, clock: Clock) -> None:
    a, _ = pair
    overload(a, clock)
    for _ in range(7):
        serve(a)
        (place,) = submit(a)
        assert place.phase is Phase.HELD
    assert level(a) == RAISED


def test_waiting_is_bounded_while_a_class_sheds(pair: Pair, clock: Clock, server: StoreServer) -> None:
    """Half the target, and a look every 100 ms; without a free backend, too."""
    a, _ = pair
    overload(a, clock)
    fresh = [p for p in submit(a, 10) if p.phase is Phase.WAITING]
    wait(a, clock, 900)
    assert refused(fresh) == 0
    wait(a, clock, 201)
    assert refused(fresh) == len(fresh)
    assert {reason(p) for p in fresh} == {Reason.OVERLOADED}
    check(server)


def test_a_level_falls_when_nobody_is_late_any_more(pair: Pair, clock: Clock) -> None:
    a, _ = pair
    overload(a, clock)
    seen = [level(a)]
    for _ in range(6):
        for _ in range(9):
            serve(a)
            submit(a)
        clock.advance(1000)
        seen.append(level(a))
    assert seen[1] > seen[0] == RAISED  # one of ten was late: more than one in twenty
    assert seen[2:] == [int(0.8 * before - 1) for before in seen[1:-1]]


def test_a_level_falls_with_time_alone(pair: Pair, clock: Clock) -> None:
    a, _ = pair
    overload(a, clock)
    wait(a, clock, 30_000)
    assert level(a) < 0.2 * RAISED


def test_who_is_served_in_time_never_sheds(pair: Pair, clock: Clock, server: StoreServer) -> None:
    a, _ = pair
    places = submit(a, 12)
    for _ in range(60):
        clock.advance(150)
        serve(a)
        places += submit(a)
    assert refused(places) == 0
    assert ledgers.classes(server, "m")[1][5][LEVEL] == 0


def test_two_late_ones_of_eight_are_no_overload(pair: Pair, clock: Clock, server: StoreServer) -> None:
    a, _ = pair
    submit(a, 3)
    wait(a, clock, TARGET + 500)
    serve(a, 2)
    for _ in range(6):
        serve(a)
        submit(a)
    assert ledgers.classes(server, "m")[1][5][LEFT] == 1, "it was not judged"
    assert level(a) == 0


def test_a_lower_class_is_shed_with_a_better_one_and_not_the_other_way(pair: Pair, clock: Clock) -> None:
    a, _ = pair
    overload(a, clock, rank=1)
    assert [level(a, rank) > 0 for rank in range(4)] == [False, True, True, True]
    assert refused(submit(a, 10, rank=2, tenant="low")) == 2
    assert refused(submit(a, 10, rank=0, tenant="high")) == 0


def test_a_tenant_with_less_than_its_part_is_not_shed(pair: Pair, clock: Clock) -> None:
    a, b = pair
    overload(a, clock)
    flood = submit(a, 30, target_ms=0)
    assert refused(flood) == 0
    assert refused(submit(b, 5, tenant="light")) == 0
    assert refused(submit(a, 10)) == 2


def test_no_target_no_shedding(pair: Pair, clock: Clock) -> None:
    a, _ = pair
    overload(a, clock)
    assert refused(submit(a, 10, target_ms=0)) == 0


def test_who_has_no_target_is_not_late(pair: Pair, clock: Clock, server: StoreServer) -> None:
    a, _ = pair
    overload(a, clock, target_ms=0)
    assert ledgers.classes(server, "m")[1][5][LEFT : LEVEL + 1] == [0, 0, 0]


def test_what_had_a_lease_or_a_place_before_is_not_shed(pair: Pair, clock: Clock) -> None:
    a, _ = pair
    overload(a, clock)
    assert refused(submit(a, 10, retry=True, billed=False)) == 0
    mine = submit(a, 10)
    waiting = 10 - refused(mine)
    a.session.rejoin("test")
    a.settle()
    assert refused(mine) == 10 - waiting


def test_those_who_run_out_of_time_count_as_late(pair: Pair, clock: Clock) -> None:
    """Nothing is dispatched at all: the engine hangs, and owners take their tickets back."""
    a, _ = pair
    places = submit(a, 13, waits_ms=TARGET + 100)
    for _ in range(3):
        clock.advance(1000)
        a.book.expire(clock.now_s)
        a.settle()
    assert {reason(p) for p in places[1:]} == {Reason.EXPIRED}
    assert level(a) > 0


def test_a_class_says_how_long_is_too_long() -> None:
    assert ServiceClass(name="c", rank=0).target_ms(5000) == 4750
    assert ServiceClass(name="c", rank=0, shed_after=0.5).target_ms(5000) == 2500
    assert ServiceClass(name="c", rank=0, shed_after=0.0).target_ms(5000) == 0
    assert ServiceClass(name="c", rank=0).target_ms(10**9) == 0


@pytest.mark.parametrize("late_ms", [TARGET - 200, TARGET + 200])
def test_it_is_the_target_that_decides(pair: Pair, clock: Clock, late_ms: int) -> None:
    a, _ = pair
    submit(a, 13)
    wait(a, clock, late_ms)
    serve(a, 9)
    assert (level(a) > 0) == (late_ms > TARGET)
