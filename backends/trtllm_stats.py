"""TensorRT-LLM's iteration statistics: what each step of its engine did, as JSON objects, each told once."""

from typing import Any

import msgspec
from msgspec import Struct

from backends.protocol import Gauge

KEPT_STEPS = 1024  # between two gauges


class _Cache(Struct, rename="camel"):
    max_num_blocks: int = 0
    used_num_blocks: int = 0
    tokens_per_block: int = 0


class _Batch(Struct, rename="camel"):
    num_ctx_tokens: int = 0
    num_gen_requests: int = 0


class Iteration(Struct, rename="camel"):
    """One step, as far as it is looked at. None is "it does not say"."""

    num_active_requests: int | None = None
    num_queued_requests: int | None = None
    max_batch_size_static: int = 0
    iter_latency_ms: float = msgspec.field(name="iterLatencyMS", default=0.0)
    kv_cache_stats: _Cache | None = None
    inflight_batching_stats: _Batch | None = None

    @property
    def step(self) -> tuple[int, int, int, float] | None:
        """As in `Gauge.steps`; None where the object does not say what was computed, or how long it took."""
        batch, cache = self.inflight_batching_stats, self.kv_cache_stats
        if batch is None or self.iter_latency_ms <= 0:
            return None
        kv = cache.used_num_blocks * cache.tokens_per_block if cache else 0
        return batch.num_ctx_tokens, batch.num_gen_requests, kv, self.iter_latency_ms / 1e3


class Iterations:
    """The statistics of one engine over time."""

    def __init__(self) -> None:
        self._last: Iteration | None = None
        self._steps: list[tuple[int, int, int, float]] = []

    def __repr__(self) -> str:
        return f"<Iterations: {len(self._steps)} steps since the last gauge>"

    def add(self, told: Any) -> None:
        """One object, or a list of them, decoded from JSON. Raises ValueError for anything else."""
        try:
            found = msgspec.convert(told if isinstance(told, list) else [told], list[Iteration])
        except msgspec.ValidationError as error:
            raise ValueError(f"these are no iteration statistics: {error}") from None
        if found:
            self._last = found[-1]
            self._steps += [step for one in found if (step := one.step) is not None]
            del self._steps[:-KEPT_STEPS]

    def gauge(self, idle: bool = False) -> Gauge:
        """What the last step says, and all steps since the last gauge. `idle`: there was none, so nothing runs."""
        steps, self._steps = tuple(self._steps), []
        last = self._last
        if last is None:
            return Gauge()
        cache = last.kv_cache_stats
        return Gauge(
            running=0 if idle else last.num_active_requests,
            waiting=0 if idle else last.num_queued_requests,
            kv_used=cache.used_num_blocks / cache.max_num_blocks if cache and cache.max_num_blocks else None,
            steps=steps,
        )

    @property
    def kv_tokens(self) -> int:
        """What the KV cache holds; 0 until a step said it."""
        cache = self._last.kv_cache_stats if self._last else None
        return cache.max_num_blocks * cache.tokens_per_block if cache else 0
