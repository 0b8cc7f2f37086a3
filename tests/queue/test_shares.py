"""Fairness across tenants: the VTC bound in every window, shares by weight, no credit for idling, floors, parking."""

import random

import pytest

from gateway.queue.place import Phase, Place
from policies.fairness import Prices, bound, prices
from policies.quota import TenantLimits
from tests.queue import ledgers
from tests.queue.conftest import pool, ticket
from tests.queue.ledgers import check
from tests.queue.procs import Clock, Process
from tests.support.store import StoreServer

Pair = tuple[Process, Process]
PROMPT, OUTPUT = 500, 200  # tokens, at most


class Tenants:
    """Tenants that always have something waiting in both processes, and what each has been served, in charge units."""

    def __init__(self, pair: Pair, weights: dict[str, float], seed: int) -> None:
        self.pair = pair
        self.costs = {name: prices(weight) for name, weight in weights.items()}
        self.random = random.Random(seed)
        self.waiting: dict[str, list[Place]] = {name: [] for name in weights}
        self.held: list[Place] = []
        self.done = dict.fromkeys(weights, 0.0)
        self.flights = dict.fromkeys(weights, 0)

    def fill(self) -> None:
        for name, places in self.waiting.items():
            while len(places) < 4:
                cost, prompt = self.costs[name], self.random.randint(1, PROMPT)
                asked = ticket(
                    tenant=name,
                    waits_ms=10**9,
                    prompt_tokens=prompt,
                    output_tokens=self.random.randint(1, OUTPUT),
                    prefill_price=cost.prefill,
                    output_price=cost.output,
                )
                places.append(self.pair[self.random.randrange(2)].submit(asked))

    def step(self) -> dict[str, float]:
        """Some end, with an output that nobody expected. -> service by tenant, running ones as they are charged."""
        for place in self.random.sample(self.held, min(len(self.held), self.random.randint(1, 3))):
            output = self.random.randint(0, OUTPUT)
            self.done[place.ticket.tenant] += self._cost(place).charge(place.ticket.prompt_tokens, output)
            place.end(output, ran=True)
        self.fill()
        for process in self.pair:
            process.settle()
        for process in self.pair:
            process.mail()
        for name, places in self.waiting.items():
            self.held += [p for p in places if p.phase is Phase.HELD]
            self.waiting[name] = [p for p in places if p.phase is Phase.WAITING]
        self.held = [p for p in self.held if p.phase is Phase.HELD]
        served = dict(self.done)
        for name in self.flights:
            mine = [p for p in self.held if p.ticket.tenant == name]
            served[name] += sum(self._cost(p).charge(p.ticket.prompt_tokens, p.ticket.output_tokens) for p in mine)
            tokens = sum(p.ticket.prompt_tokens + OUTPUT for p in mine)
            self.flights[name] = max(self.flights[name], tokens)
        return served

    def _cost(self, place: Place) -> Prices:
        return self.costs[place.ticket.tenant]


@pytest.mark.parametrize("seed", range(3))
def test_services_never_drift_apart_by_more_than_the_bound(pair: Pair, server: StoreServer, seed: int) -> None:
    for process in pair:
        process.declare(pool(3, 2))
        process.settle()
    tenants = Tenants(pair, {"a": 1, "b": 2, "c": 4}, seed)
    tenants.fill()
    history = [tenants.step() for _ in range(250)]
    limit = bound(prices(1), PROMPT, max(tenants.flights.values()))
    for one, other in (("a", "b"), ("b", "c"), ("a", "c")):
        apart = [served[one] - served[other] for served in history]
        assert max(apart) - min(apart) <= limit
        assert max(apart) - min(apart) <= 4 * prices(1).charge(PROMPT, OUTPUT)  # what it does, with few leases each
    check(server)


def test_shares_follow_the_weights_over_both_processes(pair: Pair) -> None:
    for process in pair:
        process.declare(pool(3, 2))
        process.settle()
    tenants = Tenants(pair, {"a": 1, "b": 2, "c": 4}, 7)
    tenants.fill()
    for _ in range(600):
        served = tenants.step()
    tokens = {name: served[name] / tenants.costs[name].prefill for name in served}
    total = sum(tokens.values())
    for name, weight in (("a", 1), ("b", 2), ("c", 4)):
        assert tokens[name] / total == pytest.approx(weight / 7, rel=0.05)


def _serve(process: Process, holder: Place) -> str:
    """End one lease -> the tenant that got the next."""
    before = set(process.book.held)
    holder.end(50, ran=True)
    process.turn()
    (fresh,) = set(process.book.held) - before
    return process.book.held[fresh].ticket.tenant


def _holder(process: Process) -> Place:
    (place,) = process.book.held.values()
    return place


