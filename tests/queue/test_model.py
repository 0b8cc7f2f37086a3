"""Random events over three processes, with faults, against the naive model. `SIGNALBOX_EVENTS` sets how many."""

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gateway.queue import wire
from gateway.queue.book import BackendShare, PoolShare
from gateway.queue.place import Phase, Place
from policies.types import Ticket
from tests.queue import ledgers
from tests.queue.model import Model
from tests.queue.procs import Clock, Process, load
from tests.support.store import StoreServer

EVENTS = int(os.environ.get("SIGNALBOX_EVENTS", "6000"))
STEPS = 60
PER_EXAMPLE = 100  # events, about
POOLS = {"m": ("a", "b", "c"), "n": ("a",)}
WHO = st.integers(0, 2)
TOLERANCE_MS = 2500  # a deadline travels as what remains; a clock jump moves logical time by up to 2 s


class Machine(RuleBasedStateMachine):
    """Three real books and sessions on a real store. Faults come between and within turns."""

    server: StoreServer

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.model = Clock(), Model()
        self.server("FLUSHALL")
        load(self.server)
        self.run, self.born, self.events = 0, 0, 0
        self.limits: dict[str, dict[str, tuple[int, bool]]] = {}
        self.places: dict[str, dict[int, Place]] = {}
        self.seen: dict[str, dict[int, Phase]] = {}
        self.processes = [self.spawn() for _ in range(3)]
        self.doomed = 0  # turns until dead tickets are surely gone: until then what is idle cannot be judged
        self.saved = False
        self.stepped = False

    def spawn(self) -> Process:
        self.born += 1
        process = Process(self.server, f"g{self.born}", self.clock)
        process.session.run_id = f"r{self.run}"
        for name, backends in self.limits.items():
            process.declare(share(name, backends))
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
            self.model.declare(name, backends)
            for process in self.processes:
                process.declare(share(name, backends))
        for i in range(3):
            self.turn(i)

    @rule(
        i=WHO,
        many=st.integers(1, 5),
        rank=st.integers(0, 2),
        tenant=st.sampled_from("xyz"),
        pool=st.sampled_from(["m", "m", "n"]),
        waits_ms=st.sampled_from([400, 5000, 60_000, 60_000]),
        narrow=st.sampled_from([(), (), (0,), (1, 0), (2,)]),
        retry=st.sampled_from([False, False, False, True]),
    )
    def submit(self, i: int, many: int, **asked: Any) -> None:
        process = self.processes[i]
        backends = asked.pop("narrow") if asked["pool"] == "m" else asked.pop("narrow") and ()
        for k in range(many):
            ticket = Ticket(prompt_tokens=100 + k, output_tokens=10, backends=backends, **asked)
            place = process.submit(ticket)
            base = process.session.base
            self.places[base][place.number], self.seen[base][place.number] = place, place.phase
            self.model.submit(base, place.number, ticket, self.now_ms)
            self.events += 1
        self.turn(i)

    @rule(i=WHO, picks=st.lists(st.tuples(st.integers(0, 30), st.sampled_from("fpeeec")), min_size=1, max_size=6))
    def report(self, i: int, picks: list[tuple[int, str]]) -> None:
        process = self.processes[i]
        for index, what in picks:
            held = [*process.book.waiting.values()] if what == "c" else [*process.book.held.values()]
            if not held:
                continue
            place = held[index % len(held)]
            self.events += 1
            if what == "f":
                place.first_token()
            elif what == "p":
                place.progress(10 * index)
            else:
                place.end(index, ran=True)
                self.model.end(process.session.base, place.number)
                del self.places[process.session.base][place.number]
        self.turn(i)

    @rule(i=WHO, lost=st.integers(0, 2), doubled=st.booleans(), mail=st.booleans())
    def bare_turn(self, i: int, lost: int, doubled: bool, mail: bool) -> None:
        self.turn(i, lost, doubled, mail)

    @rule(pool=st.sampled_from(["m", "n"]), which=st.integers(0, 2), limit=st.integers(0, 3), opened=st.booleans())
    def change(self, pool: str, which: int, limit: int, opened: bool) -> None:
        backends = self.limits[pool]
        backends[list(backends)[which % len(backends)]] = (limit, opened)
        self.redeclare()

    # faults

    @rule(ms=st.sampled_from([5, 50, 300, 1500]))
    def time_passes(self, ms: int) -> None:
        for _ in range(max(1, ms // 500)):
            self.clock.advance(min(ms, 500))
            for i in range(3):
                self.processes[i].book.beat()
                self.turn(i)

    @rule(i=WHO)
    def kill(self, i: int) -> None:
        base = self.processes[i].session.base
        self.model.forget(base)
        del self.places[base], self.seen[base]
        self.processes[i] = self.spawn()
        self.processes[i].connect(f"r{self.run}")
        self.processes[i].session.rejoin("born")
        self.doomed = 6500
        self.turn(i)

    @rule(i=WHO)
    def sleep_until_reaped(self, i: int) -> None:
        for _ in range(13):
            self.clock.advance(500)
            for k in range(3):
                if k != i:
                    self.processes[k].book.beat()
                    self.turn(k)
        self.doomed = max(self.doomed, 500)
        self.turn(i)

    @rule()
    def empty_the_store(self) -> None:
        self.server("FLUSHALL")
        self.another_server()

    @rule()
    def save(self) -> None:
        self.server("SAVE")
        self.saved = True

    @precondition(lambda self: self.saved)
    @rule()
    def roll_back(self) -> None:
        self.server("DEBUG", "RELOAD", "NOSAVE")
        self.saved = False
        self.another_server()

    def another_server(self) -> None:
        self.run += 1
        self.doomed = 6500
        for i in range(3):
            self.turn(i)

    @rule(hours=st.sampled_from([-1, 1]))
    def wall_clock_steps(self, hours: int) -> None:
        self.clock.wall_ms += hours * 3_600_000
        self.stepped = True

    @rule(i=WHO)
    def flush_library(self, i: int) -> None:
        self.server("FUNCTION", "FLUSH")
        self.turn(i)

    # one turn and what it means

    @property
    def now_ms(self) -> int:
        return round(self.clock.now_s * 1000)

    def turn(self, i: int, lost: int = 0, doubled: bool = False, mail: bool = True) -> None:
        process = self.processes[i]
        self.clock.advance(1)
        before = {(a.process, a.number) for a in self.model.asked.values() if not a.backend}
        process.connect(f"r{self.run}")
        rejoins = process.session.rejoins
        touched = self.touching(process)
        process.turn(lost, doubled)
        while process.book.pending or process.session.rejoins != rejoins:
            rejoins = process.session.rejoins
            touched |= self.touching(process)
            process.turn()
        self.doomed = max(0, self.doomed - 1)
        if process.session.rejoins > 0 and process.session.number <= 2:
            self.doomed = max(self.doomed, 600)
        for other in self.processes if mail else [process]:
            other.mail()
        self.hear()
        self.judge(before, touched)

    def touching(self, process: Process) -> set[str]:
        return {what.ticket.pool for code, what in process.book._pending if code in (wire.SUBMIT, wire.FIRST)}

    def hear(self) -> None:
        """Tell the model what owners have learned."""
        slack = TOLERANCE_MS if self.stepped else 600
        for base, places in self.places.items():
            for number, place in list(places.items()):
                was, self.seen[base][number] = self.seen[base][number], place.phase
                if place.phase is Phase.REFUSED:
                    del places[number]
                    assert place.refusal is not None
                    self.model.refused(base, number, place.refusal.reason.value, self.now_ms, slack)
                elif place.phase is Phase.HELD and was is Phase.WAITING:
                    self.model.granted(base, number, place.backend, self.now_ms, slack)

    def judge(self, before: set[tuple[str, int]], touched: set[str]) -> None:
        found = ledgers.check(self.server)
        live = {p.session.name for p in self.processes}
        if any(owner not in live for owner, _ in found) or (self.run and self.doomed):
            return  # what the dead hold is not the model's
        if self.unread():
            return
        self.model.check_order(before, self.now_ms + TOLERANCE_MS)
        for pool in touched:
            backends = ledgers.backends(self.server, pool)
            room = {b[0]: b[2] - b[6] for b in backends.values() if b[1] == 1}
            self.model.check_work(pool, room, self.now_ms + TOLERANCE_MS)

    def unread(self) -> bool:
        """Whether somebody has mail: then the model does not know all yet."""
        return any(
            self.server("XREAD", "STREAMS", f"{{signalbox}}:p:{p.session.name}:m", p.session.cursor or "0-0")
            for p in self.processes
        )

    @invariant()
    def what_owners_believe_is_what_the_store_holds(self) -> None:
        if not self.limits or self.unread():
            return
        found = ledgers.tickets(self.server)
        by_owner = Counter(owner for owner, _ in found)
        for process in self.processes:
            if process.session.run_id == f"r{self.run}" and not process.book.pending:
                assert by_owner[process.session.name] in (process.book.known, 0)

    def teardown(self) -> None:
        """Drain: everybody ends everything, the dead are reaped, ledgers are zero; then all leave and no key stays."""
        if not self.limits:
            return
        for i in range(3):
            for place in list(self.places[self.processes[i].session.base].values()):
                place.end(1, ran=True)
                self.model.end(self.processes[i].session.base, place.number)
        self.places = {base: {} for base in self.places}
        self.clock.advance(1)
        for _ in range(20):
            self.clock.advance(400)
            for process in self.processes:
                process.connect(f"r{self.run}")
                process.beat()
                process.settle()
        assert ledgers.check(self.server) == {}
        for pool in POOLS:
            assert all(b[6:9] == [0, 0, 0] for b in ledgers.backends(self.server, pool).values())
        for process in self.processes:
            process.book.bye()
            process.settle()
        assert self.server.keys() == []


def share(name: str, backends: dict[str, tuple[int, bool]]) -> PoolShare:
    return PoolShare(
        name, tuple(BackendShare(b, limit, 1000, 1000, 100, opened) for b, (limit, opened) in backends.items())
    )


@pytest.mark.timeout(600)
def test_random_events_against_the_model(server: StoreServer) -> None:
    machine = type("Machine", (Machine,), {"server": server})
    examples = max(2, EVENTS // PER_EXAMPLE)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
