"""`signalbox simulate`: traffic, policy and engines in virtual time, with the reports of `signalbox bench`."""

import argparse
import functools
import sys
import time
from contextlib import ExitStack
from typing import IO

import msgspec
from msgspec.structs import replace
from rich.console import Console

from bench import fit as fitting
from bench import report, simulate_options
from bench.arrivals import planned, trace_of
from bench.fit import FitError
from bench.goodput import measure
from bench.goodput_options import OptionError
from bench.plan_engines import EngineError
from bench.replay import ReplayError
from bench.report import Point, Report, Run
from bench.report_page import page
from bench.sim_baselines import spread
from bench.sim_lab import CAPS, FIT_SEEDS, highest
from bench.sim_store import Store
from bench.simulate import Setup, records_of, simulate
from bench.simulate_options import Wish
from bench.traces import TraceError
from gateway.config import ConfigError

MADE = "in virtual time"
NOTE = "simulated: engines by their step times, gateways by their policies and the queue's scripts; no HTTP, no network"
SEARCHED = 2_000  # requests of each run of a search, at most


def add(parser: argparse.ArgumentParser) -> None:
    """Goodput of policies in front of simulated engines, in virtual time."""
    parser.set_defaults(command=_simulate)
    simulate_options.add_arguments(parser)


def _simulate(args: argparse.Namespace) -> int:
    try:
        if args.fit:
            return _fit(args)
        wanted = simulate_options.wish(args)
        found = _run(args, wanted)
        if args.json:
            args.json.write_bytes(report.encoded(found[0]))
        if args.html:
            args.html.write_text(page(found), encoding="utf-8")
    except (ConfigError, EngineError, FitError, OptionError, TraceError, ValueError) as error:
        print(f"signalbox: {error}", file=sys.stderr)
        return 2
    except (OSError, ReplayError) as error:
        print(f"signalbox: {error}", file=sys.stderr)
        return 1
    print("\n\n".join(map(report.text, found)))
    return 0


def _fit(args: argparse.Namespace) -> int:
    start = simulate_options.fit_start(args)
    run, *unseen = map(fitting.heard, args.fit)
    found = fitting.fit(run, unseen[0] if unseen else (), start)
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    print(fitting.text(found))
    return 0


def _run(args: argparse.Namespace, wanted: Wish) -> list[Report]:
    """One report for each policy."""
    with ExitStack() as stack:
        store = stack.enter_context(Store())
        out = stack.enter_context(args.records.open("wb")) if args.records else None
        runs = Runs(wanted, store, out, Console(stderr=True, quiet=args.quiet))
        return [_report(args, wanted, runs, policy) for policy in wanted.policies]


def _report(args: argparse.Namespace, wanted: Wish, runs: "Runs", policy: str) -> Report:
    setup = replace(wanted.setup, policy=policy)
    points = [runs.point(setup, load) for load in wanted.loads]
    names = ("part", "goodput", "leave", "retries", "gateways", "known_lengths", "requests")
    asked = {name: getattr(args, name) for name in names if getattr(args, name)} | {
        "simulated": True,
        "policy": policy,
        "sources": wanted.setup.sources,
        "engines": wanted.setup.engines,
        "max_tokens": wanted.setup.max_tokens,
        "context": wanted.context,
        "seeds": wanted.seeds,
        **runs.searched,
    }
    label = f"{args.label or policy} (simulated)"
    if args.label and len(wanted.policies) > 1:
        label = f"{args.label}, {policy} (simulated)"
    aims = {source.name: source.objective for source in wanted.setup.sources}
    notes = [note for source in wanted.setup.sources for note in trace_of(source, wanted.context).notes]
    found = report.report_of(label, aims, asked, points, (NOTE, *notes))
    return replace(found, made=MADE)


class Runs:
    """Runs one load after the other, each with all seeds; searches for what is to be tuned first."""

    def __init__(self, wanted: Wish, store: Store, out: IO[bytes] | None, console: Console) -> None:
        self._wanted, self._store, self._out, self._console = wanted, store, out, console
        self._aims = {source.name: source.objective for source in wanted.setup.sources}
        self._caps: dict[float, int] = {}
        self.searched: dict[str, float] = {}

    def point(self, setup: Setup, load: float) -> Point:
        rate = load * self.capacity() if self._wanted.of_capacity else load
        if setup.policy == "cap" and not setup.cap:
            setup = replace(setup, cap=self._tuned(setup, rate))
        if setup.policy == "tenant-rate" and not setup.tenant_rate:
            setup = replace(setup, tenant_rate=self.capacity())
        return report.point_of(rate, [self._one(setup, rate, seed) for seed in self._wanted.seeds])

    def capacity(self) -> float:
        """Requests/s that the engines alone carry with 95 % attained, on the part of the traces that is for tuning."""
        if "capacity_rps" not in self.searched:
            setup = self._tuning("pass")
            start = float(len(setup.engines))
            rate = highest(functools.cache(lambda rate: self._attained(setup, rate)), start, "--load")
            self._console.print(f"load 1 is {rate:.4g} requests/s")
            self.searched["capacity_rps"] = rate
        return self.searched["capacity_rps"]

    def _attained(self, setup: Setup, rate: float) -> float:
        return sum(self._tried(setup, rate, seed)["attained"] for seed in FIT_SEEDS) / len(FIT_SEEDS)

    def _tuned(self, setup: Setup, rate: float) -> int:
        if rate not in self._caps:
            one = self._tuning(setup.policy)
            cap, marks = spread(CAPS, lambda cap: self._tried(replace(one, cap=cap), rate, FIT_SEEDS[0])["goodput_rps"])
            told = ", ".join(f"{cap}: {mark:.2f}" for cap, mark in marks.items())
            self._console.print(f"best cap at {rate:.4g}/s is {cap}; good requests/s by cap: {told}")
            self._caps[rate] = cap
            self.searched[f"cap at {rate:.4g}/s"] = cap
        return self._caps[rate]

    def _tuning(self, policy: str) -> Setup:
        sources = tuple(replace(one, part="fit") for one in self._wanted.setup.sources)
        return replace(self._wanted.setup, sources=sources, policy=policy)

    def _tried(self, setup: Setup, rate: float, seed: int) -> dict[str, float]:
        requests = min(SEARCHED, self._wanted.requests)
        plans = planned(setup.sources, rate, requests, seed, self._wanted.context)
        site = simulate(setup, plans, self._store)
        numbers: dict[str, float] = measure(records_of(site, plans), self._aims, requests / rate)["all"]
        return numbers

    def _one(self, setup: Setup, rate: float, seed: int) -> Run:
        requests, begun = self._wanted.requests, time.perf_counter()
        plans = planned(setup.sources, rate, requests, seed, self._wanted.context)
        if not plans:
            raise ReplayError(f"no request falls into {requests / rate:.3g} s at {rate:g} requests/s with seed {seed}")
        name = f"{setup.policy}, {rate:.4g}/s, seed {seed}"
        with self._console.status(name) as status:
            site = simulate(
                setup, plans, self._store, lambda ended: status.update(f"{name}: {ended} of {len(plans)} requests")
            )
        records = records_of(site, plans)
        took_s = time.perf_counter() - begun
        self._console.print(f"{name}: {len(plans)} requests in {took_s:.1f} s, {site.now_ms / 1000 / took_s:.0f}x life")
        if self._out is not None:
            head = {"load": rate, "seed": seed, "policy": setup.policy}
            for record in records:
                self._out.write(msgspec.json.encode(head | msgspec.to_builtins(record)) + b"\n")
        return report.run_of(records, self._aims, requests / rate, seed, None)
