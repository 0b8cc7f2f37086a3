"""What the gateway itself costs: `python -m bench.overhead [--seconds N] [--rounds N] [--quick] [--json FILE]`.

The gateway runs on one core; the mock upstream, the load and the store on another. In the same run: a plain Litestar
and aiohttp relay, and SMG where its command is installed. They take turns, and the medians of all rounds count: compare
numbers of one run only. CPU is user and system time of a target's processes, without the store's, which is shown apart.
"""

import argparse
import hashlib
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.load import Mark, Result, Wish
from bench.processes import Failed, Running, cores, free_port, pinned, wait_for

KEY = "sk-bench-overhead"
GATEWAY = "{bin}/signalbox serve --config {config} --port {port}"
RELAY = "{python} -m bench.baseline_relay --port {port} --upstream {upstream}"
SMG = (
    "{smg} launch --host 127.0.0.1 --port {port} --prometheus-port {spare} --worker-urls {upstream}"
    " --policy round_robin --priority-scheduler-enabled --api-key {key} --log-level warn"
)
CONFIG = """
[store]
url = "embedded"

[[tenant]]
name = "bench"
keys = ["sha256:{digest}"]

[[pool]]
model = "mock"

[[pool.backend]]
kind = "openai"
name = "mock"
url = "{upstream}"
limits = {{ max_running = 1024, prefill_tokens_per_s = 10_000_000, kv_tokens = 100_000_000, chunk_tokens = 1_000_000 }}
"""


class Target(Struct):
    """Something that answers chat completions. The upstream itself is one too, for what a direct call takes."""

    name: str
    running: Running
    url: str
    key: str = ""


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
    what: str
    measured: float
    target: float
    met: bool


class Bench:
    """The cores, and how load is made and measured on them."""

    def __init__(self, effort: Effort) -> None:
        self.effort = effort
        self.cores = cores()
        self.target_core = self.cores[0] if self.cores else None
        self.other_core = self.cores[1] if self.cores else None
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
        return pinned(argv, self.other_core)

    def _load(self, wish: Wish) -> list[str]:
        return pinned([sys.executable, "-m", "bench.load", msgspec.json.encode(wish).decode()], self.other_core)


@contextmanager
def started(bench: Bench, gateway: str, smg: str) -> Iterator[list[Target]]:
    """The upstream first, then all that stand before it. Everything ends with the context."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="signalbox-bench-")))

        def start(name: str, argv: list[str], core: int | None) -> Running:
            running = Running(name, argv, core, folder / f"{name}.log")
            stack.callback(running.stop)
            return running

        port = free_port()
        upstream = f"http://127.0.0.1:{port}"
        mock = start("upstream", [sys.executable, "-m", "bench.mock_openai", "--port", str(port)], bench.other_core)
        targets = [Target("direct", mock, upstream)]
        wait_for(mock, partial(_answers, targets[0]))
        config = folder / "config.toml"
        config.write_text(CONFIG.format(digest=hashlib.sha256(KEY.encode()).hexdigest(), upstream=upstream))
        for name, command in (("signalbox", gateway), ("relay", RELAY), *((("smg", SMG),) if smg else ())):
            port, binaries = free_port(), Path(sys.executable).parent
            argv = [
                part.format(
                    bin=binaries, python=sys.executable, smg=smg, config=config, port=port, spare=free_port(),
                    upstream=upstream, key=KEY,
                )
                for part in shlex.split(command)
            ]  # fmt: skip
            key = "" if name == "relay" else KEY
            target = Target(name, start(name, argv, bench.target_core), f"http://127.0.0.1:{port}", key)
            wait_for(target.running, partial(_answers, target))
            target.running.move_stores(bench.other_core)
            targets.append(target)
        yield targets


def _answers(target: Target) -> bool:
    """Whether it answers a chat completion."""
    body = msgspec.json.encode({"model": "mock", "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1})
    headers = {"content-type": "application/json", "authorization": f"Bearer {target.key or 'none'}"}
    try:
        asked = urllib.request.Request(f"{target.url}/v1/chat/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def measure(bench: Bench, targets: list[Target]) -> dict[str, Numbers]:
    """All scenarios, all targets in turn, round after round; medians."""
    scenarios = (bench.alone, bench.whole, bench.streams, bench.paced)
    samples: dict[str, dict[str, list[float]]] = {target.name: {} for target in targets}
    for number in range(bench.effort.rounds):
        for scenario in scenarios:
            print(f"round {number + 1} of {bench.effort.rounds}: {scenario.__name__}", file=sys.stderr)
            for target in targets:
                if target.name == "direct" and scenario != bench.alone:
                    continue
                for name, value in scenario(target).items():
                    samples[target.name].setdefault(name, []).append(value)
    found = {}
    for target in targets:
        medians = {name: statistics.median(values) for name, values in samples[target.name].items()}
        found[target.name] = Numbers(**medians, memory_mib=target.running.memory_mib())
    direct_ms = found["direct"].alone_p50_ms or 0.0
    for numbers in found.values():
        numbers.added_p50_ms = (numbers.alone_p50_ms or 0.0) - direct_ms
    return found


def judge(found: dict[str, Numbers]) -> list[Verdict]:
    """What the gateway promises, against what was measured."""
    ours, relay = found["signalbox"], found["relay"]
    verdicts = [
        _at_least("requests/s, times the plain relay's", _ratio(ours.requests_per_s, relay.requests_per_s), 2.0),
        _at_least("64-chunk streams/s, times the plain relay's", _ratio(ours.streams_per_s, relay.streams_per_s), 1.7),
        _at_most("CPU per paced chunk, us", ours.paced_chunk_cpu_us, 75.0),
        _at_most("added median latency alone, ms", ours.added_p50_ms, 1.0),
    ]
    if (smg := found.get("smg")) is not None:
        verdicts += [
            _at_least("requests/s, times SMG's", _ratio(ours.requests_per_s, smg.requests_per_s), 1.0),
            _at_least("64-chunk streams/s, times SMG's", _ratio(ours.streams_per_s, smg.streams_per_s), 1.0),
        ]
    return verdicts


def _ratio(ours: float | None, theirs: float | None) -> float:
    return (ours or 0.0) / (theirs or float("inf"))


def _at_least(what: str, measured: float, target: float) -> Verdict:
    return Verdict(what, measured, target, measured >= target)


def _at_most(what: str, measured: float | None, target: float) -> Verdict:
    value = float("inf") if measured is None else measured
    return Verdict(f"{what} (at most)", value, target, value <= target)


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
        lines.append(f"{verdict.what:56}{verdict.measured:8.2f}   target {verdict.target:g}: {met}")
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
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    args = parser.parse_args(argv)
    effort = Effort(args.seconds, args.rounds, use_wrk=not args.no_wrk)
    if args.quick:
        effort = Effort(0.5, 1, paced_streams=50, warm_up_s=0.5, use_wrk=not args.no_wrk)
    bench = Bench(effort)
    for missing, what in ((bench.cores, "two cores and taskset"), (bench.wrk, "wrk"), (args.smg, "smg")):
        if not missing:
            print(f"without {what}", file=sys.stderr)
    try:
        with started(bench, args.gateway, args.smg) as targets:
            found = measure(bench, targets)
    except Failed as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 2
    verdicts = judge(found)
    print(table(found, verdicts))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode({"numbers": found, "verdicts": verdicts})))
    return 1 if args.check and not all(verdict.met for verdict in verdicts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
