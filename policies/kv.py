"""How many tokens of keys and values fit on a backend, and how many its requests will need at once.

The peak formula is Past-Future's (LightLLM, arXiv 2507.10150). Sums over many requests are taken as mean plus `z`
deviations, since adding up a high quantile of each reserves far too much (research: 1.3 to 2.1 times the truth).
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

FEW = 8  # requests below which a sum is not near a normal distribution: the sum of q90 instead
STALE_ROOM = 0.8  # part of the budget used while the engine says nothing
MINUTE_S = 60.0

DTYPE_BYTES = {"float32": 4, "float16": 2, "half": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


class KvShape(Struct, frozen=True, kw_only=True):
    """What one token keeps in each layer: keys and values of `kv_heads` heads, or with MLA one latent vector.

    `latent_dim` > 0 is multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): `latent_dim` is the compressed
    vector with the rotary part, shared by all heads. `ranks` is the tensor-parallel width: heads are split over the
    ranks (and repeated where there are fewer heads than ranks), a latent vector lies whole on each.
    """

    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    dtype_bytes: int = 2
    latent_dim: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        heads = () if self.latent_dim > 0 else ("kv_heads", "head_dim")
        for field in ("layers", "dtype_bytes", "ranks", *heads):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes on each rank."""
        per_layer = (
            self.latent_dim if self.latent_dim > 0 else 2 * math.ceil(self.kv_heads / self.ranks) * self.head_dim
        )
        return self.layers * per_layer * self.dtype_bytes


def shape_from_config(config: Mapping[str, Any], kv_dtype: str = "auto", ranks: int = 1) -> KvShape:
    """The shape in a model's config.json (Hugging Face names). `kv_dtype` "auto" is the model's own.

    Raises ValueError naming the field that is missing or cannot be read.
    """
    layers = _whole(config, "num_hidden_layers")
    name = kv_dtype
    if name == "auto":
        name = config.get("dtype") or config.get("torch_dtype") or ""
    if name not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise ValueError(f"{'dtype' if kv_dtype == 'auto' else 'kv_dtype'} must be one of {known}, not {name!r}")
    width = DTYPE_BYTES[name]
    if config.get("kv_lora_rank"):
        latent = _whole(config, "kv_lora_rank") + _whole(config, "qk_rope_head_dim")
        return KvShape(layers=layers, latent_dim=latent, dtype_bytes=width, ranks=ranks)
    heads = _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    head_dim = _whole(config, "head_dim") if config.get("head_dim") else _whole(config, "hidden_size") // heads
    return KvShape(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype_bytes=width, ranks=ranks)


