"""`signalbox explain`: what the queue would say to a request under a load, with the numbers of each test.

Nothing is asked or started: the request and the load come from the command line, the limits from the configuration. The
times are those of `policies.forecast`, set up like the queue's script: the same safety and rooms, no pace where no step
times are known.
"""

import argparse
import math
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from backends.simulated import Simulated
from gateway.config import Config, ConfigError, TenantConfig, models
from gateway.estimates import MOST_OUTPUT
from gateway.explain_text import Answer, Line, Order, Request
from gateway.http import wire
from gateway.http.errors import STATUS
from gateway.job import NO_DEADLINE_MS
from gateway.pool import DEFAULT_RUNNING, Pool
from gateway.queue.client import BackendShare
from gateway.reaper import Reaper
from policies.fairness import prices
from policies.forecast import (
    REFUSES,
    Ahead,
    Check,
    Demand,
    Due,
    Load,
    Verdict,
    forecast,
    idle_tests,
    kv_test,
    load_tests,
    pace_test,
    total_test,
)
from policies.kv import FEW, KvSums
from policies.lengths import Kind, Lengths, Outlook
from policies.prompts import PromptRatio
from policies.quota import Minute
from policies.reasons import Reason
from policies.steptime import Coefficients, StepModel
from policies.types import ServiceClass

KV_ROOM = 0.95  # part of the KV tokens that may be planned with
WINDOW = 2  # chunks of prompt that may be outstanding on a backend
LIKELY = 50  # percent: who is refused by chance gets the likelier answer


class Asked(Struct, frozen=True, kw_only=True):
    """The request, read."""

    config: Config
    model: str
    tenant: TenantConfig
    service: ServiceClass
    demand: Demand
    tpot_ms: int
    waits_ms: int


def explain(config: Config, args: argparse.Namespace) -> Answer:
    """Every test in the order of the queue, and its answer. Raises ConfigError for what cannot be meant."""
    asked = _asked(config, args)
    shares = _shares(config, asked.model)
    ahead_tokens = args.ahead_tokens or args.waiting_ahead * asked.demand.uncached_tokens
    rates = sum(share.prefill_tokens_per_s for share in shares)
    lines: list[Line] = list(_quota(asked, args))
    for share in shares:
        part = share.prefill_tokens_per_s / rates
        ahead = Ahead(ahead_tokens * part, args.waiting_ahead * part)
        lines += _on_backend(share, asked, args, ahead)
    lines += _places(asked, args)
    return _answer(asked, args, lines)


# the request


def _asked(config: Config, args: argparse.Namespace) -> Asked:
    seen, prompt = _body(args)
    known = models(config)
    name = args.model or (seen.model if seen else config.pools[0].model)
    if not (args.model or seen) and len(config.pools) > 1:
        raise ConfigError("--model", f"there are {len(config.pools)} pools: name one of {', '.join(known)}")
    if name not in known:
        raise ConfigError("--model", f"there is no model {name!r}; there is {', '.join(known)}")
    tenant = _tenant(config, args.tenant)
    if tenant.models and known[name] not in {known[each] for each in tenant.models}:
        raise ConfigError("--tenant", f"{tenant.name!r} may not use {name!r}")
    service = _service(config, tenant, seen, args.service)
    limit = args.max_tokens or (wire.output_limit(seen) if seen else 0)
    goal = (args.ttft_ms or service.ttft_ms, args.tpot_ms or service.tpot_ms, args.deadline_ms or service.total_ms)
    waits_ms = min([each for each in (goal[0], goal[2]) if each], default=NO_DEADLINE_MS)
    due = Due(
        waits_ms / 1000 if waits_ms < NO_DEADLINE_MS else math.inf,
        goal[1] / 1000 if goal[1] else math.inf,
        goal[2] / 1000 if goal[2] else math.inf,
    )
    if args.cached_tokens > prompt:
        raise ConfigError("--cached-tokens", f"the prompt has {prompt} tokens, {args.cached_tokens} can't be cached")
    demand = Demand(prompt, max(min(1, prompt), prompt - args.cached_tokens), _outlook(args, limit), due)
    return Asked(
        config=config,
        model=known[name],
        tenant=tenant,
        service=service,
        demand=demand,
        tpot_ms=goal[1],
        waits_ms=waits_ms,
    )


