"""How the load of a remote server is read: Prometheus metrics, TensorRT-LLM's iteration statistics, or its health."""

import asyncio
from typing import Literal, Protocol

from backends.openai_probe import DIALECTS, Page, Site, engine_of, kv_tokens, read_gauge, slots
from backends.protocol import BackendError, BackendLost, Gauge
from backends.trtllm_stats import Iterations

Source = Literal["auto", "iterations", "none"]

ITERATIONS_PATH = "/metrics"
ITERATIONS_S = 3.0  # a server that holds its answer back while the engine is busy is not waited for


class Meter(Protocol):
    """`engine` is what the metrics sound like, empty if they don't. Sizes are 0 where they are not said."""

    @property
    def engine(self) -> str: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def max_running(self) -> int: ...

    async def gauge(self) -> Gauge:
        """See `backends.protocol.Backend`."""
        ...


class ByMetrics:
    """Reads Prometheus' text form; a page in none of the known dialects says that the server is well, and no more."""

    def __init__(self, site: Site, path: str, engine: str, text: bytes) -> None:
        self._site, self._path = site, path
        self.engine = engine
        self.kv_tokens, self.max_running = kv_tokens(text), slots(text)

    def __repr__(self) -> str:
        return f"<ByMetrics {self._path} as {self.engine or 'health'}>"

    async def gauge(self) -> Gauge:
        """See `Meter`."""
        page = await _read(self._site, self._path)
        names = DIALECTS.get(self.engine)
        return read_gauge(page.body, names) if names else Gauge()


class ByIterations:
    """Reads trtllm-serve's `/metrics`, which tells each step once: nobody else may read it."""

    engine = "trtllm"
    max_running = 0

    def __init__(self, site: Site, health: str) -> None:
        self._site, self._health = site, health
        self._iterations = Iterations()

    def __repr__(self) -> str:
        return f"<ByIterations {self._iterations!r}>"

    @property
    def kv_tokens(self) -> int:
        """0 until a step said it."""
        return self._iterations.kv_tokens

    async def gauge(self) -> Gauge:
        """See `Meter`. No step since the last gauge means that nothing runs."""
        try:
            async with asyncio.timeout(ITERATIONS_S):
                page = await _read(self._site, ITERATIONS_PATH)
        except TimeoutError:
            await _read(self._site, self._health)
            return self._iterations.gauge()
        told = page.json()
        if not isinstance(told, list):
            raise BackendError(f'{ITERATIONS_PATH} gives no iteration statistics; metrics = "iterations" needs them')
        try:
            self._iterations.add(told)
        except ValueError as error:
            raise BackendError(f"{ITERATIONS_PATH}: {error}") from None
        return self._iterations.gauge(idle=not told)


async def meter(site: Site, source: Source, owner: str) -> Meter:
    """The meter of a server whose models belong to `owner`. Raises BackendLost, BackendError."""
    if source == "iterations":
        return ByIterations(site, await site.health_path())
    if source == "auto":
        # trtllm-serve's /metrics is emptied by reading it: it belongs to whoever was told to
        found = await site.metrics_path(but=ITERATIONS_PATH if engine_of(owner) == "trtllm" else "")
        if found is not None:
            path, engine, text = found
            return ByMetrics(site, path, engine, text)
    return ByMetrics(site, await site.health_path(), "", b"")


async def _read(site: Site, path: str) -> Page:
    page = await site.get(path)
    if page.status != 200:
        raise BackendLost(f"{path} answers {page.status}")
    return page
