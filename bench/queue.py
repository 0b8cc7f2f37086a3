"""What the shared queue costs: CPU of the client and of the store per request, and how long a grant takes.

    python -m bench.queue [--seconds 2] [--store URL] [--scale]

A request is submit, grant, first token, end. `direct`: there is always room; `queued`: half of them wait. One process,
a closed loop; the store is the embedded one unless a URL is given. `--scale` measures single turns with one submit and
one end instead: how their cost depends on what waits and on the number of backends; and full turns, by event. Compare
only with numbers of the same machine and minute.
"""

import argparse
import asyncio
import os
import statistics
import time
from typing import Any

import redis
import uvloop

from gateway.queue import scripts, wire
from gateway.queue.book import Book
from gateway.queue.client import BackendShare, PoolShare, Queue, Store
from gateway.queue.embedded import Embedded
from gateway.queue.session import Session
from gateway.supervisor import Supervisor
from policies.types import Ticket

CASES = ((1, "direct"), (8, "direct"), (32, "direct"), (64, "direct"), (64, "queued"), (256, "queued"))
BACKENDS = 2
SCALES = ((20, 20, 1), (2000, 1000, 1), (20_000, 1000, 1), (20, 20, 50), (20_000, 1000, 50))
PREFIX = "{bench}:"
EVER_MS = 1_000_000_000


def store_cpu_s(store: redis.Redis) -> float:
    facts = store.info("cpu")
    kind = "_main_thread" if "used_cpu_user_main_thread" in facts else ""
    return float(facts[f"used_cpu_user{kind}"] + facts[f"used_cpu_sys{kind}"])


def share(name: str, limit: int) -> BackendShare:
    """A backend that is limited by its places only, though every test is made."""
    return BackendShare(name, limit, 0, 1_000_000_000, 1_000_000, True, 1000, 1000, 10, 1)


class Load:
    """`workers` closed loops on one queue until told to stop."""

    def __init__(self, queue: Queue, workers: int) -> None:
        self.queue = queue
        self.workers = workers
        self.waits_s: list[float] = []
        self.over = False

    async def run(self, seconds: float) -> None:
        loops = [asyncio.ensure_future(self._worker(i)) for i in range(self.workers)]
        await asyncio.sleep(seconds)
        self.over = True
        await asyncio.gather(*loops)

    async def _worker(self, i: int) -> None:
        ticket = Ticket(f"t{i % 50}", 1, "m", 1000, 300, 60_000)
        while not self.over:
            began_s = time.perf_counter()
            place = self.queue.submit(ticket)
            try:
                await place.granted()
                self.waits_s.append(time.perf_counter() - began_s)
                place.first_token()
                await asyncio.sleep(0)
            finally:
                place.end(300, ran=True)


async def measure(url: str, seconds: float) -> None:
    supervisor = Supervisor(lambda: None)
    queue = await Queue.connect(Store(url=url), supervisor)
    store = redis.from_url(queue.target.url)
    print(f"{queue!r}; load {os.getloadavg()[0]:.1f}")
    print(f"{'':16}{'req/s':>8}{'client us':>11}{'store us':>10}{'wait us':>9}{'turns/req':>11}")
    for workers, kind in CASES:
        limit = 10_000 if kind == "direct" else workers // 2 // BACKENDS
        queue.declare(PoolShare("m", tuple(share(f"b{i}", limit) for i in range(BACKENDS))))
        await Load(queue, workers).run(0.2)
        load = Load(queue, workers)
        turns, cpu_s, store_s, began_s = queue.turns.count, time.process_time(), store_cpu_s(store), time.perf_counter()
        await load.run(seconds)
        done, spent_s = len(load.waits_s), time.perf_counter() - began_s
        cpu_us = (time.process_time() - cpu_s) / done * 1e6
        store_us = (store_cpu_s(store) - store_s) / done * 1e6
        wait_us = statistics.median(load.waits_s) * 1e6
        turns_each = (queue.turns.count - turns) / done
        print(
            f"{workers:7} {kind:8}{done / spent_s:8.0f}{cpu_us:11.1f}{store_us:10.1f}{wait_us:9.0f}{turns_each:11.2f}"
        )
    await queue.aclose()
    await supervisor.aclose()