def _body(args: argparse.Namespace) -> tuple[wire.Peek | None, int]:
    """What a file says, and how many tokens the prompt has."""
    if args.file is None:
        return None, args.prompt_tokens
    try:
        raw = args.file.read_bytes()
        return wire.peek(raw), PromptRatio().tokens(len(raw)).likely
    except OSError as error:
        raise ConfigError("--file", f"{args.file}: {error.strerror or error}") from None
    except wire.Malformed as error:
        raise ConfigError("--file", f"{args.file}: {error}") from None


def _tenant(config: Config, name: str | None) -> TenantConfig:
    if name is None:
        return TenantConfig(name="default")
    for tenant in config.tenants:
        if tenant.name == name:
            return tenant
    known = ", ".join(tenant.name for tenant in config.tenants) or "none"
    raise ConfigError("--tenant", f"there is no tenant {name!r} in the configuration; there is {known}")


def _service(config: Config, tenant: TenantConfig, seen: wire.Peek | None, name: str | None) -> ServiceClass:
    default = config.class_named(config.default_class)
    assert default is not None  # the configuration was checked
    header = name.encode() if name is not None else None
    try:
        asked = wire.service_class(
            seen or wire.Peek(model=""), header, {each.name: each for each in config.classes}, default
        )
    except wire.Malformed as error:
        raise ConfigError("--class", str(error)) from None
    top = config.class_named(tenant.top_class)
    return top if top and asked.rank < top.rank else asked


def _outlook(args: argparse.Namespace, limit: int) -> Outlook:
    """What is given, else what is taken of an answer when nothing has been learned."""
    cap = limit or MOST_OUTPUT
    if not args.expected_tokens:
        return Lengths().outlook(Kind("", ""), 0, cap)
    mean = min(args.expected_tokens, cap)
    high = min(max(args.longest_tokens, mean), cap)
    spread = (high - mean) / 1.2816  # of a normal distribution with that nine-in-ten point
    return Outlook(float(mean), spread * spread, 1, high, 0)


# the backends


def _shares(config: Config, model: str) -> tuple[BackendShare, ...]:
    """What the queue would be told of the pool: limits of the configuration, and defaults where it says none."""
    found = next(pool for pool in config.pools if pool.model == model)
    engines = []
    for engine in found.backends:
        limits = engine.limits
        if isinstance(engine, Simulated):
            limits = replace(
                limits,
                max_running=limits.max_running or engine.max_running,
                kv_tokens=limits.kv_tokens or engine.kv_tokens,
            )
        engines.append(replace(engine, limits=limits))
    pool = Pool(model, tuple(engines), Reaper())
    for member in pool.members:
        member.limit = member.config.limits.max_running or DEFAULT_RUNNING
    return pool.share().backends


def _on_backend(share: BackendShare, asked: Asked, args: argparse.Namespace, ahead: Ahead) -> Iterator[Line]:
    """Could it, idle? Can it, behind what is there? May it start now?"""
    demand, safety = asked.demand, share.safety_milli / 1000
    load, timed = _load(share, asked, args), args.step_times is not None
    times = args.step_times or Coefficients(a0_s=0.0, a1_s=1 / share.prefill_tokens_per_s, a2_s=0.0, a3_s=0.0, a4_s=0.0)
    model = StepModel(times)
    for verdict in _idle(model, load, demand, safety):
        if timed or verdict.check is Check.IDLE_FIRST:
            yield _line(share.name, verdict)
    lean = replace(load, prefill_share=0.0)  # what waits is let in by the pace beside no prompts
    for verdict in load_tests(forecast(model, lean, demand, ahead), lean, demand, safety):
        if verdict.check is Check.FIRST or (verdict.check is Check.TOTAL and timed):
            yield _line(share.name, verdict)
    running = load.running + load.prefilling
    yield Line(share.name, "room", running + 1, share.max_running, "requests", {"running": running})
    if load.outstanding_tokens:
        most, own = WINDOW * share.chunk_tokens, load.outstanding_tokens + demand.uncached_tokens
        terms = {"outstanding_tokens": load.outstanding_tokens, "chunk_tokens": float(share.chunk_tokens)}
        yield Line(share.name, "window", own, most, "tokens", terms)
    if running:
        yield _line(share.name, kv_test(load, demand))
    if timed:
        now = forecast(model, load, demand)
        total = total_test(now, demand, safety)
        free = running < share.max_running and load.outstanding_tokens < WINDOW * share.chunk_tokens
        answer = Reason.DEADLINE_UNREACHABLE if free else "waits"  # the queue tries it, and sees that it is late
        yield Line(share.name, "total_now", total.predicted, total.limit, total.unit, total.terms, answer)
        if running:
            yield _line(share.name, pace_test(now, load, demand))


