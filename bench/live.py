"""What a running gateway tells of its traffic and its engines: `/metrics`, read once a second for a while."""

import asyncio
import itertools
import math
import os
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence

import aiohttp
import msgspec
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from bench.costs import Engine, Traffic
from bench.sim_metrics import rounded
from bench.traces import LENGTHS_ONLY, Row
from bench.workload import Arrivals, Group, Profile, spread
from policies.steptime import Coefficients

EVERY_S = 1.0
ANSWER_S = 10.0
SAMPLE = 500  # rows that stand for a histogram
CHUNKS_OUTSTANDING = 2  # that a ledger's prefill limit holds
FEW = 20  # requests from which on a shape can be told

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class LiveError(Exception):
    """The gateway can't be asked, or has nothing to tell yet. Its text is one line for the operator."""


class Live(Struct, frozen=True, kw_only=True):
    """The traffic of one model, and its engines with what was learned of them."""

    model: str
    profile: Profile
    traffic: Traffic
    engines: list[Engine]
    without: tuple[str, ...]


async def watched(url: str, key_env: str, model: str, seconds: float) -> Live:
    """Look at a gateway for a while. Raises LiveError."""
    headers = {"accept": "text/plain"}
    if key := os.environ.get(key_env, "").strip():
        headers["authorization"] = f"Bearer {key}"
    looks: list[Samples] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S), headers=headers) as client:
        begin = asyncio.get_running_loop().time()
        while len(looks) < 2 or len(looks) <= seconds / EVERY_S:
            looks.append(await _look(client, url))
            due = begin + len(looks) * EVERY_S
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
    return of(looks, model)


async def _look(client: aiohttp.ClientSession, url: str) -> Samples:
    address = url.rstrip("/").removesuffix("/v1") + "/metrics"
    try:
        async with client.get(address) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise LiveError(f"{address} answered {answer.status}: is it a gateway, and is the key an admin key?")
    except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
        raise LiveError(f"{address} can't be asked: {str(error) or 'no answer'}") from None
    try:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except ValueError as error:
        raise LiveError(f"{address} has no metrics in Prometheus' form: {error}") from None


def of(looks: Sequence[Samples], model: str) -> Live:
    """What looks a second apart tell. Raises LiveError."""
    last = looks[-1]
    models = sorted({labels["model"] for _, labels, _ in _named(last, "signalbox_backend_up")})
    if model not in models and (model or len(models) != 1):
        raise LiveError(f"--model: {model or 'it'} must name one of its pools: {', '.join(models) or 'none'}")
    model = model or models[0]
    lengths = {kind: _histogram(last, model, kind) for kind in ("input", "output")}
    if min(sum(count for _, count in one[0]) for one in lengths.values()) < FEW:
        raise LiveError(f"fewer than {FEW} requests for {model!r} have ended: there is no shape to tell yet")
    drawn = {kind: _quantiles(*one) for kind, one in lengths.items()}
    rng = random.Random(model)
    rng.shuffle(drawn["output"])
    rows = tuple(Row(LENGTHS_ONLY, *pair) for pair in zip(drawn["input"], drawn["output"], strict=True))
    come = _arrivals(looks, model)
    engines, without = _engines(last, model)
    classes = _classes(last, model, come.rate)
    at_once = [_sum(look, "signalbox_live_requests") for look in looks]
    found = Profile(
        name=f"{model}, live",
        requests=int(sum(count for _, count in lengths["input"][0])),
        span_s=rounded((len(looks) - 1) * EVERY_S),
        input=spread(drawn["input"]),
        output=spread(drawn["output"]),
        together=0.0,
        arrivals=come,
        classes=classes,
        at_once=(rounded(statistics.fmean(at_once)), max(at_once)),
        notes=(
            "lengths are from the buckets of histograms since the gateway's start, arrivals from requests that ended",
        ),
    )
    traffic = Traffic(rows=rows, cv=come.gap_cv)
    return Live(model=model, profile=found, traffic=traffic, engines=engines, without=without)


def _named(look: Samples, name: str) -> Iterable[tuple[str, dict[str, str], float]]:
    return ((found, dict(labels), value) for (found, labels), value in look.items() if found == name)


def _sum(look: Samples, name: str, **wanted: str) -> float:
    return sum(value for _, labels, value in _named(look, name) if wanted.items() <= labels.items())


