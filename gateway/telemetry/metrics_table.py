"""Every metric there is: its name, what it says, its labels and buckets. What is not in this table cannot be told."""

import enum

from msgspec import Struct

from policies.steptime import WARM


class Kind(enum.StrEnum):
    COUNTER = "counter"  # `_total` comes after the name
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Over(enum.StrEnum):
    """How a gauge of several processes becomes one."""

    SUM = "sum"
    MOST = "most"
    LEAST = "least"


class Family(Struct, frozen=True):
    """One metric. `buckets` are the upper bounds of a histogram, in ascending order, without +Inf."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: Kind = Kind.COUNTER
    buckets: tuple[float, ...] = ()
    over: Over = Over.SUM

    @property
    def cells(self) -> int:
        """Numbers that one series takes: a histogram has its buckets, one beyond them, and its sum."""
        return len(self.buckets) + 2 if self.kind is Kind.HISTOGRAM else 1


FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 300.0
)  # fmt: skip
PER_TOKEN_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68, 655.36
)  # fmt: skip
STATE_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0)
"""The buckets of the OpenTelemetry conventions for GenAI metrics, with faster engines and longer queues added."""
TURN_S = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
TURN_EVENTS = (1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 31.0)
OFF_BY = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0)
STOP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

POOL, ENGINE = ("model", "class"), ("model", "backend")
GEN_AI = ("gen_ai_operation_name", "gen_ai_request_model", "class")
H, G = Kind.HISTOGRAM, Kind.GAUGE

FAMILIES = (
    # requests, from the life cycle
    Family("signalbox_requests", "Requests that ended, by reason; `ok` is a whole answer.", (*POOL, "reason")),
    Family("signalbox_goodput", "Whole answers that met each of their objectives.", POOL),
    Family("signalbox_missed", "Objectives that whole answers missed.", (*POOL, "objective")),
    Family("signalbox_state_seconds", "Time in each state of the life cycle.", (*POOL, "state"), H, STATE_S),
    Family("signalbox_refusal_seconds", "From the first byte to an end without a whole answer.", POOL, H, DURATION_S),
    Family(
        "signalbox_wasted_tokens", "Output tokens of answers that did not reach their end.", (*POOL, "state")
    ),
    Family(
        "gen_ai_server_time_to_first_token_seconds", "From the first byte to the first token, streams only.", GEN_AI, H,
        FIRST_TOKEN_S,
    ),
    Family(
        "gen_ai_server_time_per_output_token_seconds", "Mean time per output token after the first, streams only.",
        GEN_AI, H, PER_TOKEN_S,
    ),
    Family(
        "gen_ai_server_request_duration_seconds", "From the first byte to the last written, whole answers only.",
        GEN_AI, H, DURATION_S,
    ),
    Family(
        "gen_ai_client_token_usage", "Tokens of a request that an engine worked on.",
        (*GEN_AI, "gen_ai_token_type"), H, TOKENS,
    ),
    # tenants: the first `metrics.max_tenants`, all others as `other`
    Family("signalbox_tenant_requests", "Requests that ended.", ("tenant", "outcome")),
    Family("signalbox_tenant_tokens", "Tokens served.", ("tenant", "type")),
    Family("signalbox_tenant_queue_seconds", "Time that requests waited for a lease.", ("tenant",)),
    # engines, as this gateway uses them
    Family("signalbox_prefill_seconds", "From the lease to the first token.", ENGINE, H, FIRST_TOKEN_S),
    Family("signalbox_decode_seconds_per_token", "Mean time per output token after the first.", ENGINE, H, PER_TOKEN_S),
    Family("signalbox_attempts", "Generations that ended on a backend.", (*ENGINE, "outcome")),
    Family("signalbox_backend_prompt_tokens", "Prompt tokens that a backend computed or had cached.", ENGINE),
    Family("signalbox_backend_output_tokens", "Output tokens that came from a backend.", ENGINE),
    Family("signalbox_engine_stop_seconds", "From a cancelled stream to its engine having let go.", ENGINE, H, STOP_S),
    Family("signalbox_backend_up", "1 where every process reaches it.", ENGINE, G, over=Over.LEAST),
    Family("signalbox_breaker_processes", "Processes whose breaker is in this state.", (*ENGINE, "state"), G),
    Family("signalbox_backend_streams", "Streams open on a backend.", ENGINE, G),
    Family("signalbox_engine_running", "Requests running, as the engine says.", ENGINE, G, over=Over.MOST),
    Family("signalbox_engine_waiting", "Requests waiting, as the engine says.", ENGINE, G, over=Over.MOST),
    Family("signalbox_engine_kv_used_ratio", "KV cache in use, as the engine says.", ENGINE, G, over=Over.MOST),
    Family("signalbox_engine_preemptions", "Preemptions, as the engine counts them.", ENGINE, G, over=Over.MOST),
    # what is foreseen, against what came
    Family(
        "signalbox_step_error_ratio", "Median of |observed - predicted| / predicted over the last steps.", ENGINE, G,
        over=Over.MOST,
    ),
    Family(
        "signalbox_step_trim_ratio", "Factor on the predicted rates by which the step-time model is corrected.", ENGINE,
        G, over=Over.LEAST,
    ),
    Family(
        "signalbox_step_warm", f"1 once a process has learned from {WARM} steps.", ENGINE, G, over=Over.MOST
    ),
    Family("signalbox_plans", "Prompts whose tokens were counted by a tokenizer, or estimated.", ("model", "tokens")),
    Family(
        "signalbox_prompt_error_ratio", "|estimated - counted| / counted, of estimated prompts that an engine counted.",
        ("model",), H, OFF_BY,
    ),
    Family(
        "signalbox_step_coefficient_seconds",
        "What a step has been learned to take: a0 in all, a1 per prompt token, a2 per decoding request, a3 per token "
        "of their contexts, a4 per token that prompts had computed before.",
        (*ENGINE, "term"), G, over=Over.MOST,
    ),
    Family(
        "signalbox_forecast_error_ratio",
        "Median of |observed - predicted| / predicted over the last times from a grant to the first token.",
        ENGINE, G, over=Over.MOST,
    ),
    Family("signalbox_safety_ratio", "Factor on predicted times to the first token.", ENGINE, G, over=Over.MOST),
    Family("signalbox_kv_deviations", "Deviations of the expected KV tokens kept free.", ENGINE, G, over=Over.MOST),
    Family("signalbox_lengths_judged", "Answers whose length was compared with its 90 % quantile.", ("model",)),
    Family("signalbox_lengths_covered", "Of those, the ones that stayed within it.", ("model",)),
    # the shared queue, from the store: the same for all gateways on it
    Family("signalbox_queue_requests", "Requests waiting.", POOL, G),
    Family("signalbox_queue_tokens", "Uncached prompt tokens waiting.", POOL, G),
    Family("signalbox_queue_tenants", "Tenants with something waiting and below their caps.", POOL, G),
    Family("signalbox_fairness_spread_tokens", "Between the virtual counters of tenants that wait.", POOL, G),
    Family("signalbox_shed_ratio", "Part of the arrivals that may not wait.", POOL, G),
    Family("signalbox_ledger_open", "1 where the queue may hand out leases.", ENGINE, G),
    Family("signalbox_ledger_leases", "Leases held.", ENGINE, G),
    Family("signalbox_ledger_leases_limit", "Leases that may be held.", ENGINE, G),
    Family("signalbox_ledger_prefill_tokens", "Prompt tokens handed out and without a first token yet.", ENGINE, G),
    Family("signalbox_ledger_prefill_tokens_limit", "Prompt tokens that may be so.", ENGINE, G),
    Family("signalbox_ledger_kv_tokens", "KV tokens that running requests are expected to need.", ENGINE, G),
    Family("signalbox_ledger_kv_tokens_limit", "KV tokens that there are.", ENGINE, G),
    Family("signalbox_queue_processes", "Gateway processes that the queue knows.", (), G),
    # the shared queue, from this side
    Family("signalbox_queue_oldest_seconds", "Age of the oldest request waiting here.", POOL, G, over=Over.MOST),
    Family("signalbox_turn_seconds", "One exchange with the store.", (), H, TURN_S),
    Family("signalbox_turn_events", "Events told in one exchange with the store.", (), H, TURN_EVENTS),
    Family("signalbox_store_rejoins", "Times that a process had to declare everything anew."),
    Family("signalbox_store_look_failures", "Scrapes for which the store could not be asked."),
    Family("signalbox_store_up", "1 where every process has its store.", (), G, over=Over.LEAST),
    # the gateway's processes
    Family("signalbox_live_requests", "Requests between their first byte and their end.", ("state",), G),
    Family("signalbox_leaked_leases", "Leases and places in the queue that no live request owns.", (), G),
    Family("signalbox_leaked_streams", "Engine streams that could not be closed in time."),
    Family("signalbox_worker_starts", "Processes that were started.", ("worker",)),
    Family("signalbox_workers", "Processes that gave a sign within the last seconds.", (), G),
    Family("signalbox_loop_lag_seconds", "How late the event loop was at its last look.", (), G, over=Over.MOST),
    Family("signalbox_cpu_seconds", "User and system time of the processes.", ("worker",)),
    Family("signalbox_resident_memory_bytes", "Resident memory.", ("worker",), G),
    Family("signalbox_unrecorded_series", "Series that found no room and are not told.", (), G),
    Family("signalbox_build_info", "1; the version is the label.", ("version",), G, over=Over.MOST),
)  # fmt: skip

BY_NAME = {family.name: family for family in FAMILIES}


def exposed() -> dict[str, Family]:
    """Every sample name as it stands in the text: `_total`, `_bucket`, `_sum` and `_count` included."""
    names: dict[str, Family] = {}
    for family in FAMILIES:
        endings = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
        names |= {family.name + ending: family for ending in endings[family.kind]}
    return names
