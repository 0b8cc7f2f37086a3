"""One simulated run: requests of any trace, a policy, engines, gateways; the answer is what `signalbox bench` records.

The policies, the queue's scripts and the engine are those of `bench.virtual`; here they meet the traces, lengths and
reports of `signalbox bench`. The same seed gives the same records.
"""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from backends.simengine import Engine, Shape, StepTime
from bench import costs
from bench.arrivals import Planned, Source
from bench.goodput import NOT_YET, Outcome, Record
from bench.sim_baselines import (
    PassThrough,
    Queued,
    RateLimited,
    below,
    earliest_deadline,
    first_come,
    unsaturated,
)
from bench.sim_signalbox import Beliefs, Signalbox
from bench.sim_site import Call, Site, Strategy
from bench.sim_site import Outcome as Came
from bench.sim_store import Store
from bench.sim_workload import Arrival, Tenant
from gateway.config import Config
from gateway.http.errors import STATUS
from policies.reasons import Reason
from policies.steptime import Coefficients

POLICIES = ("signalbox", "pass", "cap", "gate", "gate-edf", "tenant-rate")
NOBODY = "default"  # the tenant of requests that name none

_OUTCOMES = {Came.DONE: Outcome.DONE, Came.REFUSED: Outcome.REFUSED, Came.LEFT: Outcome.LEFT}


class Client(Tenant, frozen=True, kw_only=True):
    """Who asks: a tenant within a source and a class, as the strategies of the lab know it."""

    trace: str = ""
    share: float = 1.0
    source: str
    klass: str = ""

    def __post_init__(self) -> None:
        """Its requests are planned elsewhere, so that there is no trace to check."""


class Setup(Struct, frozen=True, kw_only=True):
    """What a run needs beyond its requests.

    `cap` requests at once per engine are for the policy of that name, `tenant_rate` requests/s are shared by weight
    for `tenant-rate`. `limits` names each request's own length as its limit, as `signalbox bench` does without
    --max-tokens; else `max_tokens` is every limit.
    """

    sources: tuple[Source, ...]
    engines: tuple[costs.Engine, ...]
    max_tokens: int
    policy: str = "signalbox"
    gateways: int = 1
    retries: int = 0
    limits: bool = False
    cap: int = 0
    tenant_rate: float = 0.0
    config: Config = Config()
    beliefs: Beliefs = Beliefs()


def simulate(setup: Setup, plans: Sequence[Planned], store: Store, watch: Callable[[int], None] | None = None) -> Site:
    """The run, to its end. `watch` hears now and then how many requests have ended."""
    clients = clients_of(setup, plans)
    site = Site(
        [engine_of(one) for one in setup.engines],
        [_arrival(one, clients, setup) for one in plans],
        setup.retries,
    )
    if watch is not None:
        _watched(site, plans[-1].at_s * 1000 if plans else 0.0, watch)
    site.run(_strategy(setup, site, store, clients))
    return site


def _watched(site: Site, span_ms: float, watch: Callable[[int], None]) -> None:
    for part in range(1, 201):
        site.change(span_ms * part / 200, lambda: watch(len(site.calls) - site.open))


Key = tuple[str, str, str]


def clients_of(setup: Setup, plans: Sequence[Planned]) -> dict[Key, Client]:
    """By source, tenant and class, in the order in which they come."""
    sources = {source.name: source for source in setup.sources}
    tenants = {tenant.name: tenant for tenant in setup.config.tenants}
    found: dict[Key, Client] = {}
    for one in plans:
        key = (one.source, one.tenant, one.klass)
        if key in found:
            continue
        source, tenant = sources[one.source], tenants.get(one.tenant)
        service = setup.config.class_named(one.klass or setup.config.default_class)
        found[key] = Client(
            name=one.tenant or NOBODY,
            source=one.source,
            klass=one.klass,
            objective=source.objective,
            max_tokens=source.max_tokens or setup.max_tokens,
            weight=tenant.weight if tenant else 1.0,
            rank=service.rank if service else 1,
            tokens_per_minute=tenant.tokens_per_min if tenant else 0,
        )
    return found


def _arrival(one: Planned, clients: Mapping[Key, Client], setup: Setup) -> Arrival:
    client = clients[one.source, one.tenant, one.klass]
    output = one.output_tokens if setup.limits else min(one.output_tokens, client.max_tokens)
    limit = output if setup.limits else 0
    return Arrival(one.at_s * 1000, client, one.input_tokens, output, one.leave_s * 1000, limit)


def engine_of(one: costs.Engine) -> Engine:
    """A simulated engine with the step times and limits of a plan's."""
    times = one.times
    return Engine(
        Shape(chunk_tokens=one.chunk_tokens, max_running=one.max_running, kv_tokens=one.kv_tokens), step_time(times)
    )


def step_time(times: Coefficients) -> StepTime:
    """The same numbers in the simulated engine's units."""
    return StepTime(
        a0_ms=times.a0_s * 1e3,
        a1_us_per_prefill_token=times.a1_s * 1e6,
        a2_us_per_running=times.a2_s * 1e6,
        a3_us_per_kv_token=times.a3_s * 1e6,
        a4_us_per_context_token=times.a4_s * 1e6,
    )


def _strategy(setup: Setup, site: Site, store: Store, clients: Mapping[Key, Client]) -> Strategy:
    if setup.policy == "signalbox":
        return Signalbox(site, store, setup.gateways, setup.beliefs)
    if setup.policy == "tenant-rate":
        weights = {client.name: client.weight for client in clients.values()}
        whole = sum(weights.values())
        return RateLimited(site, {name: setup.tenant_rate * part / whole for name, part in weights.items()})
    plain: dict[str, Callable[[], Strategy]] = {
        "pass": lambda: PassThrough(site),
        "cap": lambda: Queued(site, first_come, below(setup.cap)),
        "gate": lambda: Queued(site, first_come, unsaturated),
        "gate-edf": lambda: Queued(site, earliest_deadline, unsaturated),
    }
    return plain[setup.policy]()


def records_of(site: Site, plans: Sequence[Planned]) -> list[Record]:
    """What `signalbox bench` would have recorded of these requests."""
    return [_record(call, one) for call, one in zip(site.calls, plans, strict=True)]


def _record(call: Call, plan: Planned) -> Record:
    client = call.tenant
    assert isinstance(client, Client)
    ran = call.engine >= 0 and call.first_ms >= 0
    refused = call.outcome is Came.REFUSED
    return Record(
        number=call.number,
        source=client.source,
        at_s=_s(call.arrival_ms),
        came_s=_s(call.came_ms),
        tenant=plan.tenant,
        klass=client.klass,
        asked_prompt_tokens=call.prompt_tokens,
        asked_output_tokens=plan.output_tokens,
        prompt_tokens=call.prompt_tokens if ran else 0,
        output_tokens=call.produced,
        counted=True,
        outcome=_OUTCOMES[call.outcome],
        status=STATUS[Reason(call.reason)] if refused else 200,
        reason=str(call.reason) if refused else "",
        attempts=call.attempts + 1,
        refused_s=_s(call.refused_ms),
        first_s=_s(call.first_ms),
        last_s=_s(call.last_ms),
        end_s=_s(call.end_ms),
        stall_s=call.stall_ms / 1000,
    )


def _s(ms: float) -> float:
    return ms / 1000 if ms >= 0 else NOT_YET
