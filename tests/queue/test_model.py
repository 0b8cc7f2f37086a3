"""Random events over three processes, with faults, against the naive model. `SIGNALBOX_EVENTS` sets how many."""

import logging
import os
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Part
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from gateway.queue import wire
from gateway.queue.place import Phase, Place
from gateway.queue.share import BackendShare, PoolShare
from policies.quota import TenantLimits
from policies.types import Ticket
from tests.queue import ledgers
from tests.queue.model import Asked, Model
from tests.queue.procs import KEYS, Clock, Process, load
from tests.support.store import StoreServer

EVENTS = int(os.environ.get("SIGNALBOX_EVENTS", "4000"))
STEPS = 60
PER_EXAMPLE = 100  # events, about
PARTS = (Part.explicit, Part.reuse, Part.generate, Part.shrink)
POOLS = {"m": ("a", "b", "c"), "n": ("a",)}
CHUNKS = {"m": 0, "n": 90}  # the window of `n` is 180 prompt tokens
MOST_PASSED = 8  # times that a ticket may be passed; then what it could use is kept for it
WHO = st.integers(0, 2)
LOST = st.sampled_from([0, 0, 0, 1, 2])
FAULTS = ("kill", "sleep", "empty", "save", "save", "roll back", "step", "step back", "library")
SLACK_MS = 60  # a deadline travels as what remains
JUMP_MS, LOST_MS = 2000, 500  # logical time gains at most 2 s from a jump forward, and loses a step from one back


