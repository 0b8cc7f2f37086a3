"""Two gateway processes on one store, in front of one scripted engine that runs in the test's own loop."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from gateway.tenants import hash_key
from tests.support.process import Gateway
from tests.support.upstream import Upstream

WEIGHTS = {"a": 1, "b": 2, "c": 4}
"""Tenants; their keys are `sk-` and their name."""


def _configuration(store: str, engine: str, limit: int) -> str:
    tenants = "".join(
        f'[[tenant]]\nname = "{name}"\nweight = {weight}\nkeys = ["{hash_key("sk-" + name)}"]\n'
        for name, weight in WEIGHTS.items()
    )
    return f"""
[store]
url = "{store}"
{tenants}
[[pool]]
model = "demo"
[[pool.backend]]
kind = "openai"
name = "one"
url = "{engine}"
limits = {{ max_running = {limit}, kv_tokens = 1000000000, chunk_tokens = 1000000 }}
"""


REFUSALS = {429, 503}


class Fleet:
    """`answers` has (status, reason) of every request by its tag; a lost connection is (0, "")."""

    def __init__(self, gateways: list[Gateway], engine: Upstream, client: aiohttp.ClientSession) -> None:
        self.gateways, self.engine, self.client = gateways, engine, client
        self.answers: dict[str, tuple[int, str]] = {}

    async def ask(self, gateway: Gateway, tag: str, tenant: str = "a", rank: str = "standard") -> tuple[int, str]:
        """One streamed request, read to its end. A whole answer is (200, "whole")."""
        body = {"model": "demo", "messages": [{"role": "user", "content": tag}], "stream": True, "max_tokens": 2}
        headers = {"authorization": f"Bearer sk-{tenant}", "x-priority-class": rank}
        url = f"{gateway.url}/v1/chat/completions"
        try:
            async with self.client.post(url, json=body, headers=headers) as answer:
                text = await answer.text()
                whole = "whole" if text.rstrip().endswith("[DONE]") else "broken"
                said = answer.headers.get("x-signalbox-reason", whole if answer.status == 200 else "")
                self.answers[tag] = (answer.status, said)
        except aiohttp.ClientError:
            self.answers[tag] = (0, "")
        return self.answers[tag]

    @asynccontextmanager
    async def load(self, clients: int) -> AsyncIterator["Load"]:
        """Clients that ask either gateway, one request after the other, until this ends; then they finish."""
        load = Load(self)
        async with asyncio.TaskGroup() as group:
            for nth in range(clients):
                group.create_task(load.client(nth))
            try:
                yield load
            finally:
                load.over = True

    def served(self) -> list[str]:
        """Tags in the order in which the engine heard of them."""
        return [seen.json()["messages"][0]["content"] for seen in self.engine.generations]

    def nothing_lost_or_doubled(self) -> None:
        """Each request had one answer; a whole one ran once, and what was refused never did."""
        ran = Counter(self.served())
        for tag, (status, said) in self.answers.items():
            assert (status, said) == (200, "whole") or status in REFUSALS, (tag, status, said)
            assert ran[tag] == (status == 200), (tag, status, said)
        assert sum(ran.values()) == sum(status == 200 for status, _ in self.answers.values())


class Load:
    """A closed loop over both gateways and all tenants."""

    def __init__(self, site: Fleet) -> None:
        self.over = False
        self._site = site
        self._numbers = itertools.count()

    async def client(self, nth: int) -> None:
        tenants = list(WEIGHTS)
        while not self.over:
            gateway = self._site.gateways[nth % 2]
            status, _ = await self._site.ask(gateway, f"load {next(self._numbers)}", tenants[nth % len(tenants)])
            await asyncio.sleep(0.0 if status == 200 else 0.05)

    async def goes_on(self, more: int, limit_s: float = 20.0) -> None:
        """Until the engine has heard of so many more requests."""
        wanted = len(self._site.engine.generations) + more
        await until(lambda: len(self._site.engine.generations) >= wanted, limit_s)


@asynccontextmanager
async def fleet(store: str, directory: Path, limit: int) -> AsyncIterator[Fleet]:
    """Both gateways ready, and everything gone at the end."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Upstream("demo"))
        file = directory / "fleet.toml"
        file.write_text(_configuration(store, engine.url, limit))
        gateways = []
        for name in ("one", "two"):
            (directory / name).mkdir()
            gateways.append(Gateway(["--config", str(file)], directory / name))
            stack.callback(_kill, gateways[-1].process)
        for gateway in gateways:
            await asyncio.to_thread(gateway.ready)
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=60)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        yield Fleet(gateways, engine, client)


def _kill(process: psutil.Popen) -> None:
    if process.is_running():
        process.kill()
    process.wait(20)


async def until(condition: Callable[[], Any], limit_s: float = 20.0) -> None:
    """Wait for a condition that asks servers."""
    async with asyncio.timeout(limit_s):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)
