"""What a gateway holds for requests, here and in the store: nothing, once they have ended."""

import asyncio
import contextlib

import msgspec

from backends.protocol import BackendLost
from gateway.queue.channel import ask
from gateway.queue.keys import Keys
from gateway.queue.target import Target
from tests.support.site import Site

LEDGERS = slice(6, 9)
"""Running, prefill tokens and KV tokens in a backend's record, as `lua/state.lua` numbers them (from 1 there)."""

WAITING = 3
"""The number of waiting tickets in a pool's record."""

STEP_S = 0.002


async def stored(site: Site) -> dict[str, list[int]]:
    """What the store has: ledgers by `pool/slot`, what waits by `pool`, and this process's `tickets`."""
    queue, settings, out = site.trunk.queue, site.trunk.config.store, {}
    keys = Keys(settings.namespace)
    url = queue._embedded.url if queue._embedded else settings.url
    channel = await Target(url, settings.namespace).open()
    try:
        for pool in site.trunk.pools:
            fields: list[bytes] = await ask(channel, "HGETALL", keys.pool(pool))
            for name, value in zip(fields[::2], fields[1::2], strict=True):
                record = msgspec.msgpack.decode(value)
                if name == b"pool":
                    out[pool] = [record[WAITING]]
                elif name != b"names":
                    out[f"{pool}/{name.decode()}"] = record[LEDGERS]
        out["tickets"] = [await ask(channel, "HLEN", keys.tickets(queue.session.name))]
    finally:
        channel.close()
    return out


def held(site: Site) -> list[str]:
    """What this process holds for requests, in words."""
    trunk = site.trunk
    found = [repr(one) for one in trunk.ticker.members()]
    found += [repr(place) for place in (*trunk.queue.book.waiting.values(), *trunk.queue.book.held.values())]
    found += [repr(member) for member in trunk.members() if member.running]
    if len(trunk.reaper) or trunk.reaper.failed:
        found.append(repr(trunk.reaper))
    return found


async def engines(site: Site) -> int:
    """How many generations run or wait in the engines, as they say themselves. A dead engine runs nothing."""
    total = 0
    for member in site.trunk.members():
        if member.backend is not None:
            with contextlib.suppress(BackendLost):
                gauge = await member.backend.gauge()
                total += (gauge.running or 0) + (gauge.waiting or 0)
    return total


async def quiet(site: Site, within_s: float = 5.0) -> None:
    """Wait until nothing is held anywhere; fails with what still is.

    The limit is of time in which this process could run: what a busy machine takes away does not count.
    """
    left = within_s
    loop = asyncio.get_running_loop()
    while found := held(site) or (["generations in engines"] if await engines(site) else []):
        assert left > 0, f"still held: {found}"
        before = loop.time()
        await asyncio.sleep(STEP_S)
        left -= min(loop.time() - before, 3 * STEP_S)


async def zero(site: Site, within_s: float = 5.0) -> None:
    """Wait until nothing is held anywhere, the store's ledgers included."""
    await quiet(site, within_s)
    async with asyncio.timeout(within_s):
        found = await stored(site)
        while len(found) == 1 or any(any(values) for values in found.values()):  # it is told of the pools at the start
            await asyncio.sleep(0.01)
            found = await stored(site)