class Machine(RuleBasedStateMachine):
    """Three real books and sessions on a real store. Faults come between and within turns."""

    server: StoreServer

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.model = Clock(), Model()
        self.server("FLUSHALL")
        load(self.server)
        self.run = self.born = self.judged = 0
        self.saved = False
        self.slack_ms = SLACK_MS
        self.limits: dict[str, dict[str, tuple[int, bool]]] = {}
        self.keys: dict[tuple[str, int], float] = {}
        self.flights: dict[str, tuple[int, int]] | None = None  # not known
        self.places: dict[str, dict[int, Place]] = {}
        self.seen: dict[str, dict[int, Phase]] = {}
        self.firsts: defaultdict[tuple[str, str], list[int]] = defaultdict(list)  # deadlines by tenant and identity
        self.processes = [self.spawn() for _ in range(3)]

    def spawn(self) -> Process:
        self.born += 1
        process = Process(self.server, f"g{self.born}", self.clock)
        process.session.run_id = f"r{self.run}"
        for name, backends in self.limits.items():
            process.declare(share(name, backends))
        for name, cap in self.model.caps.items():
            process.book.declare_tenant(name, TenantLimits(tokens_in_flight=cap))
        self.places[process.session.base], self.seen[process.session.base] = {}, {}
        return process

    # what owners do

    @initialize(limits=st.lists(st.integers(1, 3), min_size=4, max_size=4))
    def begin(self, limits: list[int]) -> None:
        flat = iter(limits)
        self.limits = {name: {b: (next(flat), True) for b in names} for name, names in POOLS.items()}
        self.redeclare()

    def redeclare(self) -> None:
        for name, backends in self.limits.items():
            self.model.declare(name, dict(backends))
            for process in self.processes:
                process.declare(share(name, backends))
        for i in range(3):
            self.turn(i)

    @rule(
        i=WHO,
        lost=LOST,
        many=st.integers(1, 5),
        rank=st.integers(0, 2),
        tenant=st.sampled_from("xyz"),
        pool=st.sampled_from(["m", "m", "n"]),
        waits_ms=st.sampled_from([400, 5000, 60_000, 60_000]),
        narrow=st.sampled_from([(), (), (0,), (1, 0), (2,)]),
        retry=st.sampled_from([False, False, False, True]),
        key_ms=st.sampled_from([-1, -1, 0, 40, 500]),
        cached=st.sampled_from([0, 0, 60, 100]),
        price=st.sampled_from([1, 2, 4]),
        target_ms=st.sampled_from([0, 100, 400, 5000]),
        identity=st.sampled_from(["", "", "", "one", "two"]),
    )
    def submit(
        self, i: int, lost: int, many: int, narrow: tuple[int, ...], cached: int, price: int, **asked: Any
    ) -> None:
        process = self.processes[i]
        base = process.session.base
        for k in range(many):
            backends = narrow if asked["pool"] == "m" else ()
            ticket = Ticket(
                prompt_tokens=100 + k,
                output_tokens=10,
                backends=backends,
                uncached_tokens=100 + k - cached,
                output_variance=9,
                prefill_price=price,
                output_price=2 * price,
                **asked,
            )
            place = process.submit(ticket)
            self.places[base][place.number], self.seen[base][place.number] = place, place.phase
            self.model.submit(base, place.number, ticket, self.now_ms)
            self.firsts[ticket.tenant, ticket.identity].append(self.now_ms + ticket.waits_ms)
        self.turn(i, lost, doubled=many == 2)

    @rule(
        i=WHO,
        lost=LOST,
        picks=st.lists(st.tuples(st.integers(0, 30), st.sampled_from("fpeeec")), min_size=1, max_size=6),
    )
    def report(self, i: int, lost: int, picks: list[tuple[int, str]]) -> None:
        process = self.processes[i]
        base = process.session.base
        for index, what in picks:
            among = [*(process.book.waiting if what == "c" else process.book.held).values()]
            if not among:
                continue
            place = among[index % len(among)]
            if what == "f":
                place.first_token()
            elif what == "p":
                place.progress(10 * index, index)
            else:
                place.end(index, ran=True)
                self.model.end(base, place.number, self.now_ms, self.slack_ms)
                del self.places[base][place.number]
        self.turn(i, lost, doubled=len(picks) == 2)

    @rule(i=WHO, rank=st.integers(0, 2), pool=st.sampled_from(["m", "n"]), more=st.integers(1, 4))
    def rush(self, i: int, rank: int, pool: str, more: int) -> None:
        """So much at once that most of it waits for too long; then a little more."""
        asked = {
            "rank": rank,
            "pool": pool,
            "waits_ms": 60_000,
            "retry": False,
            "key_ms": -1,
            "target_ms": 100,
            "identity": "",
        }
        for many in (5, 5, 5):
            self.submit(i, 0, many, (), 0, 1, tenant="z", **asked)
        for _ in range(5):
            self.clock.advance(400)
            self.report(i, 0, [(k, "e") for k in range(3)])
        self.submit(i, 0, more, (), 0, 1, tenant="z", **asked)

    @rule(i=WHO, mail=st.booleans())
    def bare_turn(self, i: int, mail: bool) -> None:
        self.turn(i, mail=mail)

    @rule(pool=st.sampled_from(["m", "n"]), which=st.integers(0, 2), limit=st.integers(0, 3), closed=st.booleans())
    def change(self, pool: str, which: int, limit: int, closed: bool) -> None:
        backends = self.limits[pool]
        backends[list(backends)[which % len(backends)]] = (limit, not closed)
        self.redeclare()

    @rule(tenant=st.sampled_from("xy"), cap=st.sampled_from([0, 150, 250, 400]))
    def limit(self, tenant: str, cap: int) -> None:
        self.model.caps[tenant] = cap
        for process in self.processes:
            process.book.declare_tenant(tenant, TenantLimits(tokens_in_flight=cap))
        for i in range(3):
            self.turn(i)

    @rule(ms=st.sampled_from([5, 50, 450, 1500, 6000]))
    def time_passes(self, ms: int) -> None:
        for _ in range(max(1, ms // 500)):
            self.clock.advance(min(ms, 500))
            for i in range(3):
                self.processes[i].book.beat()
                self.turn(i)

    # faults

    @rule(i=WHO, kind=st.sampled_from(FAULTS))
    def fault(self, i: int, kind: str) -> None:
        if kind == "kill":
            self.kill(i)
        elif kind == "sleep":
            self.sleep_until_reaped(i)
        elif kind == "empty":
            self.server("FLUSHALL")
            self.another_server()
        elif kind == "save":
            self.server("SAVE")
            self.saved = True
        elif kind == "roll back" and self.saved:
            self.server("DEBUG", "RELOAD", "NOSAVE")
            self.another_server()
        elif kind in {"step", "step back"}:
            self.clock.wall_ms += 3_600_000 if kind == "step" else -3_600_000
            self.slack_ms += JUMP_MS if kind == "step" else LOST_MS
        elif kind == "library":
            self.server("FUNCTION", "FLUSH")

    def kill(self, i: int) -> None:
        base = self.processes[i].session.base
        self.model.forget(base, self.now_ms, self.slack_ms)
        del self.places[base], self.seen[base]
        self.processes[i] = self.spawn()
        self.turn(i)

    def sleep_until_reaped(self, i: int) -> None:
        for _ in range(13):
            self.clock.advance(500)
            for k in {0, 1, 2} - {i}:
                self.processes[k].book.beat()
                self.turn(k)

    def another_server(self) -> None:
        self.run += 1
        for i in range(3):
            self.turn(i)

    # one turn and what it means

    @property
    def now_ms(self) -> int:
        return round(self.clock.now_s * 1000)

    def turn(self, i: int, lost: int = 0, doubled: bool = False, mail: bool = True) -> None:
        process = self.processes[i]
        self.clock.advance(1)
        process.connect(f"r{self.run}")
        started = rejoins = process.session.rejoins
        reply = process.turn(lost, doubled)
        for _ in range(1000):
            if not (process.book.pending or process.session.rejoins != rejoins or self.unfinished(reply)):
                break
            rejoins = process.session.rejoins
            reply = process.turn()
        for other in self.processes if mail else [process]:
            other.mail()
        self.hear()
        self.judge(process.session.rejoins != started)

    def came_before(self, asked: Asked, place: Place) -> None:
        """One that comes again has the deadline of one of its tenant and identity; a store that was rolled back, or
        whose time could not follow a jump, may leave it more. (Told again after a loss when its own was over, it has
        none left: then the first is before that.)"""
        if self.now_ms > asked.since_ms + place.ticket.waits_ms:
            return
        asked.late_ms = asked.since_ms + place.ticket.waits_ms - round(place.nearer_s * 1000)
        firsts = self.firsts[place.ticket.tenant, place.ticket.identity]
        assert place.ticket.identity
        assert asked.late_ms >= min(firsts) - self.slack_ms, f"{asked} has less time than any had before"

    def hear(self) -> None:
        """Tell the model what owners have learned."""
        for base, places in self.places.items():
            for number, place in list(places.items()):
                was, self.seen[base][number] = self.seen[base][number], place.phase
                if place.nearer_s and (asked := self.model.asked.get((base, number))):
                    self.came_before(asked, place)
                if place.phase is Phase.REFUSED:
                    del places[number]
                    assert place.refusal is not None
                    self.model.refused(base, number, place.refusal.reason.value, self.now_ms, self.slack_ms)
                elif place.phase is Phase.HELD and was is Phase.WAITING:
                    self.model.granted(base, number, place.backend, self.now_ms, self.slack_ms)

    def judge(self, rejoined: bool) -> None:
        """Only while the store knows all that the model knows: nobody is dead, asleep, still to rejoin, or has mail."""
        found = ledgers.check(self.server)
        names = {p.session.name: p.session.base for p in self.processes}
        keys, self.keys = self.keys, {}
        before, self.flights = self.flights, None
        if any(owner not in names for owner, _ in found) or not all(map(self.joined, self.processes)) or self.unread():
            return
        self.judged += 1
        waiting = {who: t for who, t in found.items() if t[ledgers.STATE] == ledgers.WAITING}
        self.keys = {(names[owner], number): t[ledgers.KEY] for (owner, number), t in waiting.items()}
        flights: dict[str, tuple[int, int]] = {}
        for tenant, record in ledgers.limits(self.server).items():
            held = [t for t in found.values() if t[ledgers.TENANT] == tenant and t[ledgers.STATE] == ledgers.HELD]
            flights[tenant] = record[4], len(held)
        self.flights = flights
        self.model.check_sheds()
        self.model.check_order(keys)
        if before is not None and not rejoined:
            self.model.check_caps(flights, before)
        for pool in POOLS:
            mine = [t for t in waiting.values() if t[ledgers.POOL] == pool]
            if all(t[ledgers.PASSED] < MOST_PASSED for t in mine):
                windows = {b[0]: ledgers.window(b) for b in ledgers.backends(self.server, pool).values()}
                self.model.check_work(pool, windows, self.keys, flights)

    def unfinished(self, reply: wire.Reply) -> bool:
        """Whether there was more to do than a turn may; another one goes on at once."""
        return reply.due_ms == 1 and bool(self.server("HGET", KEYS.meta, "unfinished"))

    def joined(self, process: Process) -> bool:
        session = process.session
        return session.run_id == f"r{self.run}" and bool(self.server("EXISTS", KEYS.process(session.name)))

    def unread(self) -> bool:
        """Whether somebody has mail: then the model does not know all yet."""
        return any(
            self.server("XREAD", "STREAMS", KEYS.mailbox(p.session.name), p.session.cursor or "0-0")
            for p in self.processes
        )

    @invariant()
    def what_owners_believe_is_what_the_store_holds(self) -> None:
        if not self.limits or self.unread():
            return
        held = Counter(owner for owner, _ in ledgers.tickets(self.server))
        for process in self.processes:
            if self.joined(process) and not process.book.pending:
                assert held[process.session.name] == process.book.known

    def teardown(self) -> None:
        """Drain: everybody ends everything, the dead are reaped, ledgers are zero; then all leave, and what stays ends
        by itself."""
        if not self.limits:
            return
        for places in self.places.values():
            for place in places.values():
                place.end(1, ran=True)
        for _ in range(20):
            self.clock.advance(400)
            for process in self.processes:
                process.connect(f"r{self.run}")
                process.beat()
                process.settle()
        assert ledgers.check(self.server) == {}
        for pool in POOLS:
            assert all(not any(b[ledgers.LEDGERS]) for b in ledgers.backends(self.server, pool).values())
        for process in self.processes:
            process.book.bye()
            process.settle()
        left = self.server.keys()
        assert [key for key in left if self.server("PTTL", key) < 0] == []


def share(name: str, backends: dict[str, tuple[int, bool]]) -> PoolShare:
    return PoolShare(
        name,
        tuple(BackendShare(b, limit, 100_000, 10_000, CHUNKS[name], opened) for b, (limit, opened) in backends.items()),
    )


@pytest.mark.timeout(3600)
def test_random_events_against_the_model(server: StoreServer) -> None:
    logging.disable(logging.WARNING)  # rejoins by the hundred
    try:
        run_state_machine_as_test(
            type("Machine", (Machine,), {"server": server}),
            settings=settings(
                max_examples=max(2, EVENTS // PER_EXAMPLE),
                stateful_step_count=STEPS,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=PARTS,
                print_blob=True,
            ),
        )
    finally:
        logging.disable(logging.NOTSET)
