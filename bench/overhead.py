"""What the gateway itself costs: `python -m bench.overhead [--traces] [--seconds N] [--rounds N] [--json FILE]`.

The gateway runs on one core; the mock upstream, the load and the store on another. In the same run: a plain Litestar
and aiohttp relay, and SMG where its command is installed. They take turns, and the medians of all rounds count: compare
numbers of one run only. CPU is user and system time of a target's processes, without the store's, which is shown apart.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.load import Mark, Result, Wish
from bench.processes import Cores, Failed, pinned
from bench.targets import GATEWAY, Target, started, traced


class Effort(Struct, frozen=True):
    """How long and how much to measure."""

    seconds: float
    rounds: int
    paced_streams: int = 300
    itl_ms: float = 20.0
    warm_up_s: float = 2.0
    use_wrk: bool = True


class Numbers(Struct):
    """Medians for one target; None where it was not measured."""

    requests_per_s: float | None = None
    request_cpu_us: float | None = None
    request_store_us: float | None = None
    streams_per_s: float | None = None
    stream_cpu_us: float | None = None
    paced_chunks_per_s: float | None = None
    paced_chunk_cpu_us: float | None = None
    alone_p50_ms: float | None = None
    added_p50_ms: float | None = None
    memory_mib: float | None = None


class Verdict(Struct):
    """A promise and what became of it. `by_cpu` is the same ratio from CPU time, which other work disturbs less."""

    what: str
    measured: float
    target: float
    met: bool
    by_cpu: float | None = None


class Bench:
    """The cores, and how load is made and measured on them."""

    def __init__(self, effort: Effort, cores: Cores) -> None:
        self.effort, self.cores = effort, cores
        self.wrk = shutil.which("wrk") if effort.use_wrk else None

    def whole(self, target: Target) -> dict[str, float]:
        result, cpu_us, store_us = self._closed(target, concurrency=32, stream=False, tokens=16)
        return {
            "requests_per_s": result.requests / result.seconds,
            "request_cpu_us": cpu_us,
            "request_store_us": store_us,
        }

    def streams(self, target: Target) -> dict[str, float]:
        result, cpu_us, _ = self._closed(target, concurrency=32, stream=True, tokens=64)
        return {"streams_per_s": result.requests / result.seconds, "stream_cpu_us": cpu_us}

    def alone(self, target: Target) -> dict[str, float]:
        result, _, _ = self._closed(target, concurrency=1, stream=False, tokens=16)
        return {"alone_p50_ms": result.p50_ms}

    def paced(self, target: Target) -> dict[str, float]:
        """Long streams at a pace; CPU is taken between the generator's two marks."""
        effort = self.effort
        tokens = int((effort.warm_up_s + 2 * effort.seconds + 5) * 1e3 / effort.itl_ms)
        wish = self._wish(target, concurrency=effort.paced_streams, stream=True, tokens=tokens)
        wish = msgspec.structs.replace(wish, itl_ms=effort.itl_ms, warm_up_s=effort.warm_up_s)
        marks, cpu_s = [], []
        with subprocess.Popen(self._load(wish), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for line in process.stdout:
                cpu_s.append(target.running.cpu_s())
                marks.append(msgspec.json.decode(line.split(b" ", 1)[1], type=Mark))
        if process.returncode or len(marks) != 2 or marks[1].errors:
            raise Failed(f"{target.name}: the paced run failed: {marks}\n{target.running.said()[-2_000:]}")
        chunks = max(1, marks[1].chunks - marks[0].chunks)
        return {
            "paced_chunks_per_s": chunks / (marks[1].seconds - marks[0].seconds),
            "paced_chunk_cpu_us": (cpu_s[1] - cpu_s[0]) / chunks * 1e6,
        }

    def _closed(self, target: Target, concurrency: int, stream: bool, tokens: int) -> tuple[Result, float, float]:
        """A closed-loop run: its result, and CPU and store CPU per request in microseconds."""
        wish = self._wish(target, concurrency, stream, tokens)
        before = target.running.cpu_s(), target.running.cpu_s(stores=True)
        said = subprocess.run(self._wrk(wish) or self._load(wish), capture_output=True, text=True, check=True).stdout
        after = target.running.cpu_s(), target.running.cpu_s(stores=True)
        line = next(line for line in said.splitlines() if line.startswith("RESULT "))
        result = msgspec.json.decode(line.removeprefix("RESULT "), type=Result)
        if result.errors or not result.requests:
            raise Failed(f"{target.name}: {result}\n{target.running.said()[-2_000:]}")
        cpu, store = (1e6 * (end - begin) / result.requests for begin, end in zip(before, after, strict=True))
        return result, cpu, store

    def _wish(self, target: Target, concurrency: int, stream: bool, tokens: int) -> Wish:
        url, seconds = f"{target.url}/v1/chat/completions", self.effort.seconds
        return Wish(url, key=target.key, concurrency=concurrency, stream=stream, tokens=tokens, seconds=seconds)

    def _wrk(self, wish: Wish) -> list[str] | None:
        if self.wrk is None:
            return None
        script = str(Path(__file__).with_name("chat.lua"))
        argv = [self.wrk, "-t1", f"-c{wish.concurrency}", f"-d{max(1, round(wish.seconds))}s", "-s", script, wish.url]
        argv += ["--", str(int(wish.stream)), str(wish.tokens), wish.model, *([wish.key] if wish.key else [])]
        return pinned(argv, self.cores.others)

    def _load(self, wish: Wish) -> list[str]:
        return pinned([sys.executable, "-m", "bench.load", msgspec.json.encode(wish).decode()], self.cores.others)


Samples = dict[str, dict[str, list[float]]]
"""By target and by field of Numbers: one value a round."""


Scenario = Callable[[Target], dict[str, float]]


def measure(bench: Bench, targets: list[Target], scenarios: tuple[Scenario, ...]) -> Samples:
    """All scenarios, all targets in turn, round after round, each round in the other direction."""
    samples: Samples = {target.name: {} for target in targets}
    for number in range(bench.effort.rounds):
        for scenario in scenarios:
            print(f"round {number + 1} of {bench.effort.rounds}: {scenario.__name__}", file=sys.stderr)
            for target in targets if number % 2 == 0 else reversed(targets):
                if target.name == "direct" and scenario != bench.alone:
                    continue
                for name, value in scenario(target).items():
                    samples[target.name].setdefault(name, []).append(value)
    for target in targets:
        if "direct" in samples:
            direct_ms, own_ms = samples["direct"]["alone_p50_ms"], samples[target.name]["alone_p50_ms"]
            samples[target.name]["added_p50_ms"] = [own - direct for own, direct in zip(own_ms, direct_ms, strict=True)]
        samples[target.name]["memory_mib"] = [target.running.memory_mib()]
    return samples


def medians(samples: Samples) -> dict[str, Numbers]:
    return {
        name: Numbers(**{field: statistics.median(values) for field, values in fields.items()})
        for name, fields in samples.items()
    }


def ratio(samples: Samples, ours: str, theirs: str, kind: str, target: float) -> Verdict:
    """How many times another's requests or streams a second ours makes, round by round; the median counts."""
    mine, other = samples[ours], samples[theirs]
    rate, cpu = f"{kind}s_per_s", f"{kind}_cpu_us"
    times = statistics.median(one / its for one, its in zip(mine[rate], other[rate], strict=True))
    by_cpu = statistics.median(its / one for one, its in zip(mine[cpu], other[cpu], strict=True))
    what = f"{rate}, times that of {theirs}" if ours == "signalbox" else f"{rate} {ours}, times {theirs}"
    return Verdict(what, times, target, times >= target, by_cpu)


def judge_traces(samples: Samples) -> list[Verdict]:
    """What tracing may cost: a fifth of the requests a second at full sampling, 4 % at 1 %."""
    return [
        ratio(samples, "at_1", "untraced", "request", 0.96),
        ratio(samples, "at_100", "untraced", "request", 0.80),
    ]


def judge(samples: Samples) -> list[Verdict]:
    """What the gateway promises, against what was measured."""
    ours = samples["signalbox"]

    def at_most(field: str, target: float) -> Verdict:
        value = statistics.median(ours[field])
        return Verdict(f"{field}, at most", value, target, value <= target)

    verdicts = [
        ratio(samples, "signalbox", "relay", "request", 2.0),
        ratio(samples, "signalbox", "relay", "stream", 1.7),
        at_most("paced_chunk_cpu_us", 75.0),
        at_most("added_p50_ms", 1.0),
    ]
    if "smg" in samples:
        verdicts.append(ratio(samples, "signalbox", "smg", "request", 1.0))
        verdicts.append(ratio(samples, "signalbox", "smg", "stream", 1.0))
    return verdicts


ROWS = {
    "requests_per_s": "requests/s, 16 tokens whole, 32 callers",
    "request_cpu_us": "  CPU per request, us",
    "request_store_us": "  store CPU per request, us",
    "streams_per_s": "streams/s, 64 chunks each, 32 callers",
    "stream_cpu_us": "  CPU per stream, us",
    "paced_chunks_per_s": "paced chunks/s delivered",
    "paced_chunk_cpu_us": "  CPU per paced chunk, us",
    "alone_p50_ms": "median latency of one caller, ms",
    "added_p50_ms": "  added to a direct call, ms",
    "memory_mib": "resident memory at the end, MiB",
}


def table(found: dict[str, Numbers], verdicts: list[Verdict]) -> str:
    lines = [f"{'':44}" + "".join(f"{name:>12}" for name in found)]
    for field, title in ROWS.items():
        values = [getattr(numbers, field) for numbers in found.values()]
        cells = ["-" if value is None else f"{value:,.2f}" if value < 10 else f"{value:,.0f}" for value in values]
        lines.append(f"{title:44}" + "".join(f"{cell:>12}" for cell in cells))
    lines.append("")
    for verdict in verdicts:
        met = "met" if verdict.met else "MISSED"
        by_cpu = "" if verdict.by_cpu is None else f"   (by CPU {verdict.by_cpu:.2f})"
        lines.append(f"{verdict.what:44}{verdict.measured:12.2f}   target {verdict.target:g}: {met}{by_cpu}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round: does it work at all?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--gateway", default=GATEWAY, metavar="COMMAND", help="what to measure (default: %(default)s)")
    parser.add_argument("--smg", default=shutil.which("smg") or "", metavar="PATH", help="SMG's command")
    parser.add_argument("--no-wrk", action="store_true", help="load from Python even where wrk is there")
    parser.add_argument("--traces", action="store_true", help="what traces cost, instead: none, of 1 %% and of all")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    args = parser.parse_args(argv)
    effort = Effort(args.seconds, args.rounds, use_wrk=not args.no_wrk)
    if args.quick:
        effort = Effort(0.5, 1, paced_streams=50, warm_up_s=0.5, use_wrk=not args.no_wrk)
    bench = Bench(effort, Cores.found())
    for missing, what in ((bench.cores.apart, "two cores and taskset"), (bench.wrk, "wrk"), (args.smg, "smg")):
        if not missing:
            print(f"without {what}", file=sys.stderr)
    try:
        if args.traces:
            with traced(bench.cores, args.gateway) as targets:
                samples = measure(bench, targets, (bench.whole, bench.streams))
        else:
            with started(bench.cores, args.gateway, args.smg) as targets:
                samples = measure(bench, targets, (bench.alone, bench.whole, bench.streams, bench.paced))
    except Failed as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 2
    found, verdicts = medians(samples), (judge_traces if args.traces else judge)(samples)
    print(table(found, verdicts))
    if args.json is not None:
        told = {"numbers": found, "verdicts": verdicts, "samples": samples}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(told)))
    return 1 if args.check and not all(verdict.met for verdict in verdicts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
