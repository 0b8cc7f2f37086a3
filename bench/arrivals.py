"""What a run will ask for: the requests of one or several sources, each with its time, drawn by a seed.

Arrivals are drawn at a mean rate of one and then scaled, so that a seed gives the same requests in the same order at
every load.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, field

from bench import traces
from bench.traces import Part, Row, Trace
from policies.types import Objective

OWN_CLOCK = 0.0
PATIENCE_MS = 2_000.0  # until the first token, of clients that leave where no objective says so
PACE_MS = 100.0  # the same per token

Share = Annotated[float, Meta(gt=0)]


class Source(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests of one kind.

    `share` is its part of the rate (shares need not add up to 1). `cv` is the coefficient of variation of Gamma gaps
    between arrivals, 1 is Poisson, 0 the trace's own clock. `tenants` and `classes` are parts by name, for requests
    whose row names none. `leave` of the clients go before the end. `max_tokens` above 0 is the limit that each request
    names, and the answer ends when the model ends it; with 0 it is asked to be as long as the trace's, exactly.
    """

    name: str
    trace: str
    share: Share = 1.0
    cv: Annotated[float, Meta(ge=0, le=20)] = 1.0
    objective: Objective = Objective()
    tenants: dict[str, Share] = field(default_factory=dict)
    classes: dict[str, Share] = field(default_factory=dict)
    leave: Annotated[float, Meta(ge=0, le=1)] = 0.0
    max_tokens: Annotated[int, Meta(ge=0)] = 0
    part: Part = "all"


class Planned(NamedTuple):
    """One request to come, `at_s` after the begin. `leave_s` after that its client goes, inf for never."""

    number: int
    at_s: float
    source: str
    tenant: str
    klass: str
    input_tokens: int
    output_tokens: int
    leave_s: float
    blocks: tuple[int, ...] = ()


def trace_of(source: Source, context_tokens: int = 0) -> Trace:
    """The part of the trace that a source asks from; cut where the model's context is known. Raises TraceError."""
    trace = traces.read(source.trace).part(source.part)
    if source.cv == OWN_CLOCK and not trace.timed:
        raise traces.TraceError(f"{source.trace}: it has lengths only: give --cv (1 is Poisson)")
    return trace.within(context_tokens) if context_tokens else trace


def own_rate(sources: Sequence[Source]) -> float:
    """Requests/s of all sources together on their own clocks; 0 where one of them has lengths only."""
    rates = [trace_of(source).rate for source in sources]
    return sum(rates) if all(rates) else 0.0


def planned(sources: Sequence[Source], rate: float, requests: int, seed: int, context_tokens: int = 0) -> list[Planned]:
    """About `requests` of them at `rate` per second in all, in order. The span is `requests / rate` seconds."""
    if rate <= 0 or requests < 1:
        raise ValueError(f"rate must be above 0 and requests at least 1, not {rate:g} and {requests}")
    if len({source.name for source in sources}) < len(sources):
        raise ValueError("two sources have the same name")
    whole = sum(source.share for source in sources)
    found = []
    for source in sources:
        rng = random.Random(f"{seed}/{source.part}/{source.name}")
        trace = trace_of(source, context_tokens)
        drawn = _drawn(trace, source.cv, rng) if source.cv else _replayed(trace, rng)
        for at, row in drawn:
            units = at * whole / source.share
            if units > requests:
                break
            found.append((units / rate, source, row, *_who(source, row, rng), _leaving(source, row, rng)))
    found.sort(key=lambda one: (one[0], one[1].name))
    return [
        Planned(
            number, at_s, source.name, tenant, klass, row.input_tokens, row.output_tokens, leave_s, row.blocks
        )
        for number, (at_s, source, row, tenant, klass, leave_s) in enumerate(found)
    ]  # fmt: skip


def _drawn(trace: Trace, cv: float, rng: random.Random) -> Iterator[tuple[float, Row]]:
    """Rows at random with Gamma gaps of mean one; in their order where they share blocks, else caches can't work."""
    shape, at = 1 / cv**2, 0.0
    ordered = any(row.blocks for row in trace.rows)
    first = rng.randrange(len(trace.rows)) if ordered else 0
    for i in itertools.count(first):
        at += rng.gammavariate(shape, 1 / shape)
        yield at, trace.rows[i % len(trace.rows) if ordered else rng.randrange(len(trace.rows))]


def _replayed(trace: Trace, rng: random.Random) -> Iterator[tuple[float, Row]]:
    """The trace's own order and clock, brought to a mean rate of one, from a random row on and round again."""
    rows = trace.spread(rng)
    first = rng.randrange(len(rows))
    for lap in itertools.count():
        for i in range(0 if lap else first, len(rows)):
            yield (rows[i].arrival_s - rows[first].arrival_s) * trace.rate + lap * len(rows), rows[i]


def _who(source: Source, row: Row, rng: random.Random) -> tuple[str, str]:
    tenant = row.tenant or _one_of(source.tenants, rng)
    return tenant, row.klass or _one_of(source.classes, rng)


def _one_of(shares: Mapping[str, float], rng: random.Random) -> str:
    return rng.choices(list(shares), list(shares.values()))[0] if shares else ""


def _leaving(source: Source, row: Row, rng: random.Random) -> float:
    """For those who go: any time until a slow but acceptable answer would have ended. In seconds."""
    leaves, when = rng.random() < source.leave, rng.random()
    if not leaves:
        return float("inf")
    aim = source.objective
    return when * ((aim.ttft_ms or PATIENCE_MS) + row.output_tokens * (aim.tpot_ms or PACE_MS) / 2) / 1000