def _idle(model: StepModel, load: Load, demand: Demand, safety: float) -> Iterator[Verdict]:
    """The idle tests as the queue has them: with safety on the first token, and the length nine in ten stay within."""
    cautious = replace(demand, output=replace(demand.output, q10=demand.output.q90))
    first, pace, total, _ = idle_tests(model, load, cautious)
    more = (safety - 1) * first.predicted
    yield replace(first, predicted=first.predicted + more, terms={**first.terms, "safety": safety})
    yield pace
    yield replace(total, predicted=total.predicted + more, terms={**total.terms, "safety": safety})


def _load(share: BackendShare, asked: Asked, args: argparse.Namespace) -> Load:
    demand = asked.demand
    prompt = args.running_prompt_tokens or demand.prompt_tokens
    output = float(args.running_output_tokens or demand.output.mean)
    prefilling = math.ceil(args.outstanding / max(1, prompt))
    held, usable = args.running + prefilling, int(KV_ROOM * share.kv_tokens)
    each = (held * (prompt + output) + demand.prompt_tokens + demand.output.mean) / (held + 1)
    chunk = (args.running + 1) * prompt / max(1.0, output) / max(1.0, share.chunk_tokens - args.running - 1)
    return Load(
        chunk_tokens=share.chunk_tokens,
        max_running=min(share.max_running, max(1, int(usable / each))),
        kv_usable_tokens=usable,
        outstanding_tokens=args.outstanding,
        prefilling=prefilling,
        running=args.running,
        kv_tokens=args.running * (prompt + output / 2),
        remaining_tokens=args.running * output / 2,
        tightest_tpot_s=args.tightest_tpot_ms / 1000 if args.tightest_tpot_ms else math.inf,
        prefill_share=min(1.0, chunk),
        kv=KvSums(max(FEW, held), held * (prompt + output), held * demand.output.variance, 0.0),
        z=share.kv_deviations_milli / 1000,
    )


def _line(backend: str, verdict: Verdict) -> Line:
    reason = REFUSES[verdict.check]
    return Line(
        backend, str(verdict.check), verdict.predicted, verdict.limit, verdict.unit, verdict.terms, reason or "waits"
    )


# tenant, queue, verdict


def _quota(asked: Asked, args: argparse.Namespace) -> Iterator[Line]:
    tenant, used = asked.tenant, (args.used_requests, args.used_tokens)
    for name, limit, n, unit in (
        ("requests_per_min", tenant.requests_per_min, used[0] + 1, "requests"),
        ("tokens_per_min", tenant.tokens_per_min, used[1] + _reserved(asked), "tokens"),
    ):
        if limit:
            yield Line("", name, n, limit, unit, {"used": float(used[unit == "tokens"])}, Reason.RATE_LIMITED)


def _tokens(asked: Asked) -> int:
    """What a ticket counts for: its prompt and its expected output."""
    return asked.demand.prompt_tokens + _output(asked)


def _reserved(asked: Asked) -> int:
    """What it counts for in its tenant's minute until its length is known: what nine in ten stay within."""
    return asked.demand.prompt_tokens + max(asked.demand.output.q90, _output(asked))


def _output(asked: Asked) -> int:
    return int(asked.demand.output.mean) + 1


