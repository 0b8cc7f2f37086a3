"""How an engine is doing: its reports after every step, and whether it still gives any."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from backends.protocol import Gauge

KEPT_STEPS = 1024  # between two gauges
STEPS = 20  # expected ones without a sign: then it hangs
PROBE_S = 1.0


class Reports:
    """The engine's reports, one per step. Times are the loop's seconds."""

    def __init__(self, kv_tokens: int) -> None:
        self.kv_tokens = kv_tokens
        self.seen_at = 0.0
        self.slowest_s = 0.0  # of the recent steps
        self.preemptions = 0
        self._scheduler: dict[int, Any] = {}  # by engine of a data-parallel set
        self._steps: deque[tuple[int, int, int, float]] = deque(maxlen=KEPT_STEPS)

    def __repr__(self) -> str:
        return f"<Reports of {len(self._scheduler)} engines, {len(self._steps)} steps since the last gauge>"

    def record(self, scheduler: Any, iteration: Any, engine: int) -> None:
        """One report. Runs between the engine's output and its readers: a few assignments, no more."""
        self.seen_at = asyncio.get_running_loop().time()
        self.preemptions += getattr(iteration, "num_preempted_reqs", 0)
        if scheduler is None:
            return
        self._scheduler[engine] = scheduler
        details = getattr(scheduler, "iteration_details", None)
        if details is None or getattr(details, "is_dummy", False):
            return
        seconds = details.elapsed_ms / 1e3
        self.slowest_s = max(seconds, 0.9 * self.slowest_s)
        kv_tokens = int(scheduler.kv_cache_usage * self.kv_tokens)
        self._steps.append((details.num_ctx_tokens, details.num_generation_requests, kv_tokens, seconds))

    def gauge(self) -> Gauge:
        """What the last reports say, and the steps since the last gauge."""
        steps = tuple(self._steps)
        self._steps.clear()
        last = self._scheduler.values()
        return Gauge(
            running=sum(one.num_running_reqs for one in last),
            waiting=sum(one.num_waiting_reqs + getattr(one, "num_skipped_waiting_reqs", 0) for one in last),
            kv_used=max((one.kv_cache_usage for one in last), default=0.0),
            preemptions=self.preemptions,
            steps=steps,
        )


def stat_logger(reports: Reports) -> type:
    """A class for vLLM's `stat_loggers`. Being a `PrometheusStatLogger` is what keeps vLLM's own one away."""

    def start(self: Any, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        """Registers nothing."""

    def record(
        self: Any, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        reports.record(scheduler_stats, iteration_stats, engine_idx)

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        """Says nothing to anybody."""

    public = (name for name in dir(PrometheusStatLogger) if not name.startswith("_"))
    silent = {name: nothing for name in public if callable(getattr(PrometheusStatLogger, name))}
    return type("SilentStatLogger", (PrometheusStatLogger,), {**silent, "__init__": start, "record": record})


class Watchdog:
    """Notices an engine that holds requests and is silent. vLLM itself only notices one that is dead.

    One timer while requests are open, none while idle. Before it bites, the engine gets a question that it answers
    between steps: a request may wait long for its grammar without any step.
    """

    def __init__(
        self, reports: Reports, limit_s: float, holds: Callable[[], int], ask: Callable[[], Awaitable[Any]]
    ) -> None:
        self.on_hang: Callable[[str], None] = lambda why: None
        self._reports, self._limit_s = reports, limit_s
        self._holds, self._ask = holds, ask
        self._timer: asyncio.TimerHandle | None = None
        self._probe: asyncio.Task[None] | None = None
        self._stopped = True

    def start(self) -> None:
        """From now on. What went before was warming up, whose steps say nothing about later ones."""
        self._stopped = False
        self._reports.slowest_s = 0.0

    def opened(self, was_idle: bool) -> None:
        """A request went to the engine. An idle engine owed no sign: its silence starts here."""
        if was_idle:
            self._reports.seen_at = asyncio.get_running_loop().time()
        if self._timer is None and self._probe is None and not self._stopped:
            self._arm()

    def stop(self) -> None:
        """No more looking. Idempotent."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._probe is not None:
            self._probe.cancel()

    def _patience_s(self) -> float:
        return max(self._limit_s, STEPS * self._reports.slowest_s)

    def _due(self) -> float:
        """When to ask: the answer's time is part of the patience."""
        return self._reports.seen_at + max(self._patience_s() - PROBE_S, 0.0)

    def _arm(self) -> None:
        """Look again when it is due, and not later than `limit_s`: the patience may have become shorter by then."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(min(self._due(), loop.time() + self._limit_s), self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        if self._stopped or not self._holds():
            return
        if loop.time() < self._due():
            self._arm()
        else:
            self._probe = loop.create_task(self._question())

    async def _question(self) -> None:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        try:
            async with asyncio.timeout(PROBE_S):
                await self._ask()
        except Exception:  # noqa: BLE001 - whatever it is, it is no answer
            silent = self._reports.seen_at <= asked_at
        else:
            silent = False
        self._probe = None
        if self._stopped:
            return
        if silent:
            self.on_hang(f"the vLLM engine has given no sign for {loop.time() - self._reports.seen_at:.0f} s")
            return
        self._reports.seen_at = max(self._reports.seen_at, asked_at)
        self._arm()