def _whole(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{field} must be a whole number of at least 1 in the model's config, not {value!r}")
    return value


class Memory(Struct, frozen=True, kw_only=True):
    """The memory of one accelerator, in bytes. `headroom` is the part of the KV cache that no plan fills."""

    memory_bytes: int
    weights_bytes: int
    activations_bytes: int = 0
    overhead_bytes: int = 0
    headroom: float = 0.05

    def __post_init__(self) -> None:
        if not 0.0 <= self.headroom < 1.0:
            raise ValueError(f"headroom must be at least 0 and below 1, not {self.headroom}")


class KvBudget(Struct, frozen=True):
    """In tokens, whole blocks: `capacity` is what the engine should hold, `budget` what may be planned with."""

    capacity_tokens: int
    budget_tokens: int


def kv_budget(memory: Memory, shape: KvShape, block_tokens: int) -> KvBudget:
    """What remains for keys and values. Raises ValueError with all the terms where nothing does."""
    taken = memory.weights_bytes + memory.activations_bytes + memory.overhead_bytes
    capacity = floored((memory.memory_bytes - taken) // shape.bytes_per_token, block_tokens)
    budget = floored(int(capacity * (1.0 - memory.headroom)), block_tokens)
    if budget <= 0:
        raise ValueError(
            f"no room for keys and values: memory_bytes {memory.memory_bytes} less weights_bytes"
            f" {memory.weights_bytes}, activations_bytes {memory.activations_bytes} and overhead_bytes"
            f" {memory.overhead_bytes} leaves {memory.memory_bytes - taken} bytes, and a block of {block_tokens} tokens"
            f" takes {block_tokens * shape.bytes_per_token}"
        )
    return KvBudget(capacity, budget)


class KvMismatch(ValueError):
    """The engine's KV cache is not what the configuration says."""


def check_reported(expected_tokens: int, reported_tokens: int, tolerance: float = 0.1) -> None:
    """Raises KvMismatch, naming both, when what the engine reports is further off than `tolerance` of what it should
    hold. Also when it holds more: then the configuration is of another model or machine."""
    if abs(reported_tokens - expected_tokens) > tolerance * expected_tokens:
        raise KvMismatch(
            f"the engine reports room for {reported_tokens} KV tokens, the configuration gives {expected_tokens}"
            f" ({reported_tokens / max(expected_tokens, 1):.2f} times; tolerated is {tolerance:.0%} either way)"
        )


def rounded(tokens: float, block_tokens: int) -> int:
    """Tokens of the blocks that `tokens` occupy."""
    return math.ceil(tokens / block_tokens) * block_tokens


def floored(tokens: int, block_tokens: int) -> int:
    """Tokens of the whole blocks within `tokens`. Raises ValueError for a block of none."""
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
    return tokens // block_tokens * block_tokens


def peak_tokens(running: Iterable[tuple[float, float]], block_tokens: int = 1) -> int:
    """The most that a running set will hold at once, if each ends when it is expected to.

    `running` are (tokens held, tokens still to come). Sorted by what is to come, longest first: when the i-th ends,
    the i longest hold what they hold now and i times its remainder. O(n log n).
    """
    held, most = 0, 0
    by_end = sorted(running, key=lambda one: -one[1])
    for count, (tokens, remaining) in enumerate(by_end, 1):
        held += rounded(tokens, block_tokens)
        most = max(most, held + count * rounded(remaining, block_tokens))
    return most


class KvSums(Struct, frozen=True):
    """What requests are expected to hold when each is longest, added up: what a ledger can keep without the list.

    An upper bound of `peak_tokens`, since they do not all end together. `variance` is in tokens squared.
    """

    requests: int = 0
    mean_tokens: float = 0.0
    variance: float = 0.0
    q90_tokens: float = 0.0

    def plus(self, mean_tokens: float, variance: float, q90_tokens: float) -> "KvSums":
        """With one request more."""
        return KvSums(
            self.requests + 1,
            self.mean_tokens + mean_tokens,
            self.variance + variance,
            self.q90_tokens + q90_tokens,
        )

    def need(self, z: float) -> float:
        """Tokens to keep free: mean and `z` deviations, or the sum of q90 while they are fewer than FEW."""
        if self.requests < FEW:
            return self.q90_tokens
        return self.mean_tokens + z * math.sqrt(self.variance)


def usable_tokens(budget_tokens: int, ledger_tokens: int, reported_tokens: int | None) -> int:
    """The budget less what the engine holds and the ledger does not know of (other clients, a prefix cache in use).

    None is an engine that does not say, or said too long ago: a fifth less, since unknown is not free.
    """
    if reported_tokens is None:
        return int(STALE_ROOM * budget_tokens)
    return max(0, budget_tokens - max(0, reported_tokens - ledger_tokens))


class Deviations:
    """`z`, how many deviations to keep free: starts at 2, two preemptions in a minute add 0.5, ten quiet minutes take
    0.1. Between 0 and 6."""

    START, RISE, FALL, MOST, QUIET_S = 2.0, 0.5, 0.1, 6.0, 600.0

    __slots__ = ("_first_at", "_quiet_since", "z")

    def __init__(self, now: float) -> None:
        self.z = self.START
        self._quiet_since = now
        self._first_at: float | None = None  # a preemption that has not counted yet

    def __repr__(self) -> str:
        return f"<Deviations {self.z:.1f}>"

    def observe(self, preemptions: int, now: float) -> float:
        """Tell of `preemptions` since the last call, also of none, at `now` in seconds. Returns z."""
        if preemptions > 0:
            self._quiet_since = now
            paired = self._first_at is not None and now - self._first_at <= MINUTE_S
            if preemptions > 1 or paired:
                self.z = min(self.MOST, self.z + self.RISE)
                self._first_at = None
            else:
                self._first_at = now
        elif now - self._quiet_since >= self.QUIET_S:
            self.z = max(0.0, self.z - self.FALL)
            self._quiet_since = now
        return self.z
