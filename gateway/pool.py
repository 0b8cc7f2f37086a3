"""The backends that serve one model name, each kept alive by a keeper of its own."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from backends.bundle import EVERY_FEATURE, Bundle
from backends.features import Feature
from backends.protocol import (
    Backend,
    BackendBusy,
    BackendError,
    BackendLost,
    Gauge,
    Kind,
    Limits,
    Plan,
    Prompt,
    Refused,
)
from gateway.clock import now
from gateway.estimates import Answers, Steps
from gateway.queue.client import BackendShare, PoolShare
from gateway.reaper import Reaper
from gateway.supervisor import Fatal
from policies.breaker import Breaker, Circuit
from policies.reasons import Reason, Refusal

log = logging.getLogger(__name__)

GAUGE_S = 1.0
MISSES = 3  # gauges in a row that may fail before a backend counts as down
SILENT_S = 2.0  # how long streams on a backend that is down may give nothing before they are ended
RECONNECT_S = (0.2, 0.5, 1.0, 2.0, 5.0)
DEFAULT_RUNNING = 64
DEFAULT_CHUNK = 2048
DEFAULT_PREFILL_PER_S = 8_000
DEFAULT_KV_PER_REQUEST = 2_048


class Unservable(Exception):
    """No backend of the pool can take this request; `refusal` says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class BackendConfig(Protocol):
    """A `[[pool.backend]]` of the configuration: it knows how to connect itself."""

    @property
    def name(self) -> str: ...
    @property
    def limits(self) -> Limits: ...
    async def connect(self, model: str) -> Backend: ...


class Member:
    """One backend of a pool over all its connections: what it is set to, what runs on it, whether it may be used."""

    __slots__ = (
        "backend",
        "breaker",
        "config",
        "gauge",
        "kv_tokens",
        "limit",
        "nudge",
        "position",
        "prefilled_tokens",
        "running",
        "steps",
        "tokens",
        "trouble",
    )

    def __init__(self, position: int, config: BackendConfig) -> None:
        self.position = position
        self.config = config
        self.backend: Backend | None = None  # None: not connected, or down
        self.breaker = Breaker()
        self.gauge = Gauge()
        self.steps = Steps()
        self.limit = DEFAULT_RUNNING  # most requests it may run, as the shared queue was told
        self.kv_tokens = 0  # tokens in context of what this process runs on it
        self.prefilled_tokens = 0  # prompt tokens that it ever computed for this process
        self.running = 0  # streams of this process that are open on it
        self.tokens = 0  # output tokens that this process ever had from it
        self.nudge = asyncio.Event()  # a stream saw it die: look now, not at the next second
        self.trouble = "not connected yet"

    def __repr__(self) -> str:
        state = "up" if self.backend else f"down ({self.trouble})"
        return f"<Member {self.config.name} {state}, {self.breaker}, {self.running} running>"

    @property
    def fine(self) -> bool:
        """Up, and nothing is held against it."""
        return self.backend is not None and self.breaker.closed

    def usable(self, at: float) -> bool:
        """Up, and its breaker lets requests through (half open: perhaps one)."""
        return self.backend is not None and self.breaker.circuit(at) is not Circuit.OPEN

    def lost(self, at: float) -> None:
        """A stream or a call found it gone."""
        self.breaker.failure(at)
        self.nudge.set()


