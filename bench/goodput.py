"""What a run of real requests was worth: the record of each, and the numbers of all.

The numbers have the names and meanings of `bench.sim_metrics`, so that a simulated run and a real one can stand side by
side. The objectives are written as vLLM's and AIPerf's tools write them: `ttft:2000 tpot:100 e2el:60000`, in ms.
"""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from bench.sim_metrics import OUTPUT_WEIGHT, quantile
from policies.types import Objective

GOALS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "total_ms"}
LEVELS = (50, 90, 95, 99)
NOT_YET = -1.0

Numbers = dict[str, float]


class Outcome(enum.StrEnum):
    DONE = "done"
    REFUSED = "refused"  # by an answer that says so, before anything was streamed
    FAILED = "failed"  # a broken stream, an error of the server's, no connection
    LEFT = "left"  # by its client, as planned


class Record(Struct, omit_defaults=True):
    """One request. Times are seconds since the run's begin, NOT_YET where that did not happen.

    `at_s` is when it was planned to come, or, when it was refused and came again, when it came last; `came_s` the first
    of these. `last_s` is that of the last token, `end_s` of the end of the answer. `prompt_tokens`, `output_tokens` and
    `cached_tokens` are what the server counted, where it says (`counted`), else the plan and the chunks seen.
    `lag_s` is by how much it was sent late. `stall_s` is the longest gap between two chunks.
    """

    number: int
    source: str
    at_s: float
    came_s: float
    tenant: str = ""
    klass: str = field(name="class", default="")
    asked_prompt_tokens: int = 0
    asked_output_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    counted: bool = False
    outcome: Outcome = Outcome.FAILED
    status: int = 0
    reason: str = ""
    attempts: int = 1
    lag_s: float = 0.0
    refused_s: float = NOT_YET
    first_s: float = NOT_YET
    last_s: float = NOT_YET
    end_s: float = NOT_YET
    stall_s: float = 0.0

    @property
    def ttft_ms(self) -> float:
        return (self.first_s - self.at_s) * 1000

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first; 0 where there was none."""
        return (self.last_s - self.first_s) * 1000 / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def started(self) -> bool:
        return self.first_s != NOT_YET

    def misses(self, aim: Objective) -> list[str]:
        """The objectives that an answer came too late for."""
        found = []
        if aim.ttft_ms and self.ttft_ms > aim.ttft_ms:
            found.append("ttft")
        if aim.tpot_ms and self.tpot_ms > aim.tpot_ms:
            found.append("tpot")
        if aim.total_ms and (self.end_s - self.at_s) * 1000 > aim.total_ms:
            found.append("e2el")
        return found

    def from_first(self) -> "Record":
        """The same with its times counted from when it came first."""
        return replace(self, at_s=self.came_s)

    def good(self, aim: Objective) -> bool:
        """Answered in full, within all objectives."""
        return self.outcome is Outcome.DONE and self.started and not self.misses(aim)


def goals(words: Iterable[str]) -> Objective:
    """`ttft:2000 tpot:100 e2el:60000`. Raises ValueError, naming the word."""
    found: dict[str, int] = {}
    for word in words:
        name, _, value = word.partition(":")
        if name not in GOALS:
            raise ValueError(f"--goodput: {word!r} is not one of {', '.join(f'{one}:MS' for one in GOALS)}")
        try:
            found[GOALS[name]] = round(float(value))
        except (ValueError, OverflowError):
            raise ValueError(f"--goodput: {word!r} needs a number of milliseconds") from None
        if found[GOALS[name]] < 1:
            raise ValueError(f"--goodput: {word!r} must be above 0")
    return Objective(**found)


def measure(records: Sequence[Record], aims: Mapping[str, Objective], span_s: float) -> dict[str, Any]:
    """The numbers of one run in which requests came for `span_s` seconds; `aims` are objectives by source."""
    staying = [one for one in records if one.outcome is not Outcome.LEFT]
    groups: tuple[tuple[str, Callable[[Record], str]], ...] = (
        ("sources", lambda one: one.source),
        ("tenants", lambda one: one.tenant),
        ("classes", lambda one: one.klass),
    )
    found: dict[str, Any] = {
        "all": _group(staying, aims, span_s)
        | _latencies(staying)
        | _refusals(staying, aims)
        | _halves(staying, aims, span_s)
        | _waste(records, aims)
    }
    for name, key in groups:
        parts = _by(staying, key)
        if len(parts) > 1:
            found[name] = {
                label: _group(part, aims, span_s) | _latencies(part) | _refusals(part, aims) for label, part in parts
            }
    found["quartiles"] = {
        label: _group(part, aims, span_s) | _latencies(part) for label, part in _quartiles(staying)
    }  # fmt: skip
    found["reasons"] = _reasons(staying)
    return found


def tokens(records: Iterable[Record]) -> int:
    """Weighted tokens of answers: a token of output counts as two of the prompt."""
    return sum(one.prompt_tokens + OUTPUT_WEIGHT * one.output_tokens for one in records if one.started)


def _group(records: Sequence[Record], aims: Mapping[str, Objective], span_s: float) -> Numbers:
    good = [one for one in records if one.good(aims[one.source])]
    refused = sum(one.outcome is Outcome.REFUSED for one in records)
    return {
        "requests": len(records),
        "goodput_rps": len(good) / span_s,
        "goodput_tps": tokens(good) / span_s,
        "attained": part(len(good), len(records)),
        "attained_accepted": part(len(good), len(records) - refused),
        "refused": part(refused, len(records)),
        "failed": part(sum(one.outcome is Outcome.FAILED for one in records), len(records)),
    }


def _latencies(records: Sequence[Record]) -> Numbers:
    done = [one for one in records if one.outcome is Outcome.DONE]
    times = {
        "ttft": sorted(one.ttft_ms for one in records if one.started),
        "tpot": sorted(one.tpot_ms for one in done if one.output_tokens > 1),
        "e2el": sorted((one.end_s - one.at_s) * 1000 for one in done),
        "stall": sorted(one.stall_s * 1000 for one in done if one.output_tokens > 1),
    }
    found = {f"{name}_p{level}_ms": quantile(some, level / 100) for name, some in times.items() for level in LEVELS}
    means = {f"{name}_mean_ms": sum(some) / len(some) if some else 0.0 for name, some in times.items()}
    return found | means


def _refusals(records: Sequence[Record], aims: Mapping[str, Objective]) -> Numbers:
    refused = [one for one in records if one.refused_s != NOT_YET]
    waits = [(one.refused_s - one.came_s) * 1000 for one in refused]
    bounded = [
        (one.refused_s - one.came_s) * 1000 / aims[one.source].ttft_ms for one in refused if aims[one.source].ttft_ms
    ]
    again = [one for one in records if one.attempts > 1]
    return {
        "refuse_ms": quantile(waits, 0.5),
        "refuse_p99_ms": quantile(waits, 0.99),
        "refuse_of_deadline": quantile(bounded, 0.5),
        "retried": len(again),
        "retried_done": part(sum(one.outcome is Outcome.DONE for one in again), len(again)),
        "retried_good": part(sum(one.good(aims[one.source]) for one in again), len(again)),
        "retried_good_from_first": part(sum(one.from_first().good(aims[one.source]) for one in again), len(again)),
    }


def _halves(records: Sequence[Record], aims: Mapping[str, Objective], span_s: float) -> Numbers:
    """Prefill and decode apart: tokens a second of each, and which of the objectives was missed by answers."""
    done = [one for one in records if one.outcome is Outcome.DONE]
    missed = [one.misses(aims[one.source]) for one in done]
    return {
        "prompt_tps": sum(one.prompt_tokens for one in records if one.started) / span_s,
        "output_tps": sum(one.output_tokens for one in records) / span_s,
        "cached": part(sum(one.cached_tokens for one in records), sum(one.prompt_tokens for one in done)),
        **{f"{goal}_attained": part(sum(goal not in names for names in missed), len(done)) for goal in GOALS},
        "missed_ttft_only": part(sum(names == ["ttft"] for names in missed), len(done)),
        "missed_tpot_only": part(sum(names == ["tpot"] for names in missed), len(done)),
    }


def _waste(records: Sequence[Record], aims: Mapping[str, Objective]) -> Numbers:
    left = [one for one in records if one.outcome is Outcome.LEFT]
    staying = [one for one in records if one.outcome is not Outcome.LEFT]
    spent = tokens(records)
    return {
        "wasted": part(tokens(one for one in staying if not one.good(aims[one.source])), spent),
        "left": part(len(left), len(records)),
        "spent_on_left": part(tokens(left), spent),
    }


def _reasons(records: Sequence[Record]) -> dict[str, Numbers]:
    """Refusals and failures by reason: how many, and how long until they were told, in ms."""
    ended = [one for one in records if one.outcome in (Outcome.REFUSED, Outcome.FAILED)]
    found = {}
    for reason, some in _by(ended, lambda one: one.reason or "unknown"):
        waits = [(one.end_s - one.at_s) * 1000 for one in some]
        found[reason] = {
            "requests": float(len(some)),
            "of_all": part(len(some), len(records)),
            "after_p50_ms": quantile(waits, 0.5),
            "after_p99_ms": quantile(waits, 0.99),
        }
    return found


def _by(records: Sequence[Record], key: Callable[[Record], str]) -> list[tuple[str, list[Record]]]:
    groups: dict[str, list[Record]] = {}
    for one in records:
        groups.setdefault(key(one), []).append(one)
    return sorted(groups.items())


def _quartiles(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """By prompt length as it was asked for, shortest first."""
    ordered = sorted(records, key=lambda one: (one.asked_prompt_tokens, one.number))
    cuts = [len(ordered) * i // 4 for i in range(5)]
    return [(f"q{i + 1}", ordered[cuts[i] : cuts[i + 1]]) for i in range(4) if cuts[i] < cuts[i + 1]]


def part(some: float, whole: float) -> float:
    return some / whole if whole else 0.0
