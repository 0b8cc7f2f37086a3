"""`signalbox check`: is everything that the configuration names really there, and what is it?"""

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from backends.bundle import Bundle
from backends.protocol import BackendBusy, BackendError, BackendLost, Refused
from gateway.config import IN_PROCESS, Config, Engine
from gateway.pool import Pool
from gateway.queue.advice import Advice, advise
from gateway.queue.channel import GONE, Address, StoreAway, StoreUnfit, ask
from gateway.queue.client import Store
from gateway.queue.embedded import Embedded, find_server
from gateway.queue.link import check_server, facts_of
from gateway.queue.target import Target
from gateway.queue.urls import shown
from gateway.reaper import Reaper

REMOTE_S = 10.0
IN_PROCESS_S = 900.0
"""How long an engine may take to connect: one in this process loads its weights first."""

HEAD = ("pool", "backend", "kind", "engine", "runs", "context", "running", "KV tokens", "prefill/s")


class Finding(Struct, frozen=True):
    """One line of the answer. `trouble` empty means well."""

    cells: tuple[str, ...]
    trouble: str = ""


async def checkup(config: Config) -> tuple[str, bool]:
    """A table of what is there, and whether all of it is well. Engines of one process come up one after the other."""
    store = await look_at_store(config.store)
    findings = [await look_at(pool.model, engine) for pool in config.pools for engine in pool.backends]
    counts = f"{len(config.pools)} pools, {len(config.classes)} classes, {len(config.tenants) or 'no'} tenants"
    lines = [f"configuration  {counts}", f"store          {' '.join(store.cells)}{_trouble(store)}", ""]
    lines += _table([HEAD, *(one.cells for one in findings)], ["", *map(_trouble, findings)])
    return "\n".join(lines), not any(one.trouble for one in (store, *findings))


async def look_at_store(store: Store) -> Finding:
    """Reach the store as a gateway would and read its version. Nothing is written to it."""
    embedded: Embedded | None = None
    try:
        embedded = await Embedded.start() if store.url == "embedded" else None
        async with asyncio.timeout(REMOTE_S):
            facts, address, advice = await _look(store.target(embedded))
        check_server(facts)
        if store.on_loss == "local":
            await find_server()
    except TimeoutError:
        return Finding((shown(store.url),), f"did not answer within {REMOTE_S:.0f} s")
    except (StoreAway, StoreUnfit, *GONE) as error:
        return Finding((shown(store.url),), str(error))
    finally:
        if embedded is not None:
            await embedded.aclose()
    kind = "valkey" if "valkey_version" in facts else "redis"
    said = (shown(store.url), f"{kind} {facts[f'{kind}_version']}")
    return Finding(said if embedded else (*said, f"at {address}\n               {advice.text}"))


async def _look(target: Target) -> tuple[dict[str, str], Address, Advice]:
    try:
        channel = await target.open()
        try:
            facts = facts_of(await ask(channel, "INFO"))
            return facts, channel.address, await advise(channel, facts, target.kind)
        finally:
            channel.close()
    finally:
        await target.aclose()


async def look_at(model: str, engine: Engine) -> Finding:
    """Connect one engine as a gateway would, read what it is, let it go."""
    name = (model, engine.name, str(engine.__struct_config__.tag))
    limit_s = IN_PROCESS_S if isinstance(engine, IN_PROCESS) else REMOTE_S
    pool = Pool(model, (engine,), Reaper())
    try:
        async with asyncio.timeout(limit_s):
            backend = await engine.connect(model)
    except TimeoutError:
        return Finding(name, f"did not connect within {limit_s:.0f} s")
    except (BackendLost, BackendError, BackendBusy, Refused, OSError, ValueError) as error:
        return Finding(name, str(error))
    pool.members[0].backend = backend
    bundle, share = backend.bundle, pool.share().backends[0]
    await backend.aclose()
    numbers = (bundle.context_tokens, share.max_running, share.kv_tokens, share.prefill_tokens_per_s)
    return Finding((*name, f"{bundle.engine} {bundle.engine_version}".strip(), _runs(bundle), *map(_number, numbers)))


def _runs(bundle: Bundle) -> str:
    said = (bundle.model, bundle.revision, bundle.precision, bundle.quantization)
    return " ".join(filter(None, said))


def _number(value: int) -> str:
    return f"{value:,}" if value else "not said"


def _trouble(finding: Finding) -> str:
    return f"  NOT WELL: {finding.trouble}" if finding.trouble else ""


def _table(rows: Sequence[tuple[str, ...]], tails: Sequence[str]) -> list[str]:
    widths = [max((len(row[at]) for row in rows if at < len(row)), default=0) for at in range(len(HEAD))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in rows)
    return [(line + tail).rstrip() for line, tail in zip(lines, tails, strict=True)]