class Pool:
    """A model name and its members. Which of them may take a request is decided here, which one does in the queue."""

    def __init__(self, model: str, configs: tuple[BackendConfig, ...], reaper: Reaper) -> None:
        self.model = model
        self.members = [Member(i, config) for i, config in enumerate(configs)]
        self.declare: Callable[[PoolShare], None] = lambda share: None
        self._reaper = reaper
        self.answers = Answers()
        self._every_feature = False
        self._everyone: dict[Kind, tuple[int, ...]] = {}  # all positions, by the APIs that every member serves
        self._planners: tuple[Member, ...] = ()  # who plans while everyone is fine, in this order

    def __repr__(self) -> str:
        up = sum(1 for member in self.members if member.backend)
        return f"<Pool {self.model} {up}/{len(self.members)} up>"

    @property
    def ready(self) -> bool:
        return any(member.backend is not None for member in self.members)

    @property
    def every_feature(self) -> bool:
        """Whether no member is known to lack any feature, so that bodies need not be looked through for them."""
        return self._every_feature

    def share(self) -> PoolShare:
        """What the shared queue is told of this pool."""
        return PoolShare(self.model, tuple(_share(member) for member in self.members))

    def candidates(self, kind: Kind, wanted: dict[Feature, str], tried: set[int]) -> tuple[int, ...]:
        """Positions of the members that could serve this, or the one that it is to probe after a failure.

        Raises Unservable, naming the field that none can honour.
        """
        everyone = self._everyone.get(kind)
        if everyone and not (wanted or tried):
            for member in self.members:
                if not member.fine:
                    break
            else:
                return everyone
        at = now()
        able = self._able(kind, wanted, [member for member in self.members if member.usable(at)], at)
        fresh = [member for member in able if member.position not in tried]
        closed = [member for member in fresh if member.breaker.circuit(at) is Circuit.CLOSED]
        for member in fresh:
            if member not in closed and member.breaker.allows(at):
                return (member.position,)
        if not closed:
            raise Unservable(self._none_left(at))
        return tuple(member.position for member in closed)

    def _able(self, kind: Kind, wanted: dict[Feature, str], up: list[Member], at: float) -> list[Member]:
        if not up:
            raise Unservable(self._none_left(at))
        serving = [member for member in up if kind.value in _bundle(member).kinds]
        if not serving:
            what = f"{self.model} does not serve the {kind.value} API"
            raise Unservable(Refusal(Reason.UNSUPPORTED_FEATURE, what, "model"))
        if not wanted:
            return serving
        lacks = [_bundle(member).lacks(frozenset(wanted)) for member in serving]
        if all(lacks):
            field = wanted[Feature(min(frozenset.intersection(*lacks) or lacks[0]))]
            what = f"{self.model} does not support {field}"
            raise Unservable(Refusal(Reason.UNSUPPORTED_FEATURE, what, field))
        return [member for member, missing in zip(serving, lacks, strict=True) if not missing]

    def _none_left(self, at: float) -> Refusal:
        """503, with the seconds until a breaker may let a probe through, as far as they know."""
        waits = [member.breaker.opens_in_s(at) for member in self.members if member.backend is not None]
        wait_s = max(1.0, min(waits, default=2.0))
        return Refusal(Reason.NO_BACKEND, f"no backend of {self.model} is up", None, wait_s)

    async def plan(self, prompt: Prompt, positions: tuple[int, ...]) -> Plan:
        """A plan by the first member that has the tokenizer, else by the first, that can do what is asked.

        Raises Refused, Unservable.
        """
        unable: Refused | None = None
        members = self._planners if len(positions) == len(self._planners) else self._in_order(positions)
        for member in members:
            if (backend := member.backend) is None:
                continue
            try:
                return await backend.plan(prompt)
            except BackendLost as error:
                log.warning("%s could not plan: %s", member.config.name, error)
                member.lost(now())
            except Refused as no:
                if no.code != Reason.UNSUPPORTED_FEATURE:
                    raise
                unable = unable or no
        if unable is not None:
            raise unable
        raise Unservable(Refusal(Reason.NO_BACKEND, f"no backend of {self.model} is up", None, 1.0))

    def _in_order(self, positions: Iterable[int]) -> tuple[Member, ...]:
        """Those who have the tokenizer come first: their counts are exact."""
        members = [self.members[position] for position in positions]
        return tuple(sorted(members, key=lambda member: not _bundle(member).tokenizer))

    async def keep(self, member: Member) -> None:
        """Connect a member, watch it, and connect it again when it is lost; for ever."""
        attempt = 0
        while True:
            try:
                backend = await member.config.connect(self.model)
            except (BackendLost, BackendError, BackendBusy, Refused, OSError) as error:
                if str(error) != member.trouble:
                    log.warning("backend %s of %s: %s", member.config.name, self.model, error)
                member.trouble = str(error)
                await asyncio.sleep(RECONNECT_S[min(attempt, len(RECONNECT_S) - 1)])
                attempt += 1
                continue
            except (ValueError, ImportError) as error:  # it will not get better by trying again
                raise Fatal(f"backend {member.config.name} of {self.model}: {error}") from error
            attempt = 0
            self._up(member, backend)
            try:
                await self._watch(member, backend)
            except asyncio.CancelledError:
                self._reaper.close(backend.aclose)
                raise
            await backend.aclose()

    def _up(self, member: Member, backend: Backend) -> None:
        member.backend, member.trouble = backend, ""
        member.breaker = Breaker()
        member.limit = member.config.limits.max_running or backend.bundle.max_running or DEFAULT_RUNNING
        self._every_feature = all(EVERY_FEATURE in _bundle(m).features for m in self.members if m.backend)
        kinds = [_bundle(m).kinds for m in self.members if m.backend]
        all_of_them = tuple(range(len(self.members)))
        self._planners = self._in_order(all_of_them)
        self._everyone = {kind: all_of_them for kind in Kind if all(kind.value in served for served in kinds)}
        self.declare(self.share())
        log.info("backend %s of %s is up: %s", backend.name, self.model, backend.bundle)

    async def _watch(self, member: Member, backend: Backend) -> None:
        """Returns when the backend is lost and nothing of ours runs on it any more, or nothing comes of what does."""
        misses, heard, heard_at = 0, 0, 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GAUGE_S):
                    await member.nudge.wait()
            member.nudge.clear()
            missed = await _look(member, backend)
            if not missed:
                if member.backend is None:
                    self._up(member, backend)
                self._learn(member)
                misses = 0
                continue
            misses += missed
            if misses < MISSES:
                continue
            if member.backend is not None:
                log.warning("backend %s of %s is down: %s", backend.name, self.model, member.trouble)
                member.backend = None
                heard_at = now()
            if member.tokens != heard:
                heard, heard_at = member.tokens, now()
            if member.running == 0 or now() - heard_at > SILENT_S:
                return

    def _learn(self, member: Member) -> None:
        """From the steps that the engine reports; the shared queue hears when they changed what is known."""
        member.steps.gauge(member.gauge, member.limit, now())
        told = member.steps.news()
        if told is None:
            return
        if told.steps is not None:
            self.answers.priced_by(told.steps)
        self.declare(self.share())


