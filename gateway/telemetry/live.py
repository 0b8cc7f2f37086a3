"""What is live in this process, in a form that another process of the same configuration understands."""

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from gateway.telemetry.phases import phases
from gateway.telemetry.slate import ROOM
from policies.lifecycle import State

if TYPE_CHECKING:
    from gateway.exchange import Exchange
    from gateway.trunk import Trunk

MOST_ROWS = 64
MOST_LINES = 64
MOST_PHASES = 12


class Live(Struct, array_like=True, frozen=True):
    """A request between its first byte and its end. Pool, class and backend are positions in the configuration, -1 as
    long as they are not known; `begins` are the monotonic seconds at which its phases began, the last one goes on."""

    request_id: str
    tenant: str
    pool: int
    service: int
    backend: int
    state: State
    stream: bool
    prompt_tokens: int
    output_tokens: int
    retries: int
    phases: tuple[str, ...]
    begins: tuple[float, ...]


class Line(Struct, array_like=True, frozen=True):
    """How many requests of a tenant wait in a pool and class; the empty name is all tenants beyond MOST_LINES."""

    pool: int
    service: int
    tenant: str
    waiting: int


class Roll(Struct, array_like=True, frozen=True):
    """The oldest requests of one process, and all that wait."""

    rows: list[Live]
    lines: list[Line]


_encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Roll).decode


def roll(trunk: "Trunk", at: float) -> bytes:
    """The roll of this process, encoded, of at most ROOM bytes: as many of the oldest requests as go in."""
    places = _Places(trunk)
    exchanges = [live.exchange for live in trunk.ticker.members()]
    lines = _lines(exchanges, places)
    most = MOST_ROWS
    while True:
        text = _encode(Roll([_live(one, places, at) for one in exchanges[:most]], lines))
        if len(text) <= ROOM:
            return text
        most //= 2
        lines = lines if most else []


class _Places:
    """Positions in the configuration by name."""

    def __init__(self, trunk: "Trunk") -> None:
        self.pools = {model: nth for nth, model in enumerate(trunk.pools)}
        self.services = {one.name: nth for nth, one in enumerate(trunk.by_rank)}


def _live(x: "Exchange", places: _Places, at: float) -> Live:
    names, times = phases(x, at)
    job, usage = x.job, x.usage_so_far()
    return Live(
        request_id=x.request_id,
        tenant=x.tenant.name if x.tenant else "",
        pool=places.pools[job.pool.model] if job else -1,
        service=places.services[job.service.name] if job else -1,
        backend=x.member.position if x.member and x.granted_at else -1,
        state=x.state,
        stream=job.prompt.stream if job else False,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        retries=len(x.failed),
        phases=names[-MOST_PHASES:],
        begins=tuple(times[:-1][-MOST_PHASES:]),
    )


def _lines(exchanges: list["Exchange"], places: _Places) -> list[Line]:
    """The longest lines, and in each pool and class what is in no line of those."""
    counts: Counter[tuple[int, int, str]] = Counter()
    for x in exchanges:
        if x.state is State.QUEUED and x.job is not None:
            job = x.job
            counts[places.pools[job.pool.model], places.services[job.service.name], job.tenant.name] += 1
    rest: Counter[tuple[int, int]] = Counter()
    ordered = counts.most_common()
    for (pool, service, _), waiting in ordered[MOST_LINES:]:
        rest[pool, service] += waiting
    lines = [Line(*key, waiting) for key, waiting in ordered[:MOST_LINES]]
    return lines + [Line(*key, "", waiting) for key, waiting in rest.items()]
