"""Mixed load and random faults for a while, then what is left: `python -m bench.soak [--minutes N] [--seed N]`.

Two workers before two engines, with a store of their own. Clients stream or not, in all classes, and one in four leaves
at any moment. Every few seconds an engine or a worker is killed, or the store is killed or stands still. It ends with
exit code 1 when a bound is missed: every request has one answer, all ledgers are zero, nothing leaked, memory is flat.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.processes import Failed, Running, free_port, wait_for
from gateway.queue.embedded import Embedded

CLIENTS = 48
PAUSE_S = (2.0, 6.0)  # between two faults
ANSWER_S = 60.0  # a request without an answer for this long has none
GROWTH = 1.25  # of memory, from the second quarter to the last
SETTLE_S = 20.0
CLASSES = ("interactive", "standard", "batch")
CONFIG = """
[server]
port = {port}
workers = 2

[store]
url = "{store}"

[telemetry]
access_log = "failed"

[[pool]]
model = "mock"
"""
BACKEND = """
[[pool.backend]]
kind = "openai"
name = "engine-{nth}"
url = "http://127.0.0.1:{port}"
limits = {{ max_running = 12 }}
"""


class Engine:
    """One mock engine that can be killed and comes back on its port."""

    def __init__(self, nth: int, folder: Path) -> None:
        self.nth, self.port, self._folder = nth, free_port(), folder
        self._running = self._started()

    def _started(self) -> Running:
        argv = [sys.executable, "-m", "bench.mock_openai", "--port", str(self.port), "--itl-ms", "8"]
        return Running(f"engine-{self.nth}", argv, None, self._folder / f"engine-{self.nth}.log")

    def kill(self) -> None:
        self._running.kill()

    def start(self) -> None:
        self._running = self._started()

    def stop(self) -> None:
        self._running.stop()


class Soak:
    """The load and what came of it. `outcomes` counts answers by status and reason."""

    def __init__(self, url: str, dice: random.Random, client: aiohttp.ClientSession) -> None:
        self.url, self.dice, self.client = url, dice, client
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.memory_mib: list[float] = []
        self.worker_killed_at = -1e9
        self.unanswered: list[str] = []

    async def load(self, ends_at: float) -> None:
        """Clients, one request after the other, until the time is up."""
        loop = asyncio.get_running_loop()

        async def one() -> None:
            while loop.time() < ends_at:
                await self._ask()

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(one())

    async def _ask(self) -> None:
        dice, loop = self.dice, asyncio.get_running_loop()
        stream, leaves = dice.random() < 0.7, dice.random() < 0.25
        body: dict[str, object] = {
            "model": "mock",
            "messages": [{"role": "user", "content": "word " * dice.choice((1, 30, 600))}],
        }
        body |= {"max_tokens": dice.choice((1, 8, 40, 200)), "stream": stream}
        headers = {"x-priority-class": dice.choice(CLASSES)}
        began_at = loop.time()
        try:
            async with asyncio.timeout(dice.expovariate(5.0) if leaves else ANSWER_S):
                async with self.client.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
                    self._judge(answer.status, answer.headers, await answer.text(), stream)
        except TimeoutError:
            if not leaves:
                self.unanswered.append(f"nothing for {ANSWER_S:.0f} s")
            self.outcomes["left" if leaves else "unanswered"] += 1
        except aiohttp.ClientError as error:
            self.outcomes["connection lost"] += 1
            if loop.time() - self.worker_killed_at > 5.0 and began_at - self.worker_killed_at > 1.0:
                self.unanswered.append(f"{type(error).__name__} while no worker was killed")
            await asyncio.sleep(0.05)

    def _judge(self, status: int, headers: object, text: str, stream: bool) -> None:
        """One answer: whole, or a refusal with its reason, or a stream that says how it ended."""
        reason = getattr(headers, "get", dict[str, str]().get)("x-signalbox-reason", "")
        if status != 200:
            self.outcomes[f"{status} {reason}"] += 1
            if not reason or (status in {429, 503} and "retry-after" not in headers):  # type: ignore[operator]
                self.unanswered.append(f"{status} without its reason or retry-after: {text[:200]}")
            return
        whole = text.endswith("data: [DONE]\n\n") if stream else text.endswith("}")
        told = '"error"' in text
        self.outcomes["whole" if whole else "ended with an error event"] += 1
        if whole == told:
            self.unanswered.append(f"a stream that ends neither whole nor with an error: {text[-200:]!r}")


async def misfortune(soak: Soak, engines: list[Engine], store: Embedded, gateway: Running, ends_at: float) -> None:
    """Faults until the time is up, one at a time; each is over before the next."""
    loop = asyncio.get_running_loop()

    async def engine() -> None:
        victim = soak.dice.choice(engines)
        victim.kill()
        await asyncio.sleep(soak.dice.uniform(0.2, 1.5))
        victim.start()

    async def worker() -> None:
        soak.worker_killed_at = loop.time()
        soak.dice.choice(workers(gateway)).kill()

    async def store_killed() -> None:
        if store.pid is not None:
            os.kill(store.pid, signal.SIGKILL)

    async def store_stands() -> None:
        if (pid := store.pid) is not None:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(soak.dice.uniform(0.2, 3.5))
            os.kill(pid, signal.SIGCONT)

    kinds: dict[str, Callable[[], Awaitable[None]]] = {
        "engine killed": engine,
        "worker killed": worker,
        "store killed": store_killed,
        "store stood still": store_stands,
    }
    while loop.time() + PAUSE_S[1] < ends_at:
        await asyncio.sleep(soak.dice.uniform(*PAUSE_S))
        name = soak.dice.choice(list(kinds))
        await kinds[name]()
        soak.faults[name] += 1
        soak.memory_mib.append(gateway.memory_mib())


def workers(gateway: Running) -> list[psutil.Process]:
    return [one for one in psutil.Process(gateway.pid).children() if "gateway.workers" in one.cmdline()]


async def metrics(soak: Soak) -> dict[str, float]:
    """Sums over all labels, by name."""
    async with soak.client.get(f"{soak.url}/metrics", headers={"accept": "text/plain"}) as answer:
        text = await answer.text()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


ZERO = (
    "signalbox_ledger_leases",
    "signalbox_ledger_prefill_tokens",
    "signalbox_ledger_kv_tokens",
    "signalbox_queue_requests",
    "signalbox_live_requests",
    "signalbox_backend_streams",
    "signalbox_leaked_leases",
    "signalbox_leaked_streams_total",
)


async def settled(soak: Soak) -> dict[str, float]:
    """What is not zero when nothing is asked any more, after at most SETTLE_S."""
    loop = asyncio.get_running_loop()
    until = loop.time() + SETTLE_S
    while True:
        try:
            seen = await metrics(soak)
            left = {name: seen.get(name, float("nan")) for name in ZERO if seen.get(name) != 0}
        except aiohttp.ClientError as error:
            left = {str(error): 1.0}
        if not left or loop.time() > until:
            return left
        await asyncio.sleep(0.5)


def verdict(soak: Soak, left: dict[str, float], log: str) -> list[str]:
    """The bounds that were missed, in words."""
    missed = [f"{name} is {value:g}, not 0" for name, value in left.items()]
    missed += [f"{count} times: {what}" for what, count in Counter(soak.unanswered).most_common(10)]
    quarter = len(soak.memory_mib) // 4
    if quarter >= 2:
        early, late = (
            statistics.median(part) for part in (soak.memory_mib[quarter : 2 * quarter], soak.memory_mib[-quarter:])
        )
        print(f"memory: {early:.0f} MiB in the second quarter, {late:.0f} in the last")
        if late > GROWTH * early:
            missed.append(f"memory grew from {early:.0f} to {late:.0f} MiB")
    if "Traceback" in log or "IllegalStep" in log:
        missed.append(f"a traceback in the log: …{log[max(0, log.find('Traceback') - 300) :][:1500]}")
    if not soak.outcomes["whole"]:
        missed.append("no request was answered whole")
    return missed


async def soaked(minutes: float, seed: int, folder: Path) -> list[str]:
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        store = await Embedded.start()
        stack.push_async_callback(store.aclose)
        keeping = loop.create_task(store.keep())
        stack.callback(keeping.cancel)
        engines = [Engine(nth, folder) for nth in (1, 2)]
        for one in engines:
            stack.callback(one.stop)
        port, config = free_port(), folder / "config.toml"
        backends = "".join(BACKEND.format(nth=one.nth, port=one.port) for one in engines)
        config.write_text(CONFIG.format(port=port, store=store.url) + backends)
        argv = [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
        gateway = Running("gateway", argv, None, folder / "gateway.log")
        stack.callback(gateway.stop)
        await asyncio.to_thread(wait_for, gateway, lambda: "Signalbox serves" in gateway.said())
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        soak = Soak(f"http://127.0.0.1:{port}", random.Random(seed), client)
        ends_at = loop.time() + minutes * 60
        await asyncio.gather(soak.load(ends_at), misfortune(soak, engines, store, gateway, ends_at))
        left = await settled(soak)
        print(f"faults: {dict(soak.faults)}")
        print(f"answers: {dict(soak.outcomes.most_common())}")
        return verdict(soak, left, gateway.said())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="signalbox-soak-") as folder:
        try:
            missed = asyncio.run(soaked(args.minutes, args.seed, Path(folder)))
        except Failed as error:
            missed = [str(error)]
    for one in missed:
        print(f"MISSED: {one}")
    print("every bound holds" if not missed else f"{len(missed)} bounds missed")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
