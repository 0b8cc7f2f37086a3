"""What Triton's metrics page says of one TensorRT-LLM model."""

import re

from msgspec import Struct

from backends.protocol import Gauge

_REQUESTS = ("nv_trt_llm_request_metrics", "request_type")
_BLOCKS = ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type")
_BATCHER = ("nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric")
_PENDING = "nv_inference_pending_request_count"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Sizes(Struct, frozen=True):
    """How large the engine is, 0 where it does not say: requests at once, KV cache in tokens and in tokens a block."""

    slots: int = 0
    kv_tokens: int = 0
    tokens_per_block: int = 0


class Page:
    """The samples of one engine model, and those of the models in front of it."""

    def __init__(self, text: bytes, engine: str, entry: str) -> None:
        self._engine, self._names = engine, {engine, entry}
        self._values: dict[tuple[str, str], float] = {}
        self._pending: dict[str, int] = {}
        for line in text.decode("utf-8", "replace").splitlines():
            if line.startswith("nv_"):
                self._read(line)

    @property
    def speaks(self) -> bool:
        """Whether TensorRT-LLM's own numbers are there."""
        return any(family == _REQUESTS[0] for family, _ in self._values)

    def sizes(self) -> Sizes:
        """What does not change while it runs."""
        per_block = int(self._get(_BLOCKS, "tokens_per") or 0)
        blocks = int(self._get(_BLOCKS, "max") or 0)
        return Sizes(int(self._get(_REQUESTS, "max") or 0), blocks * per_block, per_block)

    def gauge(self) -> Gauge:
        """What runs and waits, in the engine and in Triton's own queue before it."""
        scheduled, active = self._get(_REQUESTS, "scheduled"), self._get(_REQUESTS, "active")
        waiting = self._get(_REQUESTS, "waiting")
        if waiting is None and active is not None and scheduled is not None:
            waiting = max(0.0, active - scheduled)
        queued = sum(self._pending.values()) if self._pending else None
        paused = self._get(_BATCHER, "paused_requests")
        return Gauge(
            running=None if scheduled is None else int(scheduled),
            waiting=None
            if waiting is None and queued is None
            else int(waiting or 0) + int(queued or 0) + int(paused or 0),
            kv_used=self._get(_BLOCKS, "fraction"),
        )

    def _get(self, family: tuple[str, str], kind: str) -> float | None:
        return self._values.get((family[0], kind))

    def _read(self, line: str) -> None:
        head, _, value = line.rpartition(" ")
        name, _, rest = head.partition("{")
        labels = dict(_LABEL.findall(rest))
        try:
            number = float(value)
        except ValueError:
            return
        if labels.get("model") not in self._names:
            return
        if name == _PENDING:
            self._pending[labels["model"]] = self._pending.get(labels["model"], 0) + int(number)
        elif labels["model"] == self._engine:
            for family, label in (_REQUESTS, _BLOCKS, _BATCHER):
                if name == family:
                    self._values[family, labels.get(label, "")] = number
