"""What the queue may hand out: of a backend, of a pool, to a tenant; whole, or one of several equal parts.

Parts are for processes that can't confer: each takes itself for one of `parts` that do the same, so a backend has a
part of its room for it, and what it knows to run there stands for `parts` times as much.
"""

from msgspec import Struct

from gateway.queue import wire
from policies.quota import TenantLimits


class BackendShare(Struct, frozen=True):
    """What the queue may hand to one backend. `open` false: no new leases, running ones stay.

    The step time is `step_us` and, more, `prefill_ns` per prompt token, `running_us` per decoding request and `kv_ns`
    per token of their contexts; where the first two are 0, `prefill_tokens_per_s` is all that is known and no pace is
    tested. `safety_milli` is the factor on predicted times, `kv_deviations_milli` how many deviations of the expected
    KV tokens are kept free, both in thousandths.
    """

    name: str
    max_running: int
    prefill_tokens_per_s: int
    kv_tokens: int
    chunk_tokens: int
    open: bool = True
    step_us: int = 0
    prefill_ns: int = 0
    running_us: int = 0
    kv_ns: int = 0
    safety_milli: int = 1150
    kv_deviations_milli: int = 2000


class PoolShare(Struct, frozen=True):
    """The backends of one pool. Grants name a backend by its position here; ledgers follow its name."""

    name: str
    backends: tuple[BackendShare, ...]

    def __post_init__(self) -> None:
        names = [share.name for share in self.backends]
        if not self.name or not all(names):
            raise ValueError(f"pool {self.name!r}: pools and backends need a name")
        if len(set(names)) < len(names):
            raise ValueError(f"pool {self.name!r}: two backends have the same name")


def backend_event(share: BackendShare, parts: int) -> wire.Event:
    """A backend's part as it travels in a declaration."""
    return [
        share.name,
        part(share.max_running, parts),
        part(share.prefill_tokens_per_s, parts),
        part(share.kv_tokens, parts),
        part(share.chunk_tokens, parts),
        int(share.open),
        share.step_us,
        share.prefill_ns * parts,
        share.running_us * parts,
        share.kv_ns * parts,
        share.safety_milli,
        share.kv_deviations_milli,
    ]


def tenant_event(name: str, limits: TenantLimits, parts: int) -> wire.Event:
    """A tenant's part as it travels in a declaration."""
    return [
        wire.TENANT,
        name,
        part(limits.requests_per_min, parts),
        part(limits.tokens_per_min, parts),
        part(limits.tokens_in_flight, parts),
        part(limits.max_queued, parts),
    ]


def part(limit: int, parts: int) -> int:
    """One of `parts` equal parts, at least 1; of 0, which is often no limit, 0."""
    return max(1, limit // parts) if limit else 0
