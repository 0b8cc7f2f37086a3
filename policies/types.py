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
    the first-token deadline when the ticket is submitted: after that the script does not dispatch it any more.
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
