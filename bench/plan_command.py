"""`signalbox profile` and `signalbox plan`: the shape of a workload, and what engines carry of it."""

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from bench import goodput, plan_engines, traces, workload
from bench import plan as plans
from bench.costs import Traffic, drawn, replayed
from bench.live import Live, LiveError, watched
from bench.plan import HEADROOM, Planned, Wanted
from bench.plan_engines import EngineError
from bench.plan_page import plan_page, profile_page, rows_of
from bench.traces import Row, TraceError
from bench.workload import Profile
from gateway.config import ConfigError
from policies.types import Objective

WATCH_S = 30.0
ADMIN_KEY_ENV = "SIGNALBOX_ADMIN_KEY"


class Asked(msgspec.Struct, frozen=True):
    """A workload, from wherever it is known."""

    profile: Profile
    traffic: Traffic
    rows: tuple[Row, ...]
    live: Live | None = None


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Shape of a workload: lengths, arrivals, bursts, tenants, prefix reuse."""
    parser.set_defaults(command=lambda args: _saying(_profile, args))
    _add_workload(parser.add_argument_group("the workload"))
    parser.add_argument("--model", default="", help="with --gateway: which of its models; not needed with one")
    _add_output(parser)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Capacity at an objective, limits to set, and replicas for a load."""
    parser.set_defaults(command=lambda args: _saying(_plan, args))
    _add_workload(parser.add_argument_group("the workload"))
    plan_engines.add_arguments(parser.add_argument_group("the engines"))
    add = parser.add_argument_group("what for").add_argument
    add("--goodput", metavar="GOAL:MS", nargs="+", default=[], help="ttft:2000 tpot:100 e2el:60000")
    add("--attained", metavar="PART", type=float, default=0.95, help="of requests that must make it; 0.95")
    add(
        "--load",
        metavar="R",
        type=float,
        default=0.0,
        help="requests/s to find replicas for; the traffic's own if not given",
    )
    add(
        "--headroom", metavar="PART", type=float, default=HEADROOM, help=f"of what they carry, to keep free; {HEADROOM}"
    )
    _add_output(parser)


def _add_workload(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    shipped = ", ".join(traces.SHIPPED)
    add("--trace", default="azure-chat", help=f"a CSV or JSON-lines file, or {shipped}; azure-chat if not given")
    add("--part", choices=("all", "fit", "report"), default="all", help="all rows, the first 60 %%, or the last 40 %%")
    add("--cv", type=float, help="of Gamma gaps between arrivals, in place of the trace's own clock; 1 is Poisson")
    add("--context", metavar="N", type=int, default=0, help="cut prompts to fit so many tokens")
    add("--gateway", metavar="URL", default="", help="in place of a trace: what a running gateway sees")
    add("--watch-s", metavar="S", type=float, default=WATCH_S, help=f"for so long; {WATCH_S:.0f}")
    add("--key-env", metavar="NAME", default=ADMIN_KEY_ENV, help=f"the variable with its admin key; {ADMIN_KEY_ENV}")


def _add_output(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("the report").add_argument
    out("--json", metavar="FILE", type=Path, help="all of it, for programs")
    out("--html", metavar="FILE", type=Path, help="one page that needs no network")


def _saying(command: Callable[[argparse.Namespace], str], args: argparse.Namespace) -> int:
    try:
        print(command(args))
    except (ConfigError, EngineError, TraceError, ValueError) as error:
        print(f"signalbox: {error}", file=sys.stderr)
        return 2
    except (LiveError, OSError) as error:
        print(f"signalbox: {error}", file=sys.stderr)
        return 1
    return 0


def _asked(args: argparse.Namespace) -> Asked:
    if args.cv is not None and not 0 < args.cv <= 20:
        raise ValueError(f"--cv must be above 0 and at most 20, not {args.cv:g}")
    if args.gateway:
        live = asyncio.run(watched(args.gateway, args.key_env, args.model, args.watch_s))
        return Asked(live.profile, live.traffic, live.traffic.rows, live)
    trace = traces.read(args.trace).part(args.part)
    if args.context:
        trace = trace.within(args.context)
    if args.cv is not None or not trace.rate:
        traffic = drawn(trace, args.cv if args.cv is not None else 1.0)
    else:
        traffic = replayed(trace)
    return Asked(workload.profile(trace), traffic, rows_of(trace))


def _profile(args: argparse.Namespace) -> str:
    found = _asked(args)
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(found.profile), indent=1) + b"\n")
    if args.html:
        args.html.write_text(profile_page(found.profile, found.rows), encoding="utf-8")
    return workload.text(found.profile)


def _plan(args: argparse.Namespace) -> str:
    objective = goodput.goals(args.goodput)
    if objective == Objective():
        raise ValueError("--goodput is needed: when is an answer good? For example --goodput ttft:2000 tpot:100")
    if not 0 < args.attained < 1 or not 0 <= args.headroom < 1 or args.load < 0:
        raise ValueError("--attained must be between 0 and 1, --headroom from 0 to below 1, --load 0 or more")
    asked = _asked(args)
    engines = plan_engines.engines(args, asked.live)
    come = asked.profile.arrivals
    load = args.load or (come.rate if come is not None else 0.0)
    wanted = Wanted(objective=objective, level=args.attained, headroom=args.headroom, load=load)
    found = plans.plan(asked.profile, asked.traffic, engines, wanted)
    _write(args, found, asked.rows)
    return plans.text(found)


def _write(args: argparse.Namespace, found: Planned, rows: tuple[Row, ...]) -> None:
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    if args.html:
        args.html.write_text(plan_page(found, rows), encoding="utf-8")
