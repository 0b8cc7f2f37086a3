"""The answer of `signalbox explain`: its shape, and how it is printed."""

import math

from msgspec import Struct

from policies.forecast import Due
from policies.reasons import Reason


class Line(Struct, frozen=True):
    """One test: holds if `predicted` is at most `limit`. `backend` is empty for the queue and the tenant; `answer` is
    what the queue says where it does not hold: a refusal's reason, or `waits`."""

    backend: str
    test: str
    predicted: float
    limit: float
    unit: str
    terms: dict[str, float]
    answer: str = "waits"

    @property
    def ok(self) -> bool:
        return self.predicted <= self.limit


class Request(Struct, frozen=True):
    """What was asked, in tokens and seconds; the class is the one it would be served in."""

    model: str
    tenant: str
    service: str
    rank: int
    prompt_tokens: int
    uncached_tokens: int
    output_tokens: int
    output_high: int
    due: Due


class Order(Struct, frozen=True):
    """Its place in the tenant's line, in ms after its arrival (-1: order of arrival), and what it costs the tenant."""

    kind: str
    key_ms: int
    weight: float
    prefill_price: int
    output_price: int
    charge: int


class Answer(Struct, frozen=True, kw_only=True):
    """`verdict` is `starts`, `waits` or `refused`. `retry_after_s` is without jitter, 0 where there is none or, for
    `queue_full` and `overloaded`, it depends on more than was asked."""

    verdict: str
    reason: Reason | None
    status: int
    retry_after_s: float
    request: Request
    order: Order
    tests: list[Line]


HEAD = ("test", "backend", "predicted", "", "limit", "", "if not", "from")


def printed(answer: Answer) -> str:
    """A few lines on the request, a table of tests, the verdict."""
    asked, order = answer.request, answer.order
    due = asked.due
    key = "order of arrival" if order.key_ms < 0 else f"{order.key_ms:,} ms after arrival"
    rows = [HEAD, *(_row(line) for line in answer.tests)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEAD))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines = [
        f"request  {asked.model}, tenant {asked.tenant}, class {asked.service} (rank {asked.rank}):"
        f" {asked.prompt_tokens:,} prompt tokens, {asked.uncached_tokens:,} to compute,"
        f" {asked.output_tokens:,} expected out, nine in ten within {asked.output_high:,}",
        f"due      first token {_time(due.first_token_s)}, each token {_time(due.tpot_s)}, all {_time(due.total_s)}",
        f"order    key {key} ({order.kind}); charge {order.charge:,} = {order.prefill_price}"
        f" x {asked.uncached_tokens:,} + {order.output_price} x {asked.output_tokens:,} (weight {order.weight:g})",
        "",
        *table,
        "",
        f"verdict  {_verdict(answer)}",
    ]
    return "\n".join(lines)


def _row(line: Line) -> tuple[str, ...]:
    terms = ", ".join(f"{name} {value:.6g}" for name, value in line.terms.items())
    sign = "<=" if line.ok else "> "
    limit = "none" if line.limit == math.inf else f"{line.limit:,.6g} {line.unit}"
    return (
        line.test,
        line.backend,
        f"{line.predicted:,.6g}",
        sign,
        limit,
        "" if line.ok else "FAILS",
        line.answer,
        terms,
    )


def _time(seconds: float) -> str:
    return "any" if seconds == math.inf else f"{seconds:,.6g} s"


def _verdict(answer: Answer) -> str:
    if answer.verdict == "starts":
        return "accepted, starts at once"
    if answer.verdict == "waits":
        return "accepted, waits"
    after = f", retry after {answer.retry_after_s:.3g} s" if answer.retry_after_s else ""
    return f"refused: {answer.reason} ({answer.status}){after}"
