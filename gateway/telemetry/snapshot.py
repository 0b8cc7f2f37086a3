"""What the console shows at one instant: the numbers that `/metrics` tells, and the requests that are live.

Tokens, requests and ratios are plain numbers; the names of all others carry their unit. None is what is not known: the
store cannot be asked, or nothing came within the window.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from msgspec import Struct

from gateway.telemetry.live import MOST_ROWS, Live, Roll
from gateway.telemetry.metrics import OK, OTHER
from gateway.telemetry.window import Labels, Numbers, Span
from policies.breaker import Circuit

FAMILIES = frozenset(
    {
        "gen_ai_server_time_per_output_token_seconds", "gen_ai_server_time_to_first_token_seconds",
        "signalbox_backend_output_tokens", "signalbox_backend_prompt_tokens", "signalbox_backend_streams",
        "signalbox_backend_up",
        "signalbox_breaker_processes", "signalbox_engine_kv_used_ratio", "signalbox_engine_running",
        "signalbox_engine_waiting", "signalbox_goodput", "signalbox_ledger_kv_tokens",
        "signalbox_ledger_kv_tokens_limit", "signalbox_ledger_leases", "signalbox_ledger_leases_limit",
        "signalbox_ledger_open", "signalbox_ledger_prefill_tokens", "signalbox_ledger_prefill_tokens_limit",
        "signalbox_live_requests", "signalbox_queue_oldest_seconds", "signalbox_queue_processes",
        "signalbox_queue_requests", "signalbox_queue_tokens", "signalbox_requests", "signalbox_shed_ratio",
        "signalbox_store_up", "signalbox_tenant_requests", "signalbox_tenant_tokens",
        "signalbox_workers",
    }
)  # fmt: skip
"""The metrics that are read for it."""

TTFT, PACE = "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_time_per_output_token_seconds"
TENANT = ("signalbox_tenant_requests", "signalbox_tenant_tokens")
MOST_TENANTS = 20


class Quantiles(Struct, frozen=True):
    """Of the window, in milliseconds; of streams only."""

    p50_ms: float
    p90_ms: float


class Paces(Struct, frozen=True):
    """First token, and mean time per output token after it."""

    ttft: Quantiles | None
    pace: Quantiles | None


class Budget(Struct, frozen=True):
    used: float
    limit: float


class Backend(Struct, frozen=True):
    """`open`: the queue hands out leases on it; the budgets are the queue's, of all gateways on it. `streams` are
    those of this gateway; the rest is what the engine says."""

    name: str
    up: bool
    breaker: str
    streams: float
    open: bool | None
    leases: Budget | None
    prefill: Budget | None
    kv: Budget | None
    engine_running: float | None
    engine_waiting: float | None
    engine_kv: float | None


class Service(Struct, frozen=True):
    """A class in a pool. `waiting`, `tokens` and `shed` are the queue's, of all gateways on it; the rest is this
    gateway's, `oldest_s` of the process in which it is most."""

    name: str
    waiting: float | None
    tokens: float | None
    shed: float | None
    oldest_s: float | None
    ttft: Quantiles | None
    pace: Quantiles | None


class Pool(Struct, frozen=True):
    model: str
    backends: list[Backend]
    services: list[Service]


class End(Struct, frozen=True):
    """Requests that ended for a reason, `ok` for a whole answer: since the gateway started, and per second."""

    reason: str
    total: float
    per_s: float | None


class Tenant(Struct, frozen=True):
    """What waits by class, in this gateway; served since it started; rates of the window."""

    name: str
    waiting: dict[str, int]
    requests: float
    tokens: float
    requests_per_s: float | None
    tokens_per_s: float | None


class Phase(Struct, frozen=True, array_like=True):
    name: str
    ms: float


class Request(Struct, frozen=True):
    """One that is live. Its last phase goes on."""

    id: str
    tenant: str
    model: str
    service: str
    backend: str
    state: str
    stream: bool
    prompt_tokens: int
    output_tokens: int
    retries: int
    total_ms: float
    phases: list[Phase]


class Rates(Struct, frozen=True):
    """Per second of the window. `good` are whole answers within their objectives."""

    ended: float | None
    ok: float | None
    good: float | None
    prompt_tokens: float | None
    output_tokens: float | None


class Snapshot(Struct, frozen=True):
    """`at` is Unix time, `window_s` how long the window is by now. `paces` are by class, and of all under "".
    `live` are counts by state; `requests` the oldest of them."""

    at: float
    version: str
    window_s: float
    workers: float
    gateways: float | None
    store_up: bool
    live: dict[str, float]
    rates: Rates
    paces: dict[str, Paces]
    pools: list[Pool]
    tenants: list[Tenant]
    ends: list[End]
    requests: list[Request]


class Names(Struct, frozen=True):
    """What the configuration has, in its order: classes, pools by model, and the backends of each."""

    version: str
    classes: list[str]
    pools: dict[str, list[str]]


def snapshot(names: Names, span: Span, rolls: list[Roll], at: float, wall: float) -> Snapshot:
    """Everything at `at` (monotonic seconds), which is `wall` in Unix time."""
    last = span.last
    live = {labels[0]: values[0] for labels, values in last.each("signalbox_live_requests")}
    return Snapshot(
        at=wall,
        version=names.version,
        window_s=span.seconds,
        workers=last.one("signalbox_workers") or 0.0,
        gateways=last.one("signalbox_queue_processes"),
        store_up=bool(last.one("signalbox_store_up")),
        live=live,
        rates=_rates(span),
        paces={"": _paces(span, "", ""), **{one: _paces(span, "", one) for one in names.classes}},
        pools=[_pool(names, span, model) for model in names.pools],
        tenants=_tenants(names, span, rolls),
        ends=_ends(span),
        requests=_requests(names, rolls, at),
    )