def test_idling_earns_no_credit(pair: Pair) -> None:
    a, _ = pair
    for _ in range(30):
        a.submit(ticket(tenant="busy", waits_ms=10**9))
    a.settle()
    for _ in range(20):
        _serve(a, _holder(a))
    for _ in range(10):
        a.submit(ticket(tenant="idle", waits_ms=10**9))
    a.settle()
    after = [_serve(a, _holder(a)) for _ in range(8)]
    assert after.count("idle") == 4


def test_a_trickle_saves_nothing_up(pair: Pair) -> None:
    """One request at a time, whose queue is empty in between, while another uses a hundred times as much."""
    a, _ = pair
    a.declare(pool(2))
    for _ in range(60):
        a.submit(ticket(tenant="busy", waits_ms=10**9, prompt_tokens=1000))
    trickle = a.submit(ticket(tenant="trickle", waits_ms=10**9, prompt_tokens=10, output_tokens=1))
    a.settle()
    for _ in range(40):
        place = next(p for p in a.book.held.values() if p.ticket.tenant == "busy")
        place.end(50, ran=True)
        a.settle()
        if trickle.phase is Phase.HELD:
            trickle.end(1, ran=True)
            trickle = a.submit(ticket(tenant="trickle", waits_ms=10**9, prompt_tokens=10, output_tokens=1))
            a.settle()
    trickle.end(1, ran=True)
    for _ in range(30):
        a.submit(ticket(tenant="trickle", waits_ms=10**9, prompt_tokens=1000))
    a.declare(pool(1))
    a.settle()
    while len(a.book.held) > 1:
        next(iter(a.book.held.values())).end(50, ran=True)
        a.settle()
    after = [_serve(a, _holder(a)) for _ in range(10)]
    assert 4 <= after.count("trickle") <= 6


def test_a_refund_does_not_go_below_the_classs_time(pair: Pair, server: StoreServer) -> None:
    a, _ = pair
    a.declare(pool(2))
    first = a.submit(ticket(tenant="x", output_tokens=10_000))
    others = [a.submit(ticket(tenant="y", waits_ms=10**9)) for _ in range(10)]
    a.settle()
    for place in others[:5]:
        place.end(50, ran=True)
        a.settle()
    assert ledgers.accounts(server, "m")[1, "x"][ledgers.A_COUNTER] == 100 + 2 * 10_000
    virtual = ledgers.classes(server, "m")[1][2]
    assert virtual > 500
    a.submit(ticket(tenant="x", waits_ms=10**9))
    a.settle()
    first.end(0, ran=True)
    a.turn()  # a place for x, of whose charge of 200 the refund pays half
    account = ledgers.accounts(server, "m")[1, "x"]
    assert account[ledgers.A_COUNTER] == virtual + 100
    assert account[ledgers.A_CREDIT] == 20_000 - (20_100 - virtual) - 100
    check(server)


def test_what_a_refund_may_not_take_off_is_not_kept_over_idleness(pair: Pair, server: StoreServer) -> None:
    a, _ = pair
    a.declare(pool(2))
    first = a.submit(ticket(tenant="x", output_tokens=10_000))
    others = [a.submit(ticket(tenant="y", waits_ms=10**9)) for _ in range(10)]
    a.settle()
    for place in others[:5]:
        place.end(50, ran=True)
        a.settle()
    mine = a.submit(ticket(tenant="x", waits_ms=10**9))
    a.settle()
    first.end(0, ran=True)
    a.turn()
    assert ledgers.accounts(server, "m")[1, "x"][ledgers.A_CREDIT] > 0
    mine.end(50, ran=True)
    a.settle()
    a.submit(ticket(tenant="x", waits_ms=10**9))
    a.settle()
    assert ledgers.accounts(server, "m")[1, "x"][ledgers.A_CREDIT] == 0


def test_a_lower_class_gets_its_floor_and_no_more(pair: Pair) -> None:
    a, _ = pair
    for rank, n in ((0, 200), (2, 40)):
        for _ in range(n):
            a.submit(ticket(rank=rank, tenant=f"r{rank}", waits_ms=10**9))
    a.settle()
    served = [_serve(a, _holder(a)) for _ in range(105)]
    assert served.count("r2") == 5
    assert "r2" not in served[:18]


def test_a_class_that_waits_alone_owes_nothing(pair: Pair, server: StoreServer) -> None:
    a, _ = pair
    for _ in range(5):
        a.submit(ticket(rank=2, waits_ms=10**9))
    a.settle()
    for _ in range(3):
        _serve(a, _holder(a))
    assert ledgers.classes(server, "m")[2][3] > -1000 * 1000