def _histogram(look: Samples, model: str, kind: str) -> tuple[list[tuple[float, float]], float]:
    """Upper bounds with their own counts, and the sum of all values."""
    wanted = {"gen_ai_request_model": model, "gen_ai_token_type": kind}
    upto: dict[float, float] = {}
    for _, labels, value in _named(look, "gen_ai_client_token_usage_bucket"):
        if wanted.items() <= labels.items():
            bound = float(labels["le"])
            upto[bound] = upto.get(bound, 0.0) + value
    counts, before = [], 0.0
    for bound in sorted(upto):
        counts.append((bound, upto[bound] - before))
        before = upto[bound]
    return counts, _sum(look, "gen_ai_client_token_usage_sum", **wanted)


def _quantiles(counts: Sequence[tuple[float, float]], total: float) -> list[int]:
    """SAMPLE values like those in the buckets: even in the logarithm within each, and with the true mean."""
    whole = sum(count for _, count in counts)
    values = []
    for i in range(SAMPLE):
        rank, low = (i + 0.5) / SAMPLE * whole, 1.0
        for bound, count in counts:
            high = bound if math.isfinite(bound) else 4 * low
            if rank <= count:
                values.append(low * (high / low) ** (rank / count) if count else high)
                break
            rank, low = rank - count, max(1.0, bound)
    scale = total / whole / statistics.fmean(values)
    return [max(1, round(value * scale)) for value in values]


def _arrivals(looks: Sequence[Samples], model: str) -> Arrivals:
    totals = [_sum(look, "signalbox_requests_total", model=model) for look in looks]
    counts = [max(0.0, after - before) for before, after in itertools.pairwise(totals)]
    mean = statistics.fmean(counts)
    if not mean:
        raise LiveError(f"no request for {model!r} ended within {len(counts)} s: watch it for longer, or under traffic")
    burst = statistics.pvariance(counts) / mean if len(counts) > 5 else 1.0
    window = f"{EVERY_S:g}"
    return Arrivals(
        rounded(mean / EVERY_S), rounded(math.sqrt(burst)), {window: rounded(burst)},
        {window: rounded(max(counts) / EVERY_S)},
    )  # fmt: skip


def _classes(look: Samples, model: str, rate: float) -> tuple[Group, ...]:
    def means(name: str, kind: str) -> float:
        wanted = {"gen_ai_request_model": model, "class": name, "gen_ai_token_type": kind}
        count = _sum(look, "gen_ai_client_token_usage_count", **wanted)
        return _sum(look, "gen_ai_client_token_usage_sum", **wanted) / count if count else 0.0

    counts = {
        labels["class"]: _sum(look, "signalbox_requests_total", model=model, **{"class": labels["class"]})
        for _, labels, _ in _named(look, "signalbox_requests_total")
        if labels.get("model") == model
    }
    whole = sum(counts.values()) or 1.0
    tokens = {name: count * (means(name, "input") + means(name, "output")) for name, count in counts.items()}
    of_all = sum(tokens.values()) or 1.0
    return tuple(
        Group(
            name, rounded(count / whole), rounded(tokens[name] / of_all), rounded(rate * count / whole), 0.0,
            rounded(means(name, "input")), rounded(means(name, "output")),
        )
        for name, count in sorted(counts.items())
    )  # fmt: skip


def _engines(look: Samples, model: str) -> tuple[list[Engine], tuple[str, ...]]:
    """Those whose steps have been learned, and the names of the others."""
    found, without = [], []
    for _, labels, _ in _named(look, "signalbox_backend_up"):
        if labels["model"] != model:
            continue
        name = labels["backend"]
        terms = {
            one["term"]: value
            for _, one, value in _named(look, "signalbox_step_coefficient_seconds")
            if (one["model"], one["backend"]) == (model, name)
        }
        limits = {
            what: int(_sum(look, f"signalbox_ledger_{what}_limit", model=model, backend=name))
            for what in ("leases", "kv_tokens", "prefill_tokens")
        }
        if len(terms) < len(Coefficients.__struct_fields__) or not all(limits.values()):
            without.append(name)
            continue
        found.append(_engine(name, terms, limits))
    return found, tuple(without)


def _engine(name: str, terms: Mapping[str, float], limits: Mapping[str, int]) -> Engine:
    return Engine(
        name=name,
        times=msgspec.convert({f"{term}_s": value for term, value in terms.items()}, Coefficients),
        chunk_tokens=limits["prefill_tokens"] // CHUNKS_OUTSTANDING,
        max_running=limits["leases"],
        kv_tokens=limits["kv_tokens"],
    )
