"""The options of `signalbox simulate`, and what they ask for."""

import argparse
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from backends.simengine import Shape
from bench import costs, goodput_options, plan_engines, traces
from bench.arrivals import Source, trace_of
from bench.goodput_options import REQUESTS, TRACE, OptionError
from bench.sim_lab import ATTAINED
from bench.simulate import POLICIES, Setup
from gateway.config import Config, load
from policies.steptime import START

SHAPE = Shape(chunk_tokens=512, max_running=256, kv_tokens=200_000)
CONTEXT = 8_192
ENGINE = costs.Engine(
    name="engine",
    times=START,
    chunk_tokens=SHAPE.chunk_tokens,
    max_running=SHAPE.max_running,
    kv_tokens=SHAPE.kv_tokens,
)
"""Like an 8B model on an A100."""


class Wish(Struct, frozen=True, kw_only=True):
    """All that is to be run. `loads` are requests/s, or, where `of_capacity`, multiples of what is searched first."""

    setup: Setup
    policies: tuple[str, ...]
    loads: tuple[float, ...]
    of_capacity: bool
    seeds: tuple[int, ...]
    requests: int
    context: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked, of which engines, by which policy, and where to write what came of it."""
    _add_load(parser.add_argument_group("the load"))
    _add_clients(parser.add_argument_group("the clients"))
    _add_site(parser.add_argument_group("the gateways and their engines"))
    parser.add_argument(
        "--fit",
        metavar="RECORDS",
        type=Path,
        nargs="+",
        help="don't simulate: find the step times of the engine that `signalbox bench --records` recorded, judged by a "
        "second recording, or by the last 40 %% of the one",
    )
    out = parser.add_argument_group("the report")
    out.add_argument("--label", metavar="TEXT", help="its name in comparisons; without it, the policy")
    out.add_argument("--json", metavar="FILE", type=Path, help="the report as JSON, for `bench compare`; one policy")
    out.add_argument("--html", metavar="FILE", type=Path, help="the reports as one page that needs no network")
    out.add_argument(
        "--records", metavar="FILE", type=Path, help="one JSON line a request, as `signalbox bench` has it"
    )
    out.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _add_load(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    shipped = ", ".join(traces.SHIPPED)
    add("--trace", default=TRACE, help=f"a CSV or JSON-lines file, or {shipped}; {TRACE} if not given")
    add("--mix", metavar="FILE", type=Path, help="in place of a trace: TOML with a [[source]] for each kind of request")
    add("--part", choices=("all", "fit", "report"), default="all", help="all rows, the first 60 %%, or the last 40 %%")
    add("--cv", type=float, help="of Gamma gaps: 1 is Poisson; without it the trace's own clock, or 1 if it has none")
    load = group.add_mutually_exclusive_group()
    load.add_argument("--rate", metavar="R", type=float, nargs="+", help="requests/s; several are run one by one")
    load.add_argument("--speed", metavar="F", type=float, nargs="+", help="multiples of the trace's own rate")
    load.add_argument(
        "--load",
        metavar="F",
        type=float,
        nargs="+",
        help=f"multiples of what the engines alone carry with {ATTAINED:.0%} attained; searched on the first 60 %%",
    )
    add("--requests", metavar="N", type=int, default=REQUESTS, help=f"of each run; {REQUESTS}")
    add("--seed", metavar="S", type=int, default=1, help="of the (first) run; 1")
    add("--seeds", metavar="N", type=int, default=1, help="runs of each load, for confidence intervals; 1")
    add("--max-tokens", metavar="N", type=int, default=0, help="limit that all requests name; the longest answer")
    add("--context", metavar="N", type=int, default=CONTEXT, help=f"cut prompts to fit so many tokens; {CONTEXT}")
    add(
        "--known-lengths",
        action="store_true",
        help="each request names its own length as its limit, as in `signalbox bench` without --max-tokens",
    )


def _add_clients(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--goodput",
        metavar="GOAL:MS",
        nargs="+",
        default=[],
        help="what clients ask for: ttft:2000 tpot:100 e2el:60000",
    )
    add("--tenant", metavar="NAME=SHARE", action="append", default=[], help="part of the requests")
    add("--class", metavar="NAME=SHARE", action="append", default=[], dest="classes", help="part of the requests")
    add("--leave", metavar="SHARE", type=float, default=0.0, help="of clients that go before the end, at any time")
    add("--retries", metavar="N", type=int, default=0, help="refused clients come again as told, so often")


def _add_site(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--policy", choices=POLICIES, nargs="+", default=["signalbox"], help="several are put side by side")
    add("--cap", metavar="N", type=int, default=0, help="of `cap`, requests at once per engine; tuned if not given")
    add(
        "--tenant-rate",
        metavar="R",
        type=float,
        default=0.0,
        help="of `tenant-rate`, requests/s in all, shared by weight; what the engines carry if not given",
    )
    add("--gateways", metavar="N", type=int, default=1, help="gateway processes on one store; 1")
    add("--backends", metavar="N", type=int, default=0, help="equal engines; 1")
    plan_engines.add_arguments(group)


def wish(args: argparse.Namespace) -> Wish:
    """The runs. Raises OptionError, TraceError, EngineError, ConfigError."""
    least = {
        "requests": 1, "seed": 0, "seeds": 1, "max_tokens": 0, "context": 16, "retries": 0, "cap": 0, "tenant_rate": 0,
        "gateways": 1, "backends": 0,
    }  # fmt: skip
    for name, value in least.items():
        if getattr(args, name) < value:
            raise OptionError(f"--{name.replace('_', '-')} must be {value} or more, not {getattr(args, name)}")
    if args.json and len(args.policy) > 1:
        raise OptionError("--json holds one policy: give one --policy, or --html for several")
    sources = goodput_options.sources(args)
    engines = _engines(args)
    context = min(args.context, *(engine.kv_tokens // SHAPE.kv_block * SHAPE.kv_block for engine in engines))
    longest = max(row.output_tokens for source in sources for row in trace_of(source, context).rows)
    setup = Setup(
        sources=sources,
        engines=engines,
        max_tokens=args.max_tokens or longest,
        gateways=args.gateways,
        retries=args.retries,
        limits=args.known_lengths,
        cap=args.cap,
        tenant_rate=args.tenant_rate,
        config=load(args.config) if args.config else Config(),
    )
    for name in {name for source in sources for name in source.classes}:
        if setup.config.class_named(name) is None:
            known = ", ".join(one.name for one in setup.config.classes)
            raise OptionError(f"--class: there is no class {name!r}, only {known}")
    return Wish(
        setup=setup,
        policies=tuple(dict.fromkeys(args.policy)),
        loads=_loads(args, sources),
        of_capacity=bool(args.load),
        seeds=tuple(range(args.seed, args.seed + args.seeds)),
        requests=args.requests,
        context=context,
    )


def _loads(args: argparse.Namespace, sources: tuple[Source, ...]) -> tuple[float, ...]:
    if args.load:
        if not all(0 < load <= 100 for load in args.load):
            raise OptionError("--load must be above 0 and at most 100")
        return tuple(sorted(set(args.load)))
    return goodput_options.loads(args, sources)


def fit_start(args: argparse.Namespace) -> costs.Engine:
    """The engine to begin a fit with: its limits must be those of the one recorded. Raises OptionError, EngineError."""
    if len(args.fit) > 2:
        raise OptionError("--fit: one recording, and perhaps a second to judge it by")
    if args.config is not None:
        raise OptionError("--config: with --fit say --chunk-tokens, --max-running and --kv-tokens")
    return _engine(args)


def _engines(args: argparse.Namespace) -> tuple[costs.Engine, ...]:
    if args.config is not None:
        if args.backends:
            raise OptionError("--backends: the configuration says how many there are")
        return tuple(plan_engines.engines(args, None))
    one = _engine(args)
    count = args.backends or 1
    return tuple(replace(one, name=f"engine {number + 1}" if count > 1 else one.name) for number in range(count))


def _engine(args: argparse.Namespace) -> costs.Engine:
    one = plan_engines.changed(ENGINE, args)
    if one.chunk_tokens < one.max_running:
        raise OptionError("--chunk-tokens must be at least --max-running: each decode takes one token of a step")
    return one