def test_the_key_orders_a_tenants_line(pair: Pair) -> None:
    a, b = pair
    holder = a.submit(ticket())
    a.settle()
    asked = {name: b.submit(ticket(key_ms=key)) for name, key in (("late", 900), ("soon", 100), ("mid", 500))}
    b.settle()
    arrived = a.submit(ticket())  # by arrival: now
    a.settle()
    order = []
    for _ in range(4):
        holder.end(1, ran=True)
        for process in (*pair, *pair):
            process.settle()
        holder = next(p for p in (*asked.values(), arrived) if p.phase is Phase.HELD)
        order.append(next((n for n, p in asked.items() if p is holder), "arrived"))
    assert order == ["arrived", "soon", "mid", "late"]


def test_an_idle_account_that_was_overtaken_is_dropped(pair: Pair, server: StoreServer, clock: Clock) -> None:
    a, _ = pair
    for i in range(50):
        a.submit(ticket(tenant=f"t{i}", waits_ms=10**9, prompt_tokens=10 + i))
    for _ in range(30):
        a.submit(ticket(tenant="long", waits_ms=10**9, prompt_tokens=1000))
    a.settle()
    for _ in range(79):
        _holder(a).end(1, ran=True)
        a.turn()
    _holder(a).end(1, ran=True)
    for _ in range(40):
        clock.advance(300)
        a.beat()
        check(server)
    assert {name for _, name in ledgers.accounts(server, "m")} <= {"long"}


def test_a_tenant_at_its_cap_lets_others_by_and_returns(pair: Pair, server: StoreServer) -> None:
    a, b = pair
    for process in pair:
        process.declare(pool(4))
        process.book.declare_tenant("x", TenantLimits(tokens_in_flight=300))
    mine = [a.submit(ticket(tenant="x", waits_ms=10**9)) for _ in range(4)]
    other = b.submit(ticket(tenant="y", waits_ms=10**9))
    a.settle()
    b.settle()
    assert [p.phase for p in (*mine, other)] == [Phase.HELD, Phase.HELD, Phase.WAITING, Phase.WAITING, Phase.HELD]
    check(server)
    mine[0].progress(1)
    a.settle()
    assert mine[2].phase is Phase.WAITING  # 151 and 150 more
    mine[0].progress(0)
    a.settle()
    assert mine[2].phase is Phase.HELD
    mine[1].end(1, ran=True)
    a.settle()
    assert mine[3].phase is Phase.HELD
    for place in (*mine, other):
        place.end(1, ran=True)
    a.settle()
    b.settle()
    assert check(server) == {}
    assert ledgers.limits(server)["x"][4:6] == [0, 0]


def test_a_request_larger_than_the_cap_goes_alone(pair: Pair) -> None:
    a, _ = pair
    a.declare(pool(4))
    a.book.declare_tenant("x", TenantLimits(tokens_in_flight=100))
    first, second = (a.submit(ticket(tenant="x", waits_ms=10**9)) for _ in range(2))
    a.settle()
    assert (first.phase, second.phase) == (Phase.HELD, Phase.WAITING)
    a.book.declare_tenant("x", TenantLimits())
    a.settle()
    assert second.phase is Phase.HELD


def test_a_parked_tenants_head_that_leaves_makes_way(pair: Pair, server: StoreServer) -> None:
    a, _ = pair
    a.declare(pool(4))
    a.book.declare_tenant("x", TenantLimits(tokens_in_flight=300))
    a.submit(ticket(tenant="x", waits_ms=10**9))
    large = a.submit(ticket(tenant="x", waits_ms=10**9, prompt_tokens=200))
    small = a.submit(ticket(tenant="x", waits_ms=10**9, prompt_tokens=90))
    a.settle()
    assert (large.phase, small.phase) == (Phase.WAITING, Phase.WAITING)
    large.end()
    a.settle()
    assert small.phase is Phase.HELD
    check(server)


def test_what_one_waiting_ticket_is_behind_is_not_forgiven(pair: Pair, server: StoreServer) -> None:
    """Lifted when it came, not again when it goes: its tenant had something waiting all the time."""
    a, _ = pair
    a.declare(pool(1, 1))
    on_b = a.submit(ticket(tenant="y", backends=(1,), waits_ms=10**9))
    on_a = [a.submit(ticket(tenant="y", backends=(0,), waits_ms=10**9)) for _ in range(8)]
    mine = a.submit(ticket(tenant="x", backends=(1,), waits_ms=10**9))
    a.settle()
    before = ledgers.accounts(server, "m")[1, "x"][ledgers.A_COUNTER]
    for place in on_a[:6]:
        place.end(50, ran=True)
        a.settle()
    assert ledgers.classes(server, "m")[1][2] > before + 200
    on_b.end(50, ran=True)
    a.settle()
    assert mine.phase is Phase.HELD
    assert ledgers.accounts(server, "m")[1, "x"][ledgers.A_COUNTER] == before + 200
