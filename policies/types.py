"""What a scheduler reasons about: classes, objectives, tenants and tickets."""

from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]


class Objective(Struct, frozen=True):
    """When an answer is on time, in milliseconds from the request's first byte; 0 is no objective."""

    ttft_ms: int = 0
    tpot_ms: int = 0
    total_ms: int = 0


class ServiceClass(Struct, frozen=True, forbid_unknown_fields=True):
    """A class of service. Rank 0 goes first. `keep_alive_s` > 0 sends SSE comments through a silent wait."""

    name: str
    rank: Annotated[int, Meta(ge=0, le=9)]
    ttft_ms: Annotated[int, Meta(ge=0)] = 10_000
    tpot_ms: Annotated[int, Meta(ge=0)] = 0
    total_ms: Annotated[int, Meta(ge=0)] = 600_000
    keep_alive_s: Annotated[float, Meta(ge=0)] = 0.0

    @property
    def objective(self) -> Objective:
        return Objective(self.ttft_ms, self.tpot_ms, self.total_ms)


class Ticket(Struct, frozen=True):
    """One request's place in the shared queue, as the queue's script sees it. All numbers are integers.

    `backends` are positions in the pool's declaration, best first; empty means any. `waits_ms` is what remains until
    the first-token deadline when the ticket is submitted: after that the script does not dispatch it any more;
    `total_ms` likewise until the last token, 0 for no such deadline.

    `uncached_tokens` of the prompt are to be computed (-1: all). `output_tokens` is the expected length of the answer,
    `output_variance` its variance in tokens squared, `output_high` what nine in ten answers stay within (0: the
    expected). `key_ms` is the place within the tenant's line, in ms after now (-1: order of arrival; see
    `policies.order`); the prices are what a token costs the tenant's counter (see `policies.fairness`). `billed` false
    is a retry or a re-declaration, which is not held against the tenant's quota again. `identity`, if any, is what the
    request is known by among its tenant's when it comes again: it then has the deadlines it had first.
    """

    tenant: str
    rank: int
    pool: str
    prompt_tokens: int
    output_tokens: int
    waits_ms: int
    total_ms: int = 0
    tpot_ms: int = 0
    backends: tuple[int, ...] = ()
    retry: bool = False
    uncached_tokens: int = -1
    output_variance: int = 0
    output_high: int = 0
    key_ms: int = -1
    prefill_price: int = 1
    output_price: int = 2
    billed: bool = True
    identity: str = ""
