"""One process of a load generator: `python -m bench.replay_worker`.

It reads a Part, one line of JSON, from standard input, says READY, reads the time of the begin, sends its share of the
requests on time, and writes what came of them as lines of JSON.
"""

import asyncio
import random
import resource
import sys
import time

import msgspec
import uvloop
from msgspec import Struct

from bench.arrivals import Planned, Source, planned
from bench.asking import Asking
from bench.goodput import Record
from bench.prompts import Words
from bench.target import Target
from bench.traces import BLOCK_TOKENS

READY = b"ready\n"
TELL_S = 0.2
TICK_S = 0.05
AHEAD_S = 0.25  # a prompt is made at most so long before it is sent


class Part(Struct, frozen=True, kw_only=True):
    """What one process does: every `processes`-th request of the plan from `index` on."""

    target: Target
    sources: tuple[Source, ...]
    words: Words
    rate: float
    requests: int
    seed: int
    index: int
    processes: int
    context_tokens: int = 0


class Told(Struct, omit_defaults=True):
    """Requests that have ended, how many were sent so far, and in the last line how the process itself did."""

    sent: int
    records: list[Record]
    health: "Health | None" = None


class Health(Struct):
    """Parts of the time that this process computed (`cpu`), and by how many ms its loop came late (99th percentile)."""

    cpu: float
    late_p99_ms: float


class Worker:
    """The process at work. `begin_s` is on time.perf_counter, which all processes of a machine share."""

    def __init__(self, part: Part) -> None:
        self._part = part
        whole = planned(part.sources, part.rate, part.requests, part.seed, part.context_tokens)
        self._mine = whole[part.index :: part.processes]
        self._sent = 0
        self._ended: list[Record] = []
        self._late_s: list[float] = []
        self._target = part.target
        self._aims = {source.name: source.objective for source in part.sources}
        self._limits = {source.name: source.max_tokens for source in part.sources}

    async def run(self, begin_s: float) -> None:
        pool = self._target.pool()
        asking = Asking(self._target, pool, self._aims, begin_s)
        cpu_s = time.process_time()
        watch = asyncio.ensure_future(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for one in self._mine:
                    await _until(begin_s + one.at_s - AHEAD_S)
                    body = self._body(one)
                    await _until(begin_s + one.at_s)
                    self._sent += 1
                    group.create_task(self._one(asking, one, body))
        finally:
            watch.cancel()
            pool.close()
        used_s = max(1e-9, time.perf_counter() - begin_s)
        late = sorted(self._late_s) or [0.0]
        self._tell(Health((time.process_time() - cpu_s) / used_s, late[len(late) * 99 // 100] * 1000))

    async def _one(self, asking: Asking, one: Planned, body: bytes) -> None:
        record = await asking.run(one, body)
        self._ended.append(record)

    def _body(self, one: Planned) -> bytes:
        rng = random.Random(f"{self._part.seed}/{one.number}")
        words = self._part.words
        if one.blocks:
            text = words.shared(one.input_tokens, one.blocks, BLOCK_TOKENS, rng)
        else:
            text = words.prompt(one.input_tokens, rng)
        limit = self._limits[one.source]
        return self._target.body(text, limit or one.output_tokens, exact=not limit)

    async def _watch(self) -> None:
        """Tell what has ended, and see how late this loop comes."""
        told_s = due_s = time.perf_counter()
        while True:
            due_s = max(due_s + TICK_S, time.perf_counter() - TICK_S)
            await _until(due_s)
            now = time.perf_counter()
            self._late_s.append(now - due_s)
            if now - told_s >= TELL_S:
                told_s = now
                self._tell()

    def _tell(self, health: Health | None = None) -> None:
        ended, self._ended = self._ended, []
        sys.stdout.write(msgspec.json.encode(Told(self._sent, ended, health)).decode() + "\n")
        sys.stdout.flush()


async def _until(at_s: float) -> None:
    wait_s = at_s - time.perf_counter()
    if wait_s > 0:
        await asyncio.sleep(wait_s)


def more_files() -> None:
    """As many open files as this process may have: each request in flight is a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    more_files()
    worker = Worker(msgspec.json.decode(sys.stdin.buffer.readline(), type=Part))
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    if begin := sys.stdin.buffer.readline():
        uvloop.run(worker.run(float(begin)))


if __name__ == "__main__":
    main()
