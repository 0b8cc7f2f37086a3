"""All processes' numbers, and the queue's own, as the text that Prometheus reads."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

from gateway.clock import now
from gateway.queue.channel import StoreAway, StoreUnfit
from gateway.queue.look import Look, look
from gateway.telemetry.metrics_sampler import Sampler
from gateway.telemetry.metrics_sheet import Board, Row
from gateway.telemetry.metrics_table import BY_NAME, Family, Kind, Over

if TYPE_CHECKING:
    from gateway.trunk import Trunk

LOOK_AGAIN_S = 1.0
"""Scrapes that come closer together share one look at the store."""

T = TypeVar("T")
Merged = dict[str, dict[tuple[str, ...], list[float]]]


class Scrape:
    """Answers `/metrics` for all processes of this gateway, whichever of them is asked."""

    def __init__(self, trunk: "Trunk", board: Board, sampler: Sampler) -> None:
        self._trunk, self._board, self._sampler = trunk, board, sampler
        self._lock = asyncio.Lock()
        self._looked_at = -math.inf
        self._look: Look | None = None

    def __repr__(self) -> str:
        return f"<Scrape of {self._board!r}>"

    async def text(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the format that `accept` (the request's header) prefers, and its media type."""
        return await self.read(lambda rows: render(rows, accept))

    async def read(self, made: Callable[[Iterable[Row]], T]) -> T:
        """What `made` makes of all numbers, beside the event loop: one at a time. What the store would tell is left out
        while it cannot be asked.
        """
        async with self._lock:
            seen = await self._seen()
            self._trunk.watchers.flush()
            self._sampler.sample()
            at = now()
            rows = [Row("signalbox_workers", (), [float(self._board.alive(at))])]
            if seen is not None:
                rows += _told(seen, {one.rank: one.name for one in self._trunk.by_rank})
            return await asyncio.to_thread(made, chain(self._board.rows(at), rows))

    async def _seen(self) -> Look | None:
        """At most one look a second, and none while the queue itself says that the store is lost."""
        trunk = self._trunk
        if trunk.queue.lost:
            return None
        if now() - self._looked_at >= LOOK_AGAIN_S:
            self._look = None
            ranks = (one.rank for one in trunk.by_rank)
            try:
                self._look = await look(trunk.queue.turns.target, ranks, trunk.pools)
            except (StoreAway, StoreUnfit):
                trunk.metrics.missed_look()
            self._looked_at = now()
        return self._look


def _told(seen: Look, classes: dict[int, str]) -> Iterator[Row]:
    yield Row("signalbox_queue_processes", (), [seen.processes])
    for pool in seen.pools:
        for line in pool.lines:
            labels = (pool.model, classes[line.rank])
            yield Row("signalbox_queue_requests", labels, [line.waiting])
            yield Row("signalbox_queue_tokens", labels, [line.tokens])
            yield Row("signalbox_queue_tenants", labels, [line.tenants])
            yield Row("signalbox_fairness_spread_tokens", labels, [line.spread])
            yield Row("signalbox_shed_ratio", labels, [line.level / 1000])
        for ledger in pool.ledgers:
            labels = (pool.model, ledger.backend)
            yield Row("signalbox_ledger_open", labels, [float(ledger.open == 1)])
            yield Row("signalbox_ledger_leases", labels, [ledger.leases])
            yield Row("signalbox_ledger_leases_limit", labels, [ledger.leases_limit])
            yield Row("signalbox_ledger_prefill_tokens", labels, [ledger.prefill_tokens])
            yield Row("signalbox_ledger_prefill_tokens_limit", labels, [ledger.prefill_tokens_limit])
            yield Row("signalbox_ledger_kv_tokens", labels, [ledger.kv_tokens])
            yield Row("signalbox_ledger_kv_tokens_limit", labels, [ledger.kv_tokens_limit])


def render(rows: Iterable[Row], accept: str) -> tuple[bytes, str]:
    encoder, media_type = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(merge(rows)))
    return encoder(registry), media_type


def merge(rows: Iterable[Row]) -> Merged:
    """By name and labels, one series out of those of several processes."""
    merged: Merged = {}
    for name, labels, values in _paused(rows, 20):
        series = merged.setdefault(name, {})
        known = series.get(labels)
        if known is None:
            series[labels] = [*values]
            continue
        over = BY_NAME[name].over
        series[labels] = [_one(over, *pair) for pair in zip(known, values, strict=True)]
    return merged


def _one(over: Over, first: float, second: float) -> float:
    if over is Over.SUM:
        return first + second
    return max(first, second) if over is Over.MOST else min(first, second)


class _Families(Collector):
    """The merged numbers in the library's words, in the order of the table."""

    def __init__(self, merged: Merged) -> None:
        self._merged = merged

    def collect(self) -> Iterator[Metric]:
        for name, family in BY_NAME.items():
            if series := self._merged.get(name):
                metric = _metric(family, series)
                metric.samples = _Samples(metric.samples)
                yield metric


class _Samples(list[Sample]):
    """What the library writes out one by one."""

    def __iter__(self) -> Iterator[Sample]:
        return _paused(super().__iter__(), 50)


def _paused(items: Iterable[T], every: int) -> Iterator[T]:
    """The items, letting other threads run every so often: unasked the interpreter does so only each 5 ms, and for as
    long the event loop would stand still."""
    for nth, item in enumerate(items):
        if nth % every == 0:
            time.sleep(0)
        yield item


def _metric(family: Family, series: dict[tuple[str, ...], list[float]]) -> Metric:
    if family.kind is Kind.COUNTER:
        counter = CounterMetricFamily(family.name, family.help, labels=family.labels)
        for labels, (value,) in series.items():
            counter.add_metric(labels, value)
        return counter
    if family.kind is Kind.GAUGE:
        gauge = GaugeMetricFamily(family.name, family.help, labels=family.labels)
        for labels, (value,) in series.items():
            gauge.add_metric(labels, value)
        return gauge
    histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for labels, values in _paused(series.items(), 5):
        histogram.add_metric(labels, _buckets(family, values), values[-1])
    return histogram


def _buckets(family: Family, values: list[float]) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound."""
    total, found = 0.0, []
    for bound, count in zip((*family.buckets, math.inf), values, strict=False):
        total += count
        found.append(("+Inf" if math.isinf(bound) else repr(bound), total))
    return found
