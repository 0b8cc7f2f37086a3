"""A gateway in which nothing changes while it is watched: two streams held by their engine, three requests waiting."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from gateway.config import Config, PoolConfig, TenantConfig, decode
from gateway.telemetry.snapshot import Snapshot
from gateway.tenants import hash_key
from policies.lifecycle import State
from policies.types import ServiceClass
from tests.support.quiet import zero
from tests.support.site import Site, running
from tests.support.upstream import Upstream
from tests.support.upstream_frames import Script

ADMIN = {"authorization": "Bearer admin"}
SECRET = "a-secret-prompt"
HOSTILE = "<img/src=x/onerror=document.title='owned'>"
"""As a name of everything that may have any; tenants' names are checked, and this one comes past the check."""

TOML = f"""
[server]
admin_keys = ["{hash_key("admin")}"]
[[tenant]]
name = "alice"
keys = ["{hash_key("sk-alice")}"]
[[tenant]]
name = "bob"
keys = ["{hash_key("sk-bob")}"]
[[pool]]
model = "demo"
[[pool.backend]]
kind = "openai"
name = "one"
url = "URL"
limits = {{ max_running = 2, kv_tokens = 100000, chunk_tokens = 100000 }}
"""


def hostile(config: Config) -> Config:
    """The same with names that are meant to be markup."""
    (pool,) = config.pools
    backends = tuple(msgspec.structs.replace(one, name=HOSTILE) for one in pool.backends)
    alice, bob = config.tenants
    classes = (*config.classes, ServiceClass(name=HOSTILE, rank=9))
    return msgspec.structs.replace(
        config,
        pools=(PoolConfig(model=HOSTILE, aliases=("demo",), backends=backends),),
        tenants=(alice, TenantConfig(name=HOSTILE, keys=bob.keys)),
        classes=classes,
    )


class Watched:
    """`site` is the gateway. What it holds: five live requests of two tenants, four ended well, two refused."""

    def __init__(self, site: Site, engine: Upstream) -> None:
        self.site, self.engine = site, engine

    async def ask(self, tenant: str = "alice", request_id: str = "", **fields: Any) -> int:
        """One streamed request, read to its end; its status."""
        headers = {"authorization": f"Bearer sk-{tenant}"} | ({"x-request-id": request_id} if request_id else {})
        async with self.site.chat(SECRET, headers=headers, **{"stream": True, "max_tokens": 3} | fields) as answer:
            await answer.read()
            return int(answer.status)

    def states(self) -> list[State]:
        return [one.state for one in self.site.live()]

    @asynccontextmanager
    async def feed(self, url: str = "") -> AsyncIterator["Viewer"]:
        """A viewer on a connection of its own."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as client,
            client.get(f"{url or self.site.url}/console/feed", headers=ADMIN) as answer,
        ):
            yield Viewer(answer)


class Viewer:
    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer

    async def text(self) -> bytes:
        """The next event's data; empty at the end of the stream."""
        line = await self.answer.content.readuntil(b"\n\n")
        assert not line or (line.startswith(b"data: ") and line.endswith(b"\n\n"))
        return line[6:-2]

    async def next(self) -> Snapshot:
        return msgspec.json.decode(await self.text(), type=Snapshot)

    async def until(self, condition: Any) -> Snapshot:
        """The first snapshot for which it holds."""
        async with asyncio.timeout(20):
            while not condition(seen := await self.next()):
                pass
        return seen


@asynccontextmanager
async def watched(names: Any = lambda config: config) -> AsyncIterator[Watched]:
    """`names` may change the configuration. At the end everything runs to its end."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Upstream("demo", HOSTILE))
        site = await stack.enter_async_context(running(names(decode(TOML.replace("URL", engine.url).encode()))))
        one = Watched(site, engine)
        for _ in range(4):
            assert await one.ask() == 200
        assert await one.ask(model="unknown") == 404
        assert await one.ask(tenant="nobody") == 401
        engine.script = Script(hold_at=1)
        held = [asyncio.create_task(one.ask(request_id=f"{HOSTILE}{nth}")) for nth in range(2)]
        try:
            await site.until(lambda: one.states() == [State.STREAMING] * 2)
            held += [asyncio.create_task(one.ask("bob")) for _ in range(3)]
            await site.until(lambda: one.states().count(State.QUEUED) == 3)
            yield one
        finally:
            engine.release()
            assert await asyncio.gather(*held) == [200] * len(held)
        await zero(site)


def metrics(text: str) -> dict[str, float]:
    """Samples of `/metrics` as they stand there: name and labels, and value."""
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def sample(name: str, **labels: str) -> str:
    """The key of a sample in `metrics`."""
    written = ",".join(f"{label}={json.dumps(value)}" for label, value in sorted(labels.items()))
    return f"{name}{{{written}}}" if written else name
