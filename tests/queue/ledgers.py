"""Reads the store's keys and checks that everything in them follows from the tickets."""

from collections import Counter
from typing import Any

import msgspec

from tests.queue.procs import KEYS
from tests.support.store import StoreServer

WAITING, HELD = 1, 2
STATE, TENANT, RANK, POOL, PROMPT, _OUTPUT, KEY, _DEADLINE, _BACKENDS, _TPOT, _TOTAL, SLOT, PREFILL, KV = range(14)
B_NAME, B_OPEN, B_LIMIT = 0, 1, 2

decode = msgspec.msgpack.decode
Tickets = dict[tuple[str, int], list[Any]]


def tickets(server: StoreServer) -> Tickets:
    """All tickets by process and number; every owner must be a known process."""
    found: Tickets = {}
    known = {name.decode() for name in server("ZRANGE", KEYS.processes, 0, -1)}
    for key in server("KEYS", f"{KEYS.prefix}p:*:l"):
        process = key.decode().removeprefix(f"{KEYS.prefix}p:").removesuffix(":l")
        assert process in known, f"the tickets of {process} have no owner"
        raw = server("HGETALL", key)
        pairs = raw.items() if isinstance(raw, dict) else zip(raw[::2], raw[1::2], strict=True)
        found.update({(process, int(number)): decode(blob) for number, blob in pairs})
    return found


def backends(server: StoreServer, pool: str) -> dict[int, list[Any]]:
    """The backends of a pool by slot."""
    raw = server("HGETALL", KEYS.pool(pool))
    pairs = dict(raw) if isinstance(raw, dict) else dict(zip(raw[::2], raw[1::2], strict=True))
    return {int(f[1:]): decode(v, strict=False) for f, v in pairs.items() if f.startswith(b"b")}


def check_pool(server: StoreServer, pool: str, mine: Tickets) -> None:
    record = server("HGET", KEYS.pool(pool), "pool")
    if record is None:
        assert not [t for t in mine.values() if t[STATE] == WAITING]
        return
    _, _, _, waiting, opened, left, ranks, free = decode(record, strict=False)
    slots = backends(server, pool)
    sums: dict[int, list[int]] = {slot: [0, 0, 0] for slot in slots}
    for t in mine.values():
        if t[STATE] == HELD and t[SLOT]:
            sums[t[SLOT]] = [a + b for a, b in zip(sums[t[SLOT]], (1, t[PREFILL], t[KV]), strict=True)]
    assert {slot: b[6:9] for slot, b in slots.items()} == sums
    assert all(n >= 0 for ledger in sums.values() for n in ledger)
    room = {slot: max(0, b[B_LIMIT] - b[6]) if b[B_OPEN] == 1 else 0 for slot, b in slots.items()}
    assert {i + 1: n for i, n in enumerate(free) if n} == {slot: n for slot, n in room.items() if n}
    assert left == sum(room.values())
    assert opened == sum(b[B_OPEN] == 1 for b in slots.values())
    by_rank = Counter(t[RANK] for t in mine.values() if t[STATE] == WAITING)
    assert {i: n for i, n in enumerate(ranks) if n} == by_rank
    assert waiting == by_rank.total()


def check_lines(server: StoreServer, all_tickets: Tickets) -> None:
    """Queue members are the waiting tickets, and tenants are scored by their first."""
    expected: dict[str, dict[str, float]] = {}
    for (process, number), t in all_tickets.items():
        if t[STATE] == WAITING:
            line = expected.setdefault(KEYS.line(t[POOL], t[RANK], t[TENANT]), {})
            line[f"{process}:{number}|{t[PROMPT]}"] = t[KEY]
    tenants: dict[str, dict[str, float]] = {}
    for t in all_tickets.values():
        if t[STATE] == WAITING:
            scores = tenants.setdefault(KEYS.tenants(t[POOL], t[RANK]), {})
            scores[t[TENANT]] = min(t[KEY], scores.get(t[TENANT], t[KEY]))
    found = {
        key.decode(): {m.decode(): float(s) for m, s in server.scores(key)}
        for kind in "qw"
        for key in server("KEYS", f"{KEYS.prefix}{kind}:*")
    }
    assert found == {**expected, **tenants}


def check(server: StoreServer) -> Tickets:
    """Everything in the store follows from its tickets. -> the tickets."""
    found = tickets(server)
    pools = {name.decode() for name in server("SMEMBERS", f"{KEYS.prefix}pools")}
    for pool in pools:
        check_pool(server, pool, {k: t for k, t in found.items() if t[POOL] == pool})
    check_lines(server, found)
    return found
