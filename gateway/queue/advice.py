"""One line of advice on a store of the operator's own: what of it outlasts a crash, and what would make it better."""

from collections.abc import Mapping

import redis.exceptions
from msgspec import Struct

from gateway.queue.channel import Channel, ask

SETTINGS = ("appendonly", "appendfsync", "maxmemory-policy", "min-replicas-to-write")


class Advice(Struct, frozen=True):
    """`well`: nothing to be done."""

    text: str
    well: bool


async def advise(channel: Channel, facts: Mapping[str, str], kind: str) -> Advice:
    """From the server's settings, or from INFO (`facts`) where they may not be read. Raises one of GONE.

    `kind` is that of the URL: `server`, `sentinel` or `cluster`.
    """
    try:
        flat: list[bytes] = await ask(channel, "CONFIG", "GET", *SETTINGS)
    except redis.exceptions.ResponseError:  # managed stores keep CONFIG to themselves
        flat = []
    found = {name.decode(): value.decode() for name, value in zip(flat[::2], flat[1::2], strict=True)}
    found.setdefault("appendonly", "yes" if facts.get("aof_enabled") == "1" else "no")
    found.setdefault("maxmemory-policy", facts.get("maxmemory_policy", "unknown"))
    wrongs = _wrongs(found, kind, int(facts.get("connected_slaves", "0")))
    said = ", ".join(f"{name} {found[name]}" for name in SETTINGS[:3] if name in found)
    hidden = "" if flat else " (CONFIG GET is not permitted: appendfsync unknown)"
    return Advice(f"{said}{hidden}: {'; '.join(wrongs) or 'as it should be'}", not wrongs)


def _wrongs(found: Mapping[str, str], kind: str, replicas: int) -> list[str]:
    wrongs = []
    if found["appendonly"] != "yes":
        wrongs.append(
            "a crash of the store forgets quotas of the minute, fairness between tenants, and tenants and keys made at "
            "run time; set appendonly yes and appendfsync everysec (leases and queued requests come back without it)"
        )
    elif found.get("appendfsync") == "always":
        wrongs.append("every turn waits for the disk; appendfsync everysec is enough")
    elif found.get("appendfsync") == "no":
        wrongs.append("a crash of the host may lose half a minute; set appendfsync everysec")
    if found["maxmemory-policy"] != "noeviction":
        wrongs.append("an evicted key is a broken ledger; set maxmemory-policy noeviction")
    if kind == "sentinel" and replicas > 1 and found.get("min-replicas-to-write") == "0":
        wrongs.append("a primary that is cut off goes on beside its successor; set min-replicas-to-write 1")
    return wrongs