def _places(asked: Asked, args: argparse.Namespace) -> Iterator[Line]:
    """What is asked only of who has to wait, but for the cap of tokens in flight, which lets nobody start."""
    tenant, queued = asked.tenant, args.queued or args.waiting_ahead
    if tenant.tokens_in_flight and args.tenant_in_flight:
        flying = args.tenant_in_flight + _tokens(asked)
        yield Line("", "tokens_in_flight", flying, tenant.tokens_in_flight, "tokens", {})
    yield Line("", "ahead", args.waiting_ahead, 0, "requests", {})
    full = asked.config.store.max_queued
    yield Line("", "max_queued", queued + 1, full, "requests", {"waiting": float(queued)}, Reason.QUEUE_FULL)
    if tenant.max_queued:
        own = args.tenant_queued + 1
        yield Line("", "tenant_max_queued", own, tenant.max_queued, "requests", {}, Reason.QUEUE_FULL)
    if target_ms := asked.service.target_ms(asked.waits_ms):
        terms = {"late_after_s": target_ms / 1000}
        yield Line("", "shed", args.shed_percent, LIKELY, "% of arrivals", terms, Reason.OVERLOADED)


def _answer(asked: Asked, args: argparse.Namespace, lines: list[Line]) -> Answer:
    by: dict[str, list[Line]] = {}
    for line in lines:
        by.setdefault(line.backend, []).append(line)
    common = {line.test: line for line in by.pop("", [])}
    reason, retry_s = _refusal(asked, args, common, list(by.values()))
    verdict = "refused" if reason else "starts" if _starts(common, list(by.values())) else "waits"
    cost, demand, output = prices(asked.tenant.weight), asked.demand, _output(asked)
    return Answer(
        verdict=verdict,
        reason=reason,
        status=STATUS[reason] if reason else 0,
        retry_after_s=retry_s,
        request=Request(
            asked.model, asked.tenant.name, asked.service.name, asked.service.rank, demand.prompt_tokens,
            demand.uncached_tokens, output, max(demand.output.q90, output), demand.due,
        ),
        order=Order(
            asked.config.order.kind,
            asked.config.order.key_ms(asked.waits_ms, demand.uncached_tokens),
            asked.tenant.weight,
            cost.prefill,
            cost.output,
            int(cost.charge(demand.uncached_tokens, output)),
        ),
        tests=lines,
    )  # fmt: skip


def _starts(common: dict[str, Line], backends: list[list[Line]]) -> bool:
    free = all(common[name].ok for name in ("ahead", "tokens_in_flight") if name in common)
    return free and any(all(line.ok for line in lines) for lines in backends)


def _refusal(
    asked: Asked, args: argparse.Namespace, common: dict[str, Line], backends: list[list[Line]]
) -> tuple[Reason | None, float]:
    """In the order in which the queue asks: impossible, over quota; if it has to wait, full, unreachable, too much."""
    missed = [[line for line in lines if not line.ok] for lines in backends]
    if all(any(line.answer == Reason.DEADLINE_IMPOSSIBLE for line in lines) for lines in missed):
        return Reason.DEADLINE_IMPOSSIBLE, 0.0
    if waits := [_quota_wait_s(asked, args, line) for line in common.values() if _says(line, Reason.RATE_LIMITED)]:
        return Reason.RATE_LIMITED, max(waits)
    if _starts(common, backends):
        return None, 0.0
    if any(_says(line, Reason.QUEUE_FULL) for line in common.values()):
        return Reason.QUEUE_FULL, 0.0
    late = [
        max((line.predicted - line.limit for line in lines if line.answer != "waits"), default=0.0) for lines in missed
    ]
    if min(late) > 0:
        return Reason.DEADLINE_UNREACHABLE, min(late)
    return (Reason.OVERLOADED if any(_says(line, Reason.OVERLOADED) for line in common.values()) else None), 0.0


def _says(line: Line, reason: Reason) -> bool:
    return not line.ok and line.answer == reason


def _quota_wait_s(asked: Asked, args: argparse.Namespace, line: Line) -> float:
    """Until what was used has left the window, if all of it was used just now."""
    minute = Minute(int(line.limit))
    minute.take(int(line.terms["used"]), 0)
    return minute.wait_ms(1 if line.unit == "requests" else _reserved(asked), 0) / 1000


def encoded(answer: Answer) -> str:
    """As JSON; no limit is null."""
    built: Any = msgspec.to_builtins(answer)
    built["tests"] = [{**row, "ok": line.ok} for row, line in zip(built["tests"], answer.tests, strict=True)]
    return msgspec.json.format(msgspec.json.encode(built), indent=2).decode()
