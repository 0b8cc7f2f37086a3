"""Scripted upstreams as processes of their own, to be killed, and the configuration of a pool of them."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from tests.support.upstream_frames import Script

ROOT = Path(__file__).parent.parent.parent


class Engine:
    """One upstream process that serves `demo`. Says `name` in every token."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, url: str) -> None:
        self.name, self.process, self.url = name, process, url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def tell(self, script: Script) -> None:
        """How its generations go from now on."""
        script.chunk = self.name
        body = msgspec.json.encode(script)
        async with aiohttp.ClientSession() as client, client.post(f"{self.url}/_script", data=body) as answer:
            assert answer.status == 200

    async def running(self) -> int:
        async with aiohttp.ClientSession() as client, client.get(f"{self.url}/_stats") as answer:
            stats: dict[str, int] = await answer.json()
            return stats["running"]

    async def until_running(self, number: int) -> None:
        async with asyncio.timeout(10):
            while await self.running() != number:
                await asyncio.sleep(0.01)

    async def kill(self) -> None:
        """`kill -9`, and wait for its end."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def engine(name: str, itl_s: float = 0.01, port: int = 0) -> AsyncIterator[Engine]:
    """A running upstream process; killed at the end if nobody did before."""
    command = (sys.executable, "-m", "tests.support.upstream", "--model", "demo", "--itl", str(itl_s))
    process = await asyncio.create_subprocess_exec(
        *command, "--port", str(port), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            url = (await process.stdout.readline()).decode().strip()
        one = Engine(name, process, url)
        await one.tell(Script())
        yield one
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def pool(*urls: str, more: str = "") -> str:
    """A pool `demo` of remote servers, named a, b, c. `more` goes into each backend."""
    backends = [
        f'[[pool.backend]]\nkind = "openai"\nname = "{"abc"[nth]}"\nmodel = "demo"\nurl = "{url}"\n{more}'
        for nth, url in enumerate(urls)
    ]
    return "\n".join(['[[pool]]\nmodel = "demo"', *backends])
