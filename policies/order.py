"""Where a ticket stands in its tenant's line: the smallest key goes first.

`hybrid` lies between the earliest deadline and the shortest prompt (Niyama, arXiv 2503.22562): under overload it keeps
more requests on time than either, since one long prompt can make many short ones late. `edf` is the deadline alone,
`fcfs` the order of arrival.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

FCFS_KEY = -1
NO_DEADLINE_MS = 600_000  # a ticket without a deadline stands as if it had this one, so that it is reached at last


class Order(Struct, frozen=True, forbid_unknown_fields=True):
    """The `[order]` section. `alpha_ms` is what a token of prompt to be computed adds to the deadline, in ms: about ten
    times what computing it takes. Anything from 0.5 to 8 did equally well in simulation."""

    kind: Literal["hybrid", "edf", "fcfs"] = "hybrid"
    alpha_ms: Annotated[float, Meta(ge=0, le=1000)] = 1.0

    def key_ms(self, waits_ms: int, uncached_tokens: int) -> int:
        """In ms after now, for a ticket whose first token is due in `waits_ms`; FCFS_KEY for the order of arrival."""
        if self.kind == "fcfs":
            return FCFS_KEY
        due_ms = waits_ms if 0 <= waits_ms <= NO_DEADLINE_MS else 0 if waits_ms < 0 else NO_DEADLINE_MS
        return due_ms if self.kind == "edf" else due_ms + int(self.alpha_ms * uncached_tokens + 0.5)