async def _look(member: Member, backend: Backend) -> int:
    """Read the gauge: 0 if the backend answers, 1 if it fails to, MISSES if it says itself that it is lost."""
    try:
        async with asyncio.timeout(5 * GAUGE_S):
            member.gauge = await backend.gauge()
    except BackendLost as error:
        member.trouble = str(error)
        return MISSES
    except (BackendError, BackendBusy, TimeoutError) as error:
        member.trouble = str(error) or "gave no sign in time"
        return 1
    return 0


def _bundle(member: Member) -> Bundle:
    return (
        member.backend.bundle
        if member.backend
        else Bundle(engine="", model="", features=frozenset(), kinds=frozenset())
    )


def _share(member: Member) -> BackendShare:
    limits, bundle, told = member.config.limits, _bundle(member), member.steps.told
    learned = told.steps
    return BackendShare(
        name=member.config.name,
        max_running=member.limit,
        prefill_tokens_per_s=limits.prefill_tokens_per_s or DEFAULT_PREFILL_PER_S,
        kv_tokens=limits.kv_tokens or bundle.kv_tokens or member.limit * DEFAULT_KV_PER_REQUEST,
        chunk_tokens=limits.chunk_tokens or DEFAULT_CHUNK,
        step_us=round(learned.a0_s * 1e6) if learned else 0,
        prefill_ns=round(learned.a1_s * 1e9) if learned else 0,
        running_us=round(learned.a2_s * 1e6) if learned else 0,
        kv_ns=round(learned.a3_s * 1e9) if learned else 0,
        safety_milli=round(told.safety * 1000),
        kv_deviations_milli=round(told.deviations * 1000),
    )
