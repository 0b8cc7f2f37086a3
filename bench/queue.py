"""What the shared queue costs: CPU of the client and of the store per request, and how long a grant takes.

    python -m bench.queue [--seconds 2] [--store URL]

A request is submit, grant, first token, end. `direct`: there is always room; `queued`: half of them wait. One process,
a closed loop; the store is the embedded one unless a URL is given. Compare only with numbers of the same machine and
minute.
"""

import argparse
import asyncio
import os
import statistics
import time

import redis
import uvloop

from gateway.queue.client import BackendShare, PoolShare, Queue, Store
from gateway.supervisor import Supervisor
from policies.types import Ticket

CASES = ((1, "direct"), (8, "direct"), (32, "direct"), (64, "direct"), (64, "queued"), (256, "queued"))
BACKENDS = 2


def store_cpu_s(store: redis.Redis) -> float:
    facts = store.info("cpu")
    kind = "_main_thread" if "used_cpu_user_main_thread" in facts else ""
    return float(facts[f"used_cpu_user{kind}"] + facts[f"used_cpu_sys{kind}"])


def share(name: str, limit: int) -> BackendShare:
    return BackendShare(name, limit, 1_000_000, 100_000_000, 1_000_000, True, 1000, 1000, 10, 1)


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
    store = redis.from_url(queue.turns.target.url)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--store", default="embedded")
    options = parser.parse_args()
    uvloop.run(measure(options.store, options.seconds))


if __name__ == "__main__":
    main()
