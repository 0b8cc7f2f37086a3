"""What is asked of a simulated site: tenants, their traces, and the arrivals that a seed makes of them.

Lengths are those of real traces (`bench/data`). A fit uses the first 60 % of a trace's rows, a report the last 40 %.
Arrivals are drawn at a rate of one and then scaled, so that a seed gives the same requests in the same order at every
load.
"""

import csv
import functools
import gzip
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct

from policies.types import Objective

DATA = Path(__file__).with_name("data")
FIT = 0.6  # of a trace's rows are for tuning, the rest for reporting
LONGEST_PROMPT = 8192  # tokens: the context of the model that is simulated, less its answers
MOONCAKE_GRID_MS = 3000  # its arrivals lie on this grid

Part = Literal["fit", "report"]
TRACES = {
    "conv": "azure2023_conv.csv.gz",
    "code": "azure2023_code.csv.gz",
    "sharegpt": "sharegpt_8k_lengths.csv.gz",
    "bwb": "bwb_lengths.csv.gz",
    "mooncake": "mooncake_conversation.csv.gz",
}


class Row(NamedTuple):
    """One request of a trace. `arrival_ms` is -1 in traces of lengths only."""

    arrival_ms: int
    prompt_tokens: int
    output_tokens: int


class Tenant(Struct, frozen=True, kw_only=True):
    """One tenant and its traffic.

    `share` is its part of the site's request rate (shares need not add up to 1). `cv` is the coefficient of variation
    of Gamma gaps between arrivals, 0 for the trace's own clock. `leave` of its clients go before the end.
    `tokens_per_minute` 0 is no quota.
    """

    name: str
    trace: str
    share: float
    objective: Objective
    cv: float = 1.0
    max_tokens: int = 1024
    weight: float = 1
    rank: int = 1
    leave: float = 0.0
    tokens_per_minute: int = 0

    def __post_init__(self) -> None:
        if self.trace not in TRACES:
            raise ValueError(f"trace: one of {', '.join(TRACES)}, not {self.trace!r}")
        if self.share <= 0 or self.cv < 0 or not 0 <= self.leave <= 1:
            raise ValueError(f"tenant {self.name}: share must be above 0, cv at least 0, leave from 0 to 1")


class Arrival(NamedTuple):
    """One request to come. `output_tokens` is the truth, which no decision may read; `leave_ms` after the arrival the
    client goes, inf for never. `max_tokens` 0 is the limit that its tenant names."""

    at_ms: float
    tenant: Tenant
    prompt_tokens: int
    output_tokens: int
    leave_ms: float
    max_tokens: int = 0


@functools.cache
def rows(trace: str, part: Part, max_tokens: int) -> tuple[Row, ...]:
    """The rows of a part of a trace that fit the model, answers cut at `max_tokens` and at least one token long."""
    with gzip.open(DATA / TRACES[trace], "rt", encoding="utf-8", newline="") as file:
        found = [_row(line, max_tokens) for line in csv.DictReader(file)]
    cut = int(FIT * len(found))
    wanted = found[:cut] if part == "fit" else found[cut:]
    return tuple(row for row in wanted if 0 < row.prompt_tokens <= LONGEST_PROMPT)


def _row(line: dict[str, str], max_tokens: int) -> Row:
    output = min(max(1, int(line["output_tokens"])), max_tokens)
    return Row(int(line.get("arrival_ms", -1)), int(line["input_tokens"]), output)


def arrivals(tenants: Sequence[Tenant], rate: float, requests: int, seed: int, part: Part = "report") -> list[Arrival]:
    """About `requests` arrivals at `rate` per second in all, in order. The span is `requests / rate` seconds."""
    if rate <= 0 or requests < 1:
        raise ValueError(f"rate must be above 0 and requests at least 1: {rate}, {requests}")
    if len({tenant.name for tenant in tenants}) < len(tenants):
        raise ValueError("tenants: two have the same name")
    whole = sum(tenant.share for tenant in tenants)
    found = []
    for tenant in tenants:
        rng = random.Random(f"{seed}/{part}/{tenant.name}")
        some = rows(tenant.trace, part, tenant.max_tokens)
        source = _drawn(tenant, some, rng) if tenant.cv else _replayed(tenant, some, rng)
        for at, row in source:
            units = at / (tenant.share / whole)
            if units > requests:
                break
            found.append(
                Arrival(units * 1000 / rate, tenant, row.prompt_tokens, row.output_tokens, _leaving(tenant, row, rng))
            )
    found.sort(key=lambda one: (one.at_ms, one.tenant.name))
    return found


def _drawn(tenant: Tenant, some: Sequence[Row], rng: random.Random) -> Iterator[tuple[float, Row]]:
    """Rows at random with Gamma gaps of mean one."""
    shape = 1 / tenant.cv**2
    at = 0.0
    while True:
        at += rng.gammavariate(shape, 1 / shape)
        yield at, some[rng.randrange(len(some))]


def _replayed(tenant: Tenant, some: Sequence[Row], rng: random.Random) -> Iterator[tuple[float, Row]]:
    """The trace's own order and clock, brought to a mean rate of one, from a random row on and round again."""
    if some[0].arrival_ms < 0:
        raise ValueError(f"tenant {tenant.name}: the trace {tenant.trace} has lengths only; give a cv above 0")
    spread = MOONCAKE_GRID_MS if tenant.trace == "mooncake" else 0
    begin = some[0].arrival_ms
    times = sorted(row.arrival_ms - begin + rng.random() * spread for row in some)
    pace = len(some) / max(1.0, times[-1] + times[-1] / len(some))
    first = rng.randrange(len(some))
    lap = 0
    while True:
        for i in range(first if lap == 0 else 0, len(some)):
            yield (times[i] - times[first]) * pace + lap * len(some), some[i]
        lap += 1


def _leaving(tenant: Tenant, row: Row, rng: random.Random) -> float:
    """When a client goes: for those who do, at any time until a slow but acceptable answer would have ended."""
    leaves, when = rng.random() < tenant.leave, rng.random()
    if not leaves:
        return float("inf")
    return when * (tenant.objective.ttft_ms + row.output_tokens * tenant.objective.tpot_ms / 2)