def _rates(span: Span) -> Rates:
    return Rates(
        ended=span.rate("signalbox_requests"),
        ok=span.rate("signalbox_requests", lambda labels: labels[-1] == OK),
        good=span.rate("signalbox_goodput"),
        prompt_tokens=span.rate("signalbox_backend_prompt_tokens"),
        output_tokens=span.rate("signalbox_backend_output_tokens"),
    )


def _paces(span: Span, model: str, service: str) -> Paces:
    """Of a model and a class, the empty names for all."""

    def wanted(labels: Labels) -> bool:
        return model in ("", labels[1]) and service in ("", labels[2])

    return Paces(_quantiles(span, TTFT, wanted), _quantiles(span, PACE, wanted))


def _quantiles(span: Span, name: str, wanted: Callable[[Labels], bool]) -> Quantiles | None:
    found = span.quantiles(name, wanted, 0.5, 0.9)
    return Quantiles(found[0] * 1000, found[1] * 1000) if found else None


def _pool(names: Names, span: Span, model: str) -> Pool:
    last = span.last
    backends = [_backend(last, model, one) for one in names.pools[model]]
    return Pool(model, backends, [_service(span, model, one) for one in names.classes])


def _backend(numbers: Numbers, model: str, name: str) -> Backend:
    is_open = numbers.one("signalbox_ledger_open", model, name)
    states = [one.value for one in Circuit if numbers.one("signalbox_breaker_processes", model, name, one.value)]
    return Backend(
        name=name,
        up=bool(numbers.one("signalbox_backend_up", model, name)),
        breaker=states[-1] if len(states) == 1 else ", ".join(states),
        streams=numbers.one("signalbox_backend_streams", model, name) or 0.0,
        open=None if is_open is None else bool(is_open),
        leases=_budget(numbers, "leases", model, name),
        prefill=_budget(numbers, "prefill_tokens", model, name),
        kv=_budget(numbers, "kv_tokens", model, name),
        engine_running=numbers.one("signalbox_engine_running", model, name),
        engine_waiting=numbers.one("signalbox_engine_waiting", model, name),
        engine_kv=numbers.one("signalbox_engine_kv_used_ratio", model, name),
    )


def _budget(numbers: Numbers, what: str, *labels: str) -> Budget | None:
    used = numbers.one(f"signalbox_ledger_{what}", *labels)
    limit = numbers.one(f"signalbox_ledger_{what}_limit", *labels)
    return None if used is None or limit is None else Budget(used, limit)


def _service(span: Span, model: str, name: str) -> Service:
    last, paces = span.last, _paces(span, model, name)
    return Service(
        name=name,
        waiting=last.one("signalbox_queue_requests", model, name),
        tokens=last.one("signalbox_queue_tokens", model, name),
        shed=last.one("signalbox_shed_ratio", model, name),
        oldest_s=last.one("signalbox_queue_oldest_seconds", model, name),
        ttft=paces.ttft,
        pace=paces.pace,
    )


def _ends(span: Span) -> list[End]:
    """Most frequent first, whole answers before all."""
    totals, rates = span.last.by("signalbox_requests", -1), span.rates("signalbox_requests", -1)
    ends = [End(reason, total, rates.get(reason)) for reason, total in totals.items() if total]
    return sorted(ends, key=lambda one: (one.reason != OK, -one.total, one.reason))


def _tenants(names: Names, span: Span, rolls: list[Roll]) -> list[Tenant]:
    """Those with most waiting first, then those with most tokens served of late."""
    waiting: dict[str, Counter[str]] = defaultdict(Counter)
    for roll in rolls:
        for line in roll.lines:
            waiting[line.tenant or OTHER][names.classes[line.service]] += line.waiting
    requests, tokens = (span.last.by(name, 0) for name in TENANT)
    requests_per_s, tokens_per_s = (span.rates(name, 0) for name in TENANT)
    tenants = [
        Tenant(
            name=name,
            waiting=dict(waiting.get(name, {})),
            requests=requests.get(name, 0.0),
            tokens=tokens.get(name, 0.0),
            requests_per_s=requests_per_s.get(name),
            tokens_per_s=tokens_per_s.get(name),
        )
        for name in sorted(requests.keys() | waiting.keys())
    ]
    tenants.sort(key=lambda one: (-sum(one.waiting.values()), -(one.tokens_per_s or 0.0), -one.tokens))
    return tenants[:MOST_TENANTS]


def _requests(names: Names, rolls: list[Roll], at: float) -> list[Request]:
    """The oldest of all processes."""
    rows = sorted((row for roll in rolls for row in roll.rows), key=lambda row: row.begins[0])
    return [_request(names, row, at) for row in rows[:MOST_ROWS]]


def _request(names: Names, row: Live, at: float) -> Request:
    models = list(names.pools)
    model = models[row.pool] if row.pool >= 0 else ""
    return Request(
        id=row.request_id,
        tenant=row.tenant,
        model=model,
        service=names.classes[row.service] if row.service >= 0 else "",
        backend=names.pools[model][row.backend] if row.backend >= 0 else "",
        state=row.state,
        stream=row.stream,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        retries=row.retries,
        total_ms=max(0.0, at - row.begins[0]) * 1000,
        phases=[*_phases(row, at)],
    )


def _phases(row: Live, at: float) -> Iterator[Phase]:
    ends = [*row.begins[1:], max(at, row.begins[-1])]
    for name, begin, end in zip(row.phases, row.begins, ends, strict=True):
        yield Phase(name, (end - begin) * 1000)
