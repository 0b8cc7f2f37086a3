"""What requests cost an engine, from their lengths and the engine's step times (see `bench.capacity`)."""

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from bench.traces import Row, Trace
from policies.steptime import Coefficients

WINDOW_S = 30.0  # of a trace's own clock
WINDOWS = 24  # that stand for all of a trace's


class Engine(Struct, frozen=True, kw_only=True):
    """One backend: its step times and limits."""

    name: str
    times: Coefficients
    chunk_tokens: int
    max_running: int
    kv_tokens: int


class Traffic(Struct, frozen=True, kw_only=True):
    """What is asked: `rows` for their lengths; `cv` the variation of gaps between arrivals.

    `windows` are parts of the requests and, for each, its rate as a multiple of the mean: ((1, 1),) is a steady rate.
    """

    rows: tuple[Row, ...]
    cv: float = 1.0
    windows: tuple[tuple[float, float], ...] = ((1.0, 1.0),)


def drawn(trace: Trace, cv: float) -> Traffic:
    """The trace's lengths with arrivals at a steady rate."""
    return Traffic(rows=trace.rows, cv=cv)


def replayed(trace: Trace) -> Traffic:
    """The trace's lengths on its own clock, in windows of WINDOW_S within which arrivals are as good as random."""
    rows = trace.spread(random.Random(trace.name))
    counts = sorted(Counter(int(row.arrival_s / WINDOW_S) for row in rows).values())
    found, mean = [], trace.rate * WINDOW_S
    for i in range(min(WINDOWS, len(counts))):
        some = (
            counts[len(counts) * i // WINDOWS : len(counts) * (i + 1) // WINDOWS]
            if len(counts) > WINDOWS
            else [counts[i]]
        )
        found.append((sum(some) / len(rows), sum(n * n for n in some) / sum(some) / mean))
    return Traffic(rows=rows, windows=tuple(found))


class Costs(Struct, frozen=True, kw_only=True):
    """What requests of a kind cost an engine: means, and the variation of the whole. Times in seconds.

    `decodes` are answer tokens but the first, `own_s` the cost without a share of a0; `whole_s` is both in a full step.
    `held` is the mean KV of a running request, `held_sd` its deviation. `stay` are the steps that a request runs.
    """

    prompt: float
    decodes: float
    own_s: float
    whole_s: float
    variation: float
    stay: float
    stay_variation: float
    context: float
    held: float
    held_sd: float
    prompt_square: float
    prompt_variation: float


def costs(engine: Engine, rows: Sequence[Row]) -> Costs:
    """The costs of a workload, of which `rows` are a sample."""
    times, chunk = engine.times, engine.chunk_tokens
    own, whole, weights, held = [], [], [], []
    for row in rows:
        decodes = row.output_tokens - 1
        context = decodes * (row.input_tokens + row.output_tokens / 2)
        chunks = math.ceil(row.input_tokens / chunk)
        computed = chunk * chunks * (chunks - 1) / 2
        mine = (
            times.a1_s * row.input_tokens + times.a2_s * decodes + times.a3_s * context + times.a4_s * computed
        )  # fmt: skip
        own.append(mine)
        whole.append(mine + times.a0_s * (row.input_tokens + decodes) / chunk)
        weights.append(decodes)
        held.append(row.input_tokens + row.output_tokens)
    stays = [row.output_tokens - 1 + row.input_tokens / chunk for row in rows]
    prompt, answer = statistics.fmean(row.input_tokens for row in rows), statistics.fmean(weights)
    mean = statistics.fmean(whole)
    busy = [max(1, weight) for weight in weights]
    total = sum(busy)
    running = sum(weight * (row.input_tokens + row.output_tokens / 2) for weight, row in zip(busy, rows, strict=True))
    held_mean = sum(weight * size for weight, size in zip(busy, held, strict=True)) / total
    held_square = sum(weight * size * size for weight, size in zip(busy, held, strict=True)) / total
    return Costs(
        prompt=prompt,
        decodes=answer,
        own_s=statistics.fmean(own),
        whole_s=mean,
        variation=statistics.pstdev(whole) / mean,
        stay=statistics.fmean(stays),
        stay_variation=statistics.pstdev(stays) / statistics.fmean(stays),
        context=running / total,
        held=held_mean,
        held_sd=math.sqrt(max(0.0, held_square - held_mean**2)),
        prompt_square=statistics.fmean(row.input_tokens**2 for row in rows),
        prompt_variation=statistics.pstdev(row.input_tokens for row in rows) / prompt,
    )