class Turns:
    """A process whose turns are made one by one. The tickets it holds end in the order in which they were granted."""

    def __init__(self, store: redis.Redis, backends: int, waiting: int, tenants: int) -> None:
        self.store = store
        self.tenants = tenants
        self.book = Book(10 * waiting)
        self.session = Session(self.book, "p")
        self.session.connected("one")
        self.asked = 0
        self.full_s: list[float] = []
        self.book.declare(PoolShare("m", tuple(share(f"b{i}", 8) for i in range(backends))))
        for _ in range(8 * backends + waiting):
            self.submit()
        while self.book.pending:
            self.turn()

    def submit(self) -> None:
        self.asked += 1
        prompt = 200 + 37 * self.asked % 3000
        name = f"t{self.asked * 7919 % self.tenants}"
        self.book.submit(Ticket(name, 1, "m", prompt, 300, EVER_MS, key_ms=self.asked % 5000), 0.0)

    def end(self) -> None:
        next(iter(self.book.held.values())).end(300, ran=True)

    def turn(self) -> None:
        began_s = time.perf_counter()
        parts = self.session.depart(0.0)
        raw: Any = self.store.execute_command("FCALL", scripts.FUNCTION, 1, PREFIX, *parts, b"0")  # type: ignore[no-untyped-call]
        reply = self.session.arrive(raw, 0.0)
        if reply.status is not wire.Status.OK or any(outcome.code == wire.ERROR for outcome in reply.outcomes):
            raise RuntimeError(f"a turn failed: {reply}")
        self.full_s.append(time.perf_counter() - began_s)


def scripted_us(store: redis.Redis) -> float:
    """Microseconds the server has spent in the script."""
    stats: Any = store.info("commandstats")
    return float(stats["cmdstat_fcall"]["usec"])


async def scale(turns: int) -> None:
    embedded = await Embedded.start()
    try:
        store = redis.Redis(unix_socket_path=str(embedded.socket), single_connection_client=True)
        store.execute_command("FUNCTION", "LOAD", "REPLACE", scripts.library())  # type: ignore[no-untyped-call]
        print(f"load {os.getloadavg()[0]:.1f}")
        columns = ("waiting", "tenants", "backends", "us/turn", "ratio", "us/event", "longest ms")
        print("".join(f"{column:>12}" for column in columns))
        base_us = 0.0
        for waiting, tenants, backends in SCALES:
            store.flushall()
            made = Turns(store, backends, waiting, tenants)
            before_us = scripted_us(store)
            for _ in range(turns):
                made.end()
                made.submit()
                made.turn()
            each_us = (scripted_us(store) - before_us) / turns
            base_us = base_us or each_us
            made.full_s.clear()
            before_us = scripted_us(store)
            for _ in range(turns // 10):
                for _ in range(min(wire.MAX_EVENTS // 2, len(made.book.held))):
                    made.end()
                    made.submit()
                made.turn()
            events = 2 * min(wire.MAX_EVENTS // 2, len(made.book.held)) * (turns // 10)
            full_us = (scripted_us(store) - before_us) / events
            longest_ms = max(made.full_s) * 1000
            numbers = f"{each_us:12.1f}{each_us / base_us:12.2f}{full_us:12.1f}{longest_ms:12.1f}"
            print(f"{waiting:12}{tenants:12}{backends:12}{numbers}")
    finally:
        await embedded.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--store", default="embedded")
    parser.add_argument("--scale", action="store_true", help="single turns instead, by what waits and by backends")
    options = parser.parse_args()
    uvloop.run(scale(int(1000 * options.seconds)) if options.scale else measure(options.store, options.seconds))


if __name__ == "__main__":
    main()
