"""What the gateway's parts know of themselves, written to the sheet once a second and before each scrape."""

import asyncio
import functools
import os
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gateway import __version__
from gateway.clock import now
from gateway.telemetry.live import roll
from gateway.telemetry.metrics_sheet import Board, Cells
from gateway.telemetry.metrics_table import BY_NAME
from policies.breaker import Circuit
from policies.lifecycle import State

if TYPE_CHECKING:
    from gateway.pool import Member, Pool
    from gateway.trunk import Trunk

EVERY_S = 1.0
PAGE_BYTES = resource.getpagesize()


class _Followed:
    """A counter that follows a number which somebody else counts up, from wherever that starts."""

    __slots__ = ("_cells", "_seen")

    def __init__(self, cells: Cells) -> None:
        self._cells, self._seen = cells, 0.0

    def follow(self, value: float) -> None:
        self._cells[0] += max(0.0, value - self._seen)
        self._seen = value


class Sampler:
    """Reads the trunk; nothing in the trunk knows of it."""

    def __init__(self, trunk: "Trunk", board: Board) -> None:
        self._trunk, self._board = trunk, board
        self._gauges: dict[tuple[str, ...], Cells] = {}
        self._followed: dict[tuple[str, ...], _Followed] = {}

    def __repr__(self) -> str:
        return f"<Sampler {len(self._gauges)} gauges, {len(self._followed)} counters>"

    async def run(self) -> None:
        """Once a second, until cancelled."""
        while True:
            due = now() + EVERY_S
            self.sample()
            if self._board.slate.watched(now()):
                self.show()
            await asyncio.sleep(EVERY_S)
            self._set("signalbox_loop_lag_seconds", value=max(0.0, now() - due))

    def sample(self) -> None:
        """Write everything as it is now."""
        at = now()
        self._process()
        self._live()
        self._queue(at)
        for pool in self._trunk.pools.values():
            coverage = pool.answers.lengths.coverage
            self._follow("signalbox_lengths_judged", pool.model, value=coverage.judged)
            self._follow("signalbox_lengths_covered", pool.model, value=coverage.covered)
            for member in pool.members:
                self._member(pool, member, at)
        self._board.own.beat(at)

    def show(self) -> None:
        """Write what is live for whoever watches, here or at another process."""
        self._board.slate.write(roll(self._trunk, now()), now())

    def _process(self) -> None:
        worker = str(self._board.place)
        self._follow("signalbox_worker_starts", worker, value=1)
        used = resource.getrusage(resource.RUSAGE_SELF)
        self._follow("signalbox_cpu_seconds", worker, value=used.ru_utime + used.ru_stime)
        if statm := _statm():
            pages = int(os.pread(statm, 128, 0).split()[1])
            self._set("signalbox_resident_memory_bytes", worker, value=pages * PAGE_BYTES)
        self._set("signalbox_unrecorded_series", value=self._board.own.unrecorded)
        self._set("signalbox_build_info", __version__, value=1)

    def _live(self) -> None:
        """Every place in the queue belongs to a live request: they are counted from both sides."""
        trunk = self._trunk
        counts = dict.fromkeys((State.RECEIVED, State.QUEUED, State.GRANTED, State.STREAMING), 0)
        book, owned = trunk.queue.book, 0
        for live in trunk.ticker.members():
            exchange = live.exchange
            place = exchange.place
            owned += place is not None and (place.number in book.waiting or place.number in book.held)
            if exchange.state in counts:
                counts[exchange.state] += 1
        for state, count in counts.items():
            self._set("signalbox_live_requests", state.value, value=count)
        self._set("signalbox_leaked_leases", value=len(book.waiting) + len(book.held) - owned)
        self._follow("signalbox_leaked_streams", value=trunk.reaper.failed)

    def _queue(self, at: float) -> None:
        queue = self._trunk.queue
        self._set("signalbox_store_up", value=1 if queue.state == "up" else 0)
        self._follow("signalbox_store_rejoins", value=max(0, queue.session.rejoins))
        names = {one.rank: one.name for one in self._trunk.by_rank}
        oldest = {(model, rank): at for model in self._trunk.pools for rank in names}
        left = len(oldest)
        for place in queue.book.waiting.values():  # in the order in which they came
            key = (place.ticket.pool, place.ticket.rank)
            if oldest.get(key) == at:
                oldest[key] = place.since_s
                left -= 1
                if not left:
                    break
        for (model, rank), since in oldest.items():
            self._set("signalbox_queue_oldest_seconds", model, names[rank], value=at - since)

    def _member(self, pool: "Pool", member: "Member", at: float) -> None:
        labels = (pool.model, member.config.name)
        self._set("signalbox_backend_up", *labels, value=member.backend is not None)
        circuit = member.breaker.circuit(at)
        for each in Circuit:
            self._set("signalbox_breaker_processes", *labels, each.value, value=each is circuit)
        self._set("signalbox_backend_streams", *labels, value=member.running)
        self._follow("signalbox_backend_prompt_tokens", *labels, value=member.prefilled_tokens)
        self._follow("signalbox_backend_output_tokens", *labels, value=member.tokens)
        for name, value in _told(member):
            self._set(name, *labels, value=value)
        if member.steps.model.warm:
            learned = member.steps.model.coefficients
            for field in learned.__struct_fields__:
                term, seconds = field.removesuffix("_s"), getattr(learned, field)
                self._set("signalbox_step_coefficient_seconds", *labels, term, value=seconds)

    def _set(self, name: str, *labels: str, value: float) -> None:
        cells = self._gauges.get((name, *labels))
        if cells is None:
            cells = self._gauges[name, *labels] = self._board.own.series(BY_NAME[name], *labels)
        cells[0] = value

    def _follow(self, name: str, *labels: str, value: float) -> None:
        followed = self._followed.get((name, *labels))
        if followed is None:
            cells = self._board.own.series(BY_NAME[name], *labels)
            followed = self._followed[name, *labels] = _Followed(cells)
        followed.follow(value)


@functools.cache
def _statm() -> int:
    """Where Linux tells this process its memory, open for good; 0 elsewhere."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0


def _told(member: "Member") -> Iterator[tuple[str, float]]:
    """What an engine says of itself, as far as it does, and what is foreseen of it, once something is."""
    gauge, learned = member.gauge, member.steps.learned
    said = {
        "signalbox_engine_running": gauge.running,
        "signalbox_engine_waiting": gauge.waiting,
        "signalbox_engine_kv_used_ratio": gauge.kv_used,
        "signalbox_engine_preemptions": gauge.preemptions,
        "signalbox_step_error_ratio": learned.step_error,
        "signalbox_forecast_error_ratio": learned.forecast_error,
    }
    for name, value in said.items():
        if value is not None:
            yield name, value
    yield "signalbox_step_trim_ratio", learned.theta
    yield "signalbox_step_warm", member.steps.model.warm
    yield "signalbox_safety_ratio", learned.safety
    yield "signalbox_kv_deviations", learned.deviations
