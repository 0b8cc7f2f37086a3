"""Reads the store's keys and checks that everything in them follows from the tickets."""

import math
from collections import Counter, defaultdict
from typing import Any

import msgspec

from tests.queue.procs import KEYS
from tests.support.store import StoreServer

WAITING, HELD = 1, 2
STATE, TENANT, RANK, POOL, PROMPT, OUTPUT, KEY, _DEADLINE, _BACKENDS, TPOT, _TOTAL, SLOT, PREFILL, KV = range(14)
UNCACHED, _VARIANCE, _HIGH, PREFILL_PRICE, OUTPUT_PRICE, SPREAD, FLIGHT, _BILL, PASSED = range(14, 23)
B_NAME, B_OPEN, B_LIMIT, _RATE, B_KV_LIMIT, B_CHUNK = range(6)
B_RUNNING, B_PREFILL, B_KV, B_SPREAD, B_PROMPTS, B_TPOTS = range(6, 12)
LEDGERS = slice(6, 11)
A_COUNTER, A_WAITING, A_TOKENS, A_WEIGHT, A_LEASES, A_PARKED, A_BACK, A_CREDIT = range(8)
WINDOW_SLOTS = 13

decode = msgspec.msgpack.decode
Tickets = dict[tuple[str, int], list[Any]]
Accounts = dict[tuple[int, str], list[int]]


def _pairs(raw: Any) -> dict[bytes, bytes]:
    return dict(raw) if isinstance(raw, dict) else dict(zip(raw[::2], raw[1::2], strict=True))


def tickets(server: StoreServer) -> Tickets:
    """All tickets by process and number; every owner must be a known process."""
    found: Tickets = {}
    known = {name.decode() for name in server("ZRANGE", KEYS.processes, 0, -1)}
    for key in server("KEYS", f"{KEYS.prefix}p:*:l"):
        process = key.decode().removeprefix(f"{KEYS.prefix}p:").removesuffix(":l")
        assert process in known, f"the tickets of {process} have no owner"
        found.update({(process, int(n)): decode(blob) for n, blob in _pairs(server("HGETALL", key)).items()})
    return found


def backends(server: StoreServer, pool: str) -> dict[int, list[Any]]:
    """The backends of a pool by slot."""
    fields = _pairs(server("HGETALL", KEYS.pool(pool)))
    return {int(f[1:]): decode(v, strict=False) for f, v in fields.items() if f.startswith(b"b")}


def accounts(server: StoreServer, pool: str) -> Accounts:
    """The accounts of a pool by rank and tenant."""
    found = {}
    for field, blob in _pairs(server("HGETALL", KEYS.accounts(pool))).items():
        rank, _, tenant = field.decode().partition(":")
        found[int(rank), tenant] = decode(blob)
    return found


def classes(server: StoreServer, pool: str) -> dict[int, list[Any]]:
    """The classes of a pool that were ever used, by rank: waiting, tokens, virtual time, debt, backlogs, waits."""
    record = server("HGET", KEYS.pool(pool), "pool")
    return {i: c for i, c in enumerate(decode(record, strict=False)[9]) if c} if record else {}


def limits(server: StoreServer) -> dict[str, list[Any]]:
    """Tenants' records: four limits, tokens in flight, waiting, window, promise, need, parked."""
    return {name.decode(): decode(blob) for name, blob in _pairs(server("HGETALL", KEYS.limits)).items()}


def check_backends(found: dict[int, list[Any]], mine: Tickets) -> None:
    sums = {slot: [0] * 5 for slot in found}
    paces: dict[int, Counter[int]] = {slot: Counter() for slot in found}
    for t in mine.values():
        if t[STATE] == HELD and t[SLOT]:
            parts = (1, t[PREFILL], t[KV], t[SPREAD], t[PROMPT])
            sums[t[SLOT]] = [a + b for a, b in zip(sums[t[SLOT]], parts, strict=True)]
            paces[t[SLOT]][t[TPOT]] += t[TPOT] > 0
    assert {slot: b[LEDGERS] for slot, b in found.items()} == sums
    assert all(n >= 0 for ledger in sums.values() for n in ledger)
    for slot, b in found.items():
        assert dict(zip(b[B_TPOTS][::2], b[B_TPOTS][1::2], strict=True)) == dict(+paces[slot])


def window(b: list[Any]) -> float:
    """Prompt tokens that a backend with a place free would still take."""
    left = 2 * b[B_CHUNK] - b[B_PREFILL] if b[B_CHUNK] and b[B_PREFILL] else math.inf
    return left if room(b) else -1


def room(b: list[Any]) -> int:
    """What a pool's record should say of a backend."""
    if b[B_OPEN] != 1 or b[B_RUNNING] >= b[B_LIMIT] or (b[B_CHUNK] and b[B_PREFILL] >= 2 * b[B_CHUNK]):
        return 0
    kv = b[B_KV] / b[B_KV_LIMIT] if b[B_KV_LIMIT] and b[B_RUNNING] else 0.0
    return 0 if kv >= 0.95 else 1 + int(1000 * max(b[B_RUNNING] / b[B_LIMIT], kv))


