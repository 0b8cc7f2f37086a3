"""A deterministic engine that writes synthetic text at the pace of a real one: for planning, demos and tests.

It says what it is in every answer's `system_fingerprint`. The same seed and prompt give the same tokens.
"""

from typing import Annotated

from msgspec import Meta

from backends.bundle import Bundle
from backends.features import Feature
from backends.protocol import BackendError, Gauge, Kind, Limits, Plan, Prompt
from backends.ready import Ready
from backends.simclock import Clockwork
from backends.simengine import Engine, Shape, StepTime
from backends.simplan import Job, Planner
from backends.simstream import SimulatedStream

_Count = Annotated[int, Meta(ge=1)]


class Simulated(StepTime, tag="simulated", tag_field="kind", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulated engine: the step-time numbers of StepTime, its limits, and how long answers are.

    An answer whose length nothing sets has a lognormal length with `output_mean_tokens` and `output_sigma` (of the
    logarithm). `speed` 2 makes every step take half as long. `max_waiting` 0 is no bound; beyond it the engine is busy.
    A hung engine is reported as lost after `watchdog_s`.
    """

    name: Annotated[str, Meta(min_length=1)]
    chunk_tokens: _Count = 512
    max_running: _Count = 64
    max_waiting: Annotated[int, Meta(ge=0)] = 0
    kv_tokens: _Count = 200_000
    kv_block: _Count = 16
    prefix_cache: bool = False
    context_tokens: Annotated[int, Meta(ge=16)] = 8_192
    output_mean_tokens: Annotated[float, Meta(ge=1)] = 150.0
    output_sigma: Annotated[float, Meta(ge=0, le=3)] = 0.8
    embedding_dims: Annotated[int, Meta(ge=1, le=16_384)] = 256
    seed: int = 0
    speed: Annotated[float, Meta(gt=0)] = 1.0
    watchdog_s: Annotated[float, Meta(gt=0)] = 5.0
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if self.kv_tokens // self.kv_block * self.kv_block < self.context_tokens:
            raise ValueError("kv_tokens must hold at least one request of context_tokens, in whole blocks")
        if self.chunk_tokens < self.max_running:
            raise ValueError("chunk_tokens must be at least max_running: each running request decodes one token a step")

    async def connect(self, model: str) -> "SimulatedBackend":
        return SimulatedBackend(self, model)

    @property
    def shape(self) -> Shape:
        return Shape(
            chunk_tokens=self.chunk_tokens,
            max_running=self.max_running,
            kv_tokens=self.kv_tokens,
            kv_block=self.kv_block,
            prefix_cache=self.prefix_cache,
        )


class SimulatedBackend:
    """One running simulated engine. `crash`, `hang` and `resume` are for those who try out faults."""

    def __init__(self, config: Simulated, model: str) -> None:
        self.name = config.name
        self.bundle = Bundle(
            engine="simulated",
            engine_version="1",
            model=model,
            revision=f"seed-{config.seed}",
            tokenizer="simulated",
            context_tokens=config.context_tokens,
            max_running=config.max_running,
            kv_tokens=config.kv_tokens,
            features=frozenset({Feature.CHOICES.value}),
            kinds=frozenset({Kind.CHAT.value, Kind.COMPLETION.value, Kind.EMBEDDINGS.value, Kind.TOKENIZE.value}),
        )
        self._config = config
        self._planner = Planner(config)
        self._clockwork = Clockwork(self._new_engine, config.speed, config.watchdog_s, config.max_waiting)
        self._opened = 0

    def __repr__(self) -> str:
        return f"<SimulatedBackend {self.name}: {self._clockwork}>"

    async def plan(self, prompt: Prompt) -> Plan:
        return self._planner.plan(prompt)

    async def open(self, plan: Plan) -> SimulatedStream | Ready:
        job = plan.work
        if plan.maker != self.name or not isinstance(job, Job):
            raise BackendError(f"{self.name} did not make this plan, or it has been closed")
        self._clockwork.check()
        self._opened += 1
        prompt = plan.prompt
        request_id = prompt.request_id or f"{self.name}-{self._opened}"
        if job.ready is not None:
            return Ready(job.ready)
        return SimulatedStream(self._clockwork, job, prompt, request_id, self.name)

    async def gauge(self) -> Gauge:
        return self._clockwork.gauge()

    async def aclose(self) -> None:
        self._clockwork.stop("the backend was closed", for_good=True)

    def crash(self) -> None:
        """The engine dies: its streams and everything asked of it raise BackendLost until `resume`."""
        self._clockwork.stop("the simulated engine crashed")

    def hang(self) -> None:
        """The engine stops in the middle of a step and says nothing until `resume`."""
        self._clockwork.hang()

    def resume(self) -> None:
        """A hung engine goes on; a crashed one starts again, empty."""
        self._clockwork.resume()

    def _new_engine(self) -> Engine:
        return Engine(self._config.shape, self._config)
