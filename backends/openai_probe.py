"""What an OpenAI-compatible server says about itself: its models, version, APIs and metrics."""

import re
from typing import Any

import msgspec
from msgspec import Struct

from backends.http1 import Asked, Pool
from backends.http1_errors import HttpError
from backends.openai_stream import as_backend_error, whole_body
from backends.protocol import PATHS, BackendError, BackendLost, Gauge, Kind

PAGE_BYTES = 16 * 1024 * 1024
PROBE_S = 10.0  # for the first byte of anything that costs the server nothing
METRICS_PATHS = ("/metrics", "/metrics/", "/prometheus/metrics")
HEALTH_PATHS = ("/health", "/v1/models")


class ModelCard(Struct, frozen=True):
    """One entry of `/v1/models`. `context_tokens` is 0 where it is not said."""

    id: str
    owner: str = ""
    context_tokens: int = 0


class Page(Struct, frozen=True):
    """A whole answer to a GET."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    def json(self) -> Any:
        """The body decoded, None where it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return None


class Names(Struct, frozen=True):
    """What an engine calls the things a gauge is made of; empty where it does not say."""

    running: str
    waiting: str
    kv_used: str
    preemptions: str = ""


DIALECTS: dict[str, Names] = {
    "vllm": Names(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
    ),
    "sglang": Names(
        "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "sglang:num_retracted_reqs"
    ),
    "llama.cpp": Names("llamacpp:requests_processing", "llamacpp:requests_deferred", "llamacpp:kv_cache_usage_ratio"),
    "trtllm": Names(
        "trtllm_num_requests_running",
        "trtllm_num_requests_waiting",
        "trtllm_kv_cache_utilization",
    ),
}
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "llama.cpp": "llama.cpp", "tensorrt": "trtllm"}


class Site:
    """The pages of one server, read over a pool of connections."""

    def __init__(self, pool: Pool, authorization: str) -> None:
        self.pool = pool
        self._tail = (
            f"host: {pool.origin.authority}\r\nuser-agent: signalbox\r\naccept: */*\r\n{authorization}\r\n".encode()
        )

    async def get(self, path: str) -> Page:
        """Read one page. Raises BackendLost, BackendError."""
        head = f"GET {self.pool.origin.prefix}{path} HTTP/1.1\r\n".encode() + self._tail
        asked: Asked | None = None
        try:
            asked = await self.pool.ask(head, first_byte_s=PROBE_S)
            answer = await asked.answered()
            return Page(answer.status, answer.headers, await whole_body(answer, PAGE_BYTES))
        except HttpError as error:
            raise as_backend_error(error) from error
        finally:
            if asked is not None:
                asked.release()

    async def models(self) -> list[ModelCard]:
        """What the server lists. Raises BackendLost, BackendError."""
        page = await self.get("/v1/models")
        where = f"{self.pool.origin}/v1/models"
        if page.status in (401, 403):
            raise BackendError(f"{where} answers {page.status}: check api_key_env or api_key_file")
        if page.status in (502, 503, 504):
            raise BackendLost(f"{where} answers {page.status}: not ready")
        answer = page.json()
        data = answer.get("data") if isinstance(answer, dict) else None
        if page.status != 200 or not isinstance(data, list):
            raise BackendError(f"{where} answers {page.status} and no list of models: is the url right?")
        return [_card(one) for one in data if isinstance(one, dict) and isinstance(one.get("id"), str)]

    async def version(self) -> str:
        """What `/version` says, empty where there is none."""
        answer = (await self.get("/version")).json()
        version = answer.get("version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else ""

    async def paths(self) -> frozenset[str]:
        """The paths in its OpenAPI description, empty where there is none."""
        page = await self.get("/openapi.json")
        answer = page.json() if page.status == 200 else None
        paths = answer.get("paths") if isinstance(answer, dict) else None
        return frozenset(paths) if isinstance(paths, dict) else frozenset()

    async def metrics_path(self, but: str = "") -> tuple[str, str, bytes] | None:
        """Where its metrics are, in whose words, and what they say now; None where there are none that we know.

        `but` is a page that is left alone.
        """
        for path in METRICS_PATHS:
            if but and path.rstrip("/") == but:
                continue
            page = await self.get(path)
            if page.status != 200:
                continue
            for engine, names in DIALECTS.items():
                if samples(page.body, names.running):
                    return path, engine, page.body
        return None

    async def health_path(self) -> str:
        """A page that answers 200 when the server is well."""
        return "/health" if (await self.get("/health")).status == 200 else "/v1/models"


def engine_of(owner: str) -> str:
    """The engine that a model card's `owned_by` hints at, else `unknown`."""
    low = owner.lower()
    return next((engine for word, engine in _OWNERS.items() if word in low), "unknown")


def kinds_of(paths: frozenset[str]) -> dict[Kind, str]:
    """The APIs among a server's paths, each with its path; chat and completions where it describes none."""
    if not paths:
        return {kind: PATHS[kind] for kind in (Kind.CHAT, Kind.COMPLETION)}
    found = {kind: path for kind, path in PATHS.items() if path in paths}
    if "/tokenize" in paths:
        found[Kind.TOKENIZE] = "/tokenize"
    return found


def read_gauge(text: bytes, names: Names) -> Gauge:
    """A gauge out of metrics in Prometheus' text form; several engines of one server are added up."""
    running, waiting = samples(text, names.running), samples(text, names.waiting)
    kv, lost = samples(text, names.kv_used), samples(text, names.preemptions)
    return Gauge(
        running=int(sum(running)) if running else None,
        waiting=int(sum(waiting)) if waiting else None,
        kv_used=max(kv) if kv else None,
        preemptions=int(sum(lost)) if lost else None,
    )


def samples(text: bytes, name: str) -> list[float]:
    """The values of one metric, over all its labels."""
    if not name:
        return []
    line = re.compile(rb"^" + re.escape(name.encode()) + rb"(?:\{.*\})?[ \t]+([-+0-9.eE]+)", re.MULTILINE)
    found: list[float] = []
    for value in line.findall(text):
        try:
            found.append(float(value))
        except ValueError:
            continue
    return found


def kv_tokens(text: bytes) -> int:
    """The size of the KV cache in tokens, as vLLM and trtllm-serve say it; 0 where it is not said."""
    total = 0
    for labels in re.findall(rb"^vllm:cache_config_info\{(.*)\}", text, re.MULTILINE):
        blocks = re.search(rb'num_gpu_blocks="(\d+)"', labels)
        size = re.search(rb'block_size="(\d+)"', labels)
        if blocks and size:
            total += int(blocks[1]) * int(size[1])
    pairs = zip(
        samples(text, "trtllm_kv_cache_max_blocks"), samples(text, "trtllm_kv_cache_tokens_per_block"), strict=False
    )
    return total + sum(int(blocks * size) for blocks, size in pairs)


def slots(text: bytes) -> int:
    """How many requests the engine runs at once, as trtllm-serve says it; 0 where it is not said."""
    return int(sum(samples(text, "trtllm_max_batch_size_static")))


def _card(entry: dict[str, Any]) -> ModelCard:
    length = entry.get("max_model_len")
    if not isinstance(length, int) and isinstance(meta := entry.get("meta"), dict):
        length = meta.get("n_ctx")
    owner = entry.get("owned_by")
    return ModelCard(entry["id"], owner if isinstance(owner, str) else "", length if isinstance(length, int) else 0)
