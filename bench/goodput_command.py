"""`signalbox bench`: replay traffic against a server and report its goodput, or put reports side by side."""

import argparse
import asyncio
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench import goodput_options, report
from bench.arrivals import trace_of
from bench.goodput_options import OptionError, Wish
from bench.prompts import PromptError, Words
from bench.replay import Plan, Replayed, ReplayError, Sight, Watcher, replay, unlike
from bench.report import Point, Report, ReportError
from bench.report_page import page
from bench.target import Target, TargetError, words_for
from bench.traces import TraceError

UNLIKE = 0.02  # median error of prompt lengths, above which a report says so
COLUMNS = (
    TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
    TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
)  # fmt: skip


def add(parser: argparse.ArgumentParser) -> None:
    """Goodput of any OpenAI-compatible server under a trace."""
    parser.set_defaults(command=_bench)
    goodput_options.add_arguments(parser)
    actions = parser.add_subparsers(metavar="compare", title="reports side by side")
    compare = actions.add_parser("compare", help="several reports in one page and one table")
    compare.set_defaults(command=_compare)
    compare.add_argument("reports", metavar="REPORT", type=Path, nargs="+", help="JSON of earlier runs")
    compare.add_argument("--html", metavar="FILE", type=Path, dest="page", help="the page")


def _bench(args: argparse.Namespace) -> int:
    try:
        found = asyncio.run(_run(args, goodput_options.wish(args), goodput_options.target(args)))
    except (OptionError, TraceError) as error:
        print(f"signalbox: {error}", file=sys.stderr)
        return 2
    except (PromptError, ReplayError, TargetError, OSError) as error:
        print(f"signalbox: {error}", file=sys.stderr)
        return 1
    print(report.text(found))
    return 0


async def _run(args: argparse.Namespace, wanted: Wish, target: Target) -> Report:
    """All runs, written as the options say."""
    target, context, words, counted_by = await _met(target, args)
    plan = Plan(
        target=target,
        sources=wanted.sources,
        words=words,
        rate=wanted.loads[0],
        requests=1,
        processes=args.processes,
        context_tokens=context,
    )
    with ExitStack() as stack:
        watch = stack.enter_context(Watch(wanted, args.quiet))
        out = stack.enter_context(args.records.open("wb")) if args.records else None
        if args.warmup:
            await replay(replace(plan, requests=args.warmup, seed=0), watch.part("warm-up", args.warmup))
        runs = Runs(plan, watch, out)
        points = [await runs.point(load, wanted) for load in wanted.loads]
    asked = goodput_options.asked(args, target.model, {"sources": wanted.sources, "prompts_counted_by": counted_by})
    notes = [note for source in wanted.sources for note in trace_of(source, context).notes]
    label = args.label or f"{target.model} at {target.origin}"
    aims = {source.name: source.objective for source in wanted.sources}
    found = report.report_of(label, aims, asked, points, (*notes, *runs.notes))
    if args.json:
        args.json.write_bytes(report.encoded(found))
    if args.html:
        args.html.write_text(page([found]), encoding="utf-8")
    return found


async def _met(target: Target, args: argparse.Namespace) -> tuple[Target, int, Words, str]:
    """The server asked for its model, context and words, before anything is measured."""
    pool = target.pool()
    try:
        models = await target.models(pool)
        if not target.model and len(models) != 1:
            raise OptionError(f"--model is needed: {target.url} lists {', '.join(models) or 'none'}")
        target = replace(target, model=target.model or next(iter(models)))
        words, counted_by = await words_for(target, pool, args.tokenizer)
    finally:
        pool.close()
    return target, args.context or models.get(target.model, 0), words, counted_by


class Runs:
    """Runs one load after the other, each with all seeds."""

    def __init__(self, plan: Plan, watch: "Watch", out: IO[bytes] | None) -> None:
        self._plan, self._watch, self._out = plan, watch, out
        self._aims = {source.name: source.objective for source in plan.sources}
        self.notes: list[str] = []

    async def point(self, load: float, wanted: Wish) -> Point:
        runs = []
        for seed in wanted.seeds:
            plan = replace(self._plan, rate=load, requests=wanted.requests_at(load), seed=seed)
            found = await replay(plan, self._watch.part(f"{load:.4g}/s, seed {seed}", plan.requests))
            runs.append(report.run_of(found.records, self._aims, plan.span_s, seed, found.generator))
            self._keep(load, seed, found)
        return report.point_of(load, runs)

    def _keep(self, load: float, seed: int, found: Replayed) -> None:
        if (off := unlike(found.records)) > UNLIKE:
            self.notes.append(f"at {load:g} requests/s prompts were {off:.0%} off the planned lengths (median)")
        if self._out is not None:
            head = {"load": load, "seed": seed}
            for record in found.records:
                self._out.write(msgspec.json.encode(head | msgspec.to_builtins(record)) + b"\n")


class Watch:
    """The progress of all runs on standard error: a bar with rate and time left where it is a terminal, else a line
    for each run."""

    def __init__(self, wanted: Wish, quiet: bool) -> None:
        console = Console(stderr=True, quiet=quiet)
        self._bars = Progress(*COLUMNS, console=console, disable=quiet or not console.is_terminal, transient=True)
        self._console = console
        whole = sum(wanted.requests_at(load) for load in wanted.loads) * len(wanted.seeds)
        self._all = self._bars.add_task("all runs", total=whole, rate="")
        self._before = 0

    def __enter__(self) -> "Watch":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def part(self, name: str, requests: int) -> Watcher:
        """A watcher for one run."""
        if not self._console.is_terminal:
            self._console.print(f"{name}: about {requests} requests")
        bar = self._bars.add_task(name, total=requests, rate="")
        begun, before = time.perf_counter(), self._before

        def watch(sight: Sight) -> None:
            pace = sight.ended / max(1e-3, time.perf_counter() - begun)
            text = f"{pace:.1f}/s, {sight.sent - sight.ended} in flight"
            self._bars.update(bar, total=sight.planned, completed=sight.ended, rate=text)
            self._before = before + sight.ended
            self._bars.update(self._all, completed=self._before)

        return watch


def _compare(args: argparse.Namespace) -> int:
    try:
        found = [report.load(file) for file in args.reports]
    except ReportError as error:
        print(f"signalbox: {error}", file=sys.stderr)
        return 2
    if args.page:
        args.page.write_text(page(found), encoding="utf-8")
    print("\n\n".join(report.text(one) for one in found))
    return 0
