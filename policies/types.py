"""What a scheduler reasons about: classes, objectives, tenants and tickets."""

from typing import Annotated

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]

LONGEST_WAIT_MS = 86_400_000  # a deadline further away is none


class Objective(Struct, frozen=True):
    """When an answer is on time, in milliseconds from the request's first byte; 0 is no objective."""

    ttft_ms: int = 0
    tpot_ms: int = 0
    total_ms: int = 0


class ServiceClass(Struct, frozen=True, forbid_unknown_fields=True):
    """A class of service. Rank 0 goes first. `keep_alive_s` > 0 sends SSE comments through a silent wait.

    `shed_after` is the part of a request's time to the first token that it may have waited. When a third of those that
    leave the queue have waited longer, forecasts are wrong, and part of what comes is refused. 0 never refuses any.
    """

    name: str
    rank: Annotated[int, Meta(ge=0, le=9)]
    ttft_ms: Annotated[int, Meta(ge=0)] = 10_000
    tpot_ms: Annotated[int, Meta(ge=0)] = 0
    total_ms: Annotated[int, Meta(ge=0)] = 600_000
    keep_alive_s: Annotated[float, Meta(ge=0)] = 0.0
    shed_after: Annotated[float, Meta(ge=0, le=1)] = 0.95

    @property
    def objective(self) -> Objective:
        return Objective(self.ttft_ms, self.tpot_ms, self.total_ms)

    def target_ms(self, waits_ms: int) -> int:
        """How long a request whose first token is due in `waits_ms` may wait; 0, for ever, where it need not come."""
        return int(self.shed_after * waits_ms) if waits_ms <= LONGEST_WAIT_MS else 0


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
    request is known by among its tenant's when it comes again: it then has the deadlines it had first. `target_ms` is
    how long it may wait before it counts as late for the last defences (see `ServiceClass.target_ms`; 0: for ever).
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
    target_ms: int = 0
