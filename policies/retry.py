"""How much trying again a tenant may cause: on another backend before the first chunk, and by its clients."""

import math
from collections import OrderedDict
from typing import Annotated

from msgspec import Meta, Struct

_TRACE = 0.01  # what fades never quite reaches zero
_STEP = 0.01  # of `memory_s`: fading less than this at once is not worth an exponential


class RetryRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[retry]` section: retries may be `share` of a tenant's requests of about the last `memory_s`, and `burst` in
    any case; a request goes to `most_attempts` backends at most.

    The burst is about what one dying engine may hold before its first tokens. Each retry waits for a lease like
    everything else, so it never adds to what the other engines run at once.
    """

    share: Annotated[float, Meta(ge=0, le=1)] = 0.1
    burst: Annotated[int, Meta(ge=0)] = 64
    memory_s: Annotated[float, Meta(gt=0)] = 10.0
    most_attempts: Annotated[int, Meta(ge=1)] = 3


class RetryBudget:
    """Keeps retries from doubling the load of what fails under it. One tenant's; `at` is in seconds of one clock."""

    __slots__ = ("_at", "_requests", "_retries", "rule")

    def __init__(self, rule: RetryRule | None = None) -> None:
        self.rule = rule or RetryRule()
        self._requests = 0.0  # both fade by 1/e in memory_s
        self._retries = 0.0
        self._at = 0.0

    def __repr__(self) -> str:
        return f"<RetryBudget {self._retries:.1f} of {self._room():.1f} used>"

    def request(self, at: float) -> None:
        """A request has come, for the first time."""
        self._fade(at)
        self._requests += 1.0

    def repeat(self, at: float) -> None:
        """A client has sent a request again. Takes from the budget whatever is left: nobody asked first."""
        self._fade(at)
        self._retries = min(self._retries + 1.0, self._room() + 1.0)

    def spent(self, at: float) -> bool:
        """Whether nothing is left, so that clients should be told not to try again."""
        self._fade(at)
        return self._retries + 1.0 > self._room() + _TRACE

    def allows(self, at: float, attempts: int, candidates: int) -> bool:
        """Whether one more attempt may follow `attempts` failed ones, of `candidates` backends. A yes takes it."""
        if attempts >= min(candidates, self.rule.most_attempts):
            return False
        if self.spent(at):
            return False
        self._retries += 1.0
        return True

    def _room(self) -> float:
        return max(float(self.rule.burst), self.rule.share * self._requests)

    def _fade(self, at: float) -> None:
        if at - self._at > _STEP * self.rule.memory_s:
            left = math.exp((self._at - at) / self.rule.memory_s)
            self._requests *= left
            self._retries *= left
            self._at = at


class RetryBudgets:
    """A budget for each tenant. Those of the MOST tenants that asked last are kept; a fresh one has its whole burst."""

    MOST = 4096

    __slots__ = ("_budgets", "rule")

    def __init__(self, rule: RetryRule | None = None) -> None:
        self.rule = rule or RetryRule()
        self._budgets: OrderedDict[str, RetryBudget] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RetryBudgets of {len(self._budgets)} tenants>"

    def of(self, tenant: str) -> RetryBudget:
        """The tenant's budget."""
        budget = self._budgets.get(tenant)
        if budget is None:
            budget = self._budgets[tenant] = RetryBudget(self.rule)
            if len(self._budgets) > self.MOST:
                self._budgets.popitem(last=False)
        else:
            self._budgets.move_to_end(tenant)
        return budget