def check_pool(server: StoreServer, pool: str, mine: Tickets) -> None:
    record = server("HGET", KEYS.pool(pool), "pool")
    if record is None:
        assert not [t for t in mine.values() if t[STATE] == WAITING]
        return
    _, _, _, waiting, opened, left, _, sums, rooms, *_ = decode(record, strict=False)
    slots = backends(server, pool)
    check_backends(slots, mine)
    expected = {slot: room(b) for slot, b in slots.items()}
    assert {i + 1: n for i, n in enumerate(rooms) if n} == {slot: n for slot, n in expected.items() if n}
    assert left == sum(n > 0 for n in expected.values())
    open_ones = [b for b in slots.values() if b[B_OPEN] == 1]
    assert opened == len(open_ones)
    columns = (B_LIMIT, B_RUNNING, B_PREFILL, B_KV, B_KV_LIMIT)
    assert sums[:6] == [len(open_ones), *(sum(b[i] for b in open_ones) for i in columns)]
    check_accounts(server, pool, mine)
    by_rank = Counter(t[RANK] for t in mine.values() if t[STATE] == WAITING)
    tokens = Counter[int]()
    for t in mine.values():
        tokens[t[RANK]] += t[UNCACHED] * (t[STATE] == WAITING)
    for rank, (n, n_tokens, _, debt, backlogs, waits) in classes(server, pool).items():
        check_waits(waits)
        assert (n, n_tokens) == (by_rank.pop(rank, 0), tokens[rank])
        assert n or (debt <= 0 and not backlogs)
        parts = backlogs.values() if isinstance(backlogs, dict) else backlogs
        held = [a for (r, _), a in accounts(server, pool).items() if r == rank and a[A_TOKENS]]
        expected_sums = [sum(a[A_TOKENS] for a in held), sum(a[A_WEIGHT] for a in held), len(held)]
        assert [sum(part[i] for part in parts) for i in range(3)] == expected_sums
    assert not by_rank
    assert waiting == sum(t[STATE] == WAITING for t in mine.values())


def check_waits(waits: list[int]) -> None:
    """What a class's waits were, and how much it sheds: nothing but after late ones."""
    since, left, late, level, spread, every, pace = waits
    assert 0 <= late <= left
    assert 0 <= level <= 950
    assert 0 <= spread < 1000
    assert since >= 0
    assert every >= 1000
    assert pace >= 0
    assert all(n == int(n) for n in waits)


def check_accounts(server: StoreServer, pool: str, mine: Tickets) -> None:
    expected: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for t in mine.values():
        one = expected[t[RANK], t[TENANT]]
        if t[STATE] == WAITING:
            one[0] += 1
            one[1] += t[UNCACHED]
        elif t[PASSED] >= 0:
            one[2] += 1
    found = accounts(server, pool)
    assert {k: [a[A_WAITING], a[A_TOKENS], a[A_LEASES]] for k, a in found.items() if a[A_WAITING] or a[A_LEASES]} == {
        k: v for k, v in expected.items() if v[0] or v[2]
    }
    assert all(min(a[A_COUNTER], a[A_BACK], a[A_CREDIT]) >= 0 for a in found.values())


def check_limits(server: StoreServer, found: Tickets) -> None:
    for name, record in limits(server).items():
        _, _, most_flight, _, flight, queued, _, used, spent, *_ = record
        own = [t for t in found.values() if t[TENANT] == name and t[FLIGHT] >= 0]
        assert flight == sum(t[FLIGHT] for t in own if t[STATE] == HELD)
        assert queued == sum(t[STATE] == WAITING for t in own)
        assert all(n >= 0 for n in (*used, *spent))
        assert len(used) in (0, WINDOW_SLOTS)
        parked = {(pool, rank) for pool, rank in record[-1]}
        marked = {
            (pool.decode(), rank)
            for pool in server("SMEMBERS", f"{KEYS.prefix}pools")
            for (rank, tenant), a in accounts(server, pool.decode()).items()
            if tenant == name and a[A_PARKED]
        }
        assert parked == marked
        assert not parked or most_flight


def check_lines(server: StoreServer, all_tickets: Tickets) -> None:
    """Queue members are the waiting tickets; tenants that are not at their cap are scored by their counters."""
    expected: dict[str, dict[str, float]] = {}
    for (process, number), t in all_tickets.items():
        if t[STATE] != WAITING:
            continue
        line = expected.setdefault(KEYS.line(t[POOL], t[RANK], t[TENANT]), {})
        line[f"{process}:{number}|{t[UNCACHED]}"] = t[KEY]
        account = accounts(server, t[POOL])[t[RANK], t[TENANT]]
        if not account[A_PARKED]:
            expected.setdefault(KEYS.tenants(t[POOL], t[RANK]), {})[t[TENANT]] = account[A_COUNTER]
    found = {
        key.decode(): {m.decode(): float(s) for m, s in server.scores(key)}
        for kind in "qw"
        for key in server("KEYS", f"{KEYS.prefix}{kind}:*")
    }
    assert found == expected


def check(server: StoreServer) -> Tickets:
    """Everything in the store follows from its tickets. -> the tickets."""
    found = tickets(server)
    for name in server("SMEMBERS", f"{KEYS.prefix}pools"):
        pool = name.decode()
        check_pool(server, pool, {k: t for k, t in found.items() if t[POOL] == pool})
    check_limits(server, found)
    check_lines(server, found)
    return found
