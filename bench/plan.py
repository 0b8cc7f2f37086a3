"""From a workload and engines: what each carries at the objective, what to set, and how many of them a load needs."""

import math
from collections.abc import Sequence

from msgspec import Struct

from bench.capacity import Capacity, Model
from bench.costs import Engine, Traffic
from bench.sim_metrics import rounded
from bench.workload import Profile
from policies.types import Objective

CURVE = 40  # rates of a curve
HEADROOM = 0.2  # of capacity kept free where nothing else is said

MEANING = {
    "full": "the engine is full",
    "places": "all running places are taken",
    "kv": "the KV cache is full",
    "ttft": "first tokens come too late",
    "tpot": "answers come too slowly",
    "e2el": "answers end too late",
}


class Curve(Struct, frozen=True):
    """Over rates: who attains all objectives, and each of them; the mean step and the decodes at once."""

    rates: tuple[float, ...]
    attained: tuple[float, ...]
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    step_ms: tuple[float, ...]
    running: tuple[float, ...]


class Need(Struct, frozen=True):
    """Engines of one kind for a load, with a part of what they carry kept free."""

    engine: str
    replicas: int
    busy: float


class Planned(Struct, frozen=True, kw_only=True):
    """The plan. `load` is in requests/s, 0 where none was asked for; `pool` is what all engines together carry."""

    profile: Profile
    objective: Objective
    level: float
    headroom: float
    load: float
    pool: float
    capacities: tuple[Capacity, ...]
    curves: tuple[Curve, ...]
    needs: tuple[Need, ...]
    notes: tuple[str, ...] = ()


class Wanted(Struct, frozen=True, kw_only=True):
    """What a plan is for."""

    objective: Objective
    level: float = 0.95
    headroom: float = HEADROOM
    load: float = 0.0


def plan(profile: Profile, traffic: Traffic, engines: Sequence[Engine], wanted: Wanted) -> Planned:
    """Plan for each engine by itself; the pool's capacity is their sum."""
    models = [Model(engine, traffic, wanted.objective, wanted.level) for engine in engines]
    capacities = tuple(model.capacity() for model in models)
    return Planned(
        profile=profile,
        objective=wanted.objective,
        level=wanted.level,
        headroom=wanted.headroom,
        load=wanted.load,
        pool=sum(capacity.rate for capacity in capacities),
        capacities=capacities,
        curves=tuple(_curve(model) for model in models),
        needs=tuple(_need(capacity, wanted) for capacity in capacities) if wanted.load else (),
        notes=tuple(_notes(models, capacities)),
    )


def _need(capacity: Capacity, wanted: Wanted) -> Need:
    """As many as carry the load with the headroom; 0 where even one request is too much for such an engine."""
    usable = capacity.rate * (1 - wanted.headroom)
    replicas = math.ceil(wanted.load / usable - 1e-9) if usable > 0 else 0
    busy = wanted.load / (replicas * capacity.rate) if replicas else 0.0
    return Need(capacity.engine.name, max(1, replicas) if usable > 0 else 0, rounded(busy))


def _curve(model: Model) -> Curve:
    rates = [min(model.full, model.seats) * (i + 1) / CURVE for i in range(CURVE)]
    return Curve(
        rates=tuple(map(rounded, rates)),
        attained=tuple(rounded(model.attained(rate)) for rate in rates),
        ttft=tuple(rounded(model.kept(model.first_missed, rate)) for rate in rates),
        tpot=tuple(rounded(model.kept(model.pace_missed, rate)) for rate in rates),
        step_ms=tuple(rounded(1000 * model.step_s(rate)) for rate in rates),
        running=tuple(rounded(model.running(rate)) for rate in rates),
    )


def _notes(models: Sequence[Model], capacities: Sequence[Capacity]) -> list[str]:
    found = []
    for model, capacity in zip(models, capacities, strict=True):
        name = capacity.engine.name
        if capacity.rate <= 0:
            found.append(f"{name}: not even single requests attain the objective often enough")
        if (chunk := model.chunk_for_pace()) < capacity.engine.chunk_tokens:
            why = "a step with a full chunk takes longer than the pace allows"
            found.append(f"{name}: {why}; chunk_tokens of {chunk} would hold it")
        if model.places <= 1.5:
            found.append(f"{name}: its KV holds hardly one request of this kind")
    return found


def text(found: Planned) -> str:
    """For a terminal."""
    aims = {"ttft": found.objective.ttft_ms, "tpot": found.objective.tpot_ms, "e2el": found.objective.total_ms}
    goals = " ".join(f"{name}:{value}" for name, value in aims.items() if value) or "no objective"
    lines = [f"{goals}, attained by {found.level:.0%} of requests", "", *table(found)]
    for capacity in found.capacities:
        parts = ", ".join(f"{limit.what} {limit.rate:.3g}/s ({limit.why})" for limit in capacity.limits)
        lines.append(f"{capacity.engine.name}: {parts}")
    lines.append("")
    if len(found.capacities) > 1:
        lines.append(f"the pool carries {found.pool:.3g}/s")
    lines += [
        f"{found.load:.3g}/s with {found.headroom:.0%} kept free: {need.replicas} of {need.engine}, "
        f"{need.busy:.0%} of what they carry"
        for need in found.needs
        if need.replicas
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)]).rstrip()


HEADS = (
    "engine", "carries/s", "breaks first", "step ms", "decodes", "KV used", "busy", "max_running",
    "prefill_tokens_per_s", "kv_tokens", "chunk_tokens",
)  # fmt: skip


def cells(capacity: Capacity) -> tuple[str, ...]:
    """One line of the table: what it carries, how it is then, and what to set in its limits."""
    engine = capacity.engine
    return (
        engine.name, f"{capacity.rate:.3g}", capacity.limits[0].what, f"{1000 * capacity.step_s:.0f}",
        f"{capacity.running:.0f}", f"{capacity.kv_tokens / engine.kv_tokens:.0%}", f"{capacity.load:.0%}",
        str(capacity.most_running), f"{capacity.prefill_tokens_per_s:.0f}", str(engine.kv_tokens),
        str(engine.chunk_tokens),
    )  # fmt: skip


def table(found: Planned) -> list[str]:
    lines = [HEADS, *map(cells, found.capacities)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEADS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
