"""What service costs a tenant, and how far two tenants may drift apart (VTC, arXiv 2401.00588).

A tenant has a counter for each pool and class. A request charges it when it is dispatched, by its uncached prompt and
its expected output, and is settled to the truth at its end. The tenant with the smallest counter goes next. A weight
divides the prices, so that a tenant of weight 2 is served twice as much before its counter is the same.
"""

from msgspec import Struct

SCALE = 1000  # price units of one prompt token at weight 1: integers that weights can divide
MOST_PRICE = 1_000_000
OUTPUT_RATIOS = (1.0, 8.0)  # an output token costs between so many prompt tokens
OUTPUT_RATIO = 2.0  # until the step times are known


class Prices(Struct, frozen=True):
    """Charge units per token, integers from 1: what a ticket carries."""

    prefill: int
    output: int

    def charge(self, uncached_tokens: float, output_tokens: float) -> float:
        return self.prefill * uncached_tokens + self.output * output_tokens


def prices(weight: float = 1.0, output_ratio: float = OUTPUT_RATIO) -> Prices:
    """Prices for a tenant of a weight; `output_ratio` is what an output token costs in prompt tokens.

    Raises ValueError for a weight or a ratio that is not positive.
    """
    if not weight > 0.0:
        raise ValueError(f"weight must be above 0, not {weight}")
    if not output_ratio > 0.0:
        raise ValueError(f"output_ratio must be above 0, not {output_ratio}")
    return Prices(_price(SCALE / weight), _price(SCALE * output_ratio / weight))


def _price(units: float) -> int:
    return min(max(1, round(units)), MOST_PRICE)


def output_ratio(prefill_s: float, output_s: float) -> float:
    """What an output token costs in prompt tokens, from the marginal seconds of each; within OUTPUT_RATIOS."""
    if prefill_s <= 0.0 or output_s <= 0.0:
        return OUTPUT_RATIO
    low, high = OUTPUT_RATIOS
    return min(max(output_s / prefill_s, low), high)


def settled(counter: int, charged: int, truth: int, virtual: int) -> int:
    """The counter after a request that was charged `charged` turned out to be `truth`.

    No refund takes it below `virtual`, the class's time, where a tenant that comes back from idleness would start;
    unless it is there already. (What it may not take off pays for up to half of each of the next charges.)
    """
    after = counter + truth - charged
    return after if after >= counter else max(after, min(counter, virtual))


def bound(cost: Prices, longest_prompt: int, tokens_in_flight: int) -> int:
    """The most by which the services of two tenants of this price that always have something waiting can differ, in
    charge units: `2·max(w_p·L, w_q·C)`. With weights, take the dearer prices.

    `tokens_in_flight` is the most that one tenant has with the engines at a time, whatever limits it.
    """
    return 2 * max(cost.prefill * longest_prompt, cost.output * tokens_in_flight)
