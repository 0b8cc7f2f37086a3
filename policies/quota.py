"""What a tenant may use at most."""

from typing import Annotated

from msgspec import Meta, Struct

MOST = 1_000_000_000_000
"""The largest limit: sums of it stay exact in the queue's script, whose numbers are doubles."""

Limit = Annotated[int, Meta(ge=0, le=MOST)]


class TenantLimits(Struct, frozen=True, kw_only=True):
    """A tenant's quotas, over all replicas together; 0 is no limit.

    Tokens are prompt and output tokens together. `tokens_in_flight` counts those of requests that an engine has now;
    `max_queued` the requests that may wait.
    """

    requests_per_min: Limit = 0
    tokens_per_min: Limit = 0
    tokens_in_flight: Limit = 0
    max_queued: Limit = 0
