"""`signalbox bench` against vLLM's own `bench serve`: both ask the same server at the same time, and must agree.

    python -m bench.agreement --url http://127.0.0.1:8080 --model tiny --tokenizer .models/tiny \
        --goodput ttft:200 tpot:30 --rate 2 --requests 300

At the same time, so that both see the same server under the same load. Each draws its own Poisson arrivals of requests
that are all alike, so what is left between them is chance: some per cent with a few hundred requests. Exit code 1 where
they differ by more than `--within`. Needs a Python with vLLM (`--python`).
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench import goodput
from bench.arrivals import Source
from bench.goodput import Record
from bench.replay import Plan, replay
from bench.sim_metrics import quantile
from bench.target import PATHS, Target, words_for

# Its console script asks for the metadata of a package called vllm, which its CPU build does not have.
THEIRS = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

BEGINS = b"Traffic request rate"  # what it says when it begins to ask
LINE_BYTES = 1024 * 1024


class Disagreement(Exception):
    """One of the two could not measure. Its text says which."""


class Compared(Struct, frozen=True):
    """One number of both."""

    what: str
    ours: float
    theirs: float

    @property
    def apart(self) -> float:
        """By how much, as a part of the larger."""
        return abs(self.ours - self.theirs) / max(self.ours, self.theirs, 1e-9)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER", help="of the model")
    parser.add_argument("--python", default=sys.executable, help="one with vLLM")
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s of each")
    parser.add_argument("--requests", type=int, default=200, help="of each")
    parser.add_argument("--input", type=int, default=300, help="tokens of a prompt, without the template's")
    parser.add_argument("--output", type=int, default=40, help="tokens of an answer")
    parser.add_argument("--goodput", nargs="+", metavar="GOAL:MS", default=["ttft:2000", "tpot:100"])
    parser.add_argument("--within", type=float, default=0.05, help="part by which they may differ")
    return parser


async def compared(args: argparse.Namespace) -> list[Compared]:
    """Both at once. Raises Disagreement, and what `bench.replay` raises."""
    target = Target(url=args.url, model=args.model)
    pool = target.pool()
    try:
        words, _ = await words_for(target, pool)
    finally:
        pool.close()
    with tempfile.TemporaryDirectory(prefix="signalbox-agreement-") as folder:
        trace = Path(folder, "alike.csv")
        trace.write_text(f"input_tokens,output_tokens\n{args.input + words.overhead - 1},{args.output}\n")
        source = Source(name="alike", trace=str(trace), cv=1.0, objective=goodput.goals(args.goodput))
        plan = Plan(target=target, sources=(source,), words=words, rate=args.rate, requests=args.requests)
        begun = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                theirs = group.create_task(_theirs(args, Path(folder), begun))
                ours = group.create_task(_ours(plan, begun))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return _side_by_side(ours.result(), source, theirs.result())


async def _ours(plan: Plan, begun: asyncio.Event) -> list[Record]:
    await begun.wait()
    return (await replay(plan)).records


async def _theirs(args: argparse.Namespace, folder: Path, begun: asyncio.Event) -> dict[str, Any]:
    """Run it, and tell when it begins to ask: its imports take long."""
    process = await asyncio.create_subprocess_exec(
        args.python, "-u", "-c", THEIRS,
        "--backend", "openai-chat", "--endpoint", PATHS["chat"], "--base-url", args.url,
        "--model", args.model, "--tokenizer", args.tokenizer, "--dataset-name", "random",
        "--random-input-len", str(args.input), "--random-output-len", str(args.output), "--ignore-eos",
        "--num-prompts", str(args.requests), "--request-rate", str(args.rate), "--goodput", *args.goodput,
        "--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,90", "--disable-tqdm",
        "--save-result", "--result-dir", str(folder), "--result-filename", "theirs.json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, limit=LINE_BYTES,
    )  # fmt: skip
    assert process.stdout is not None
    said: deque[str] = deque(maxlen=40)
    try:
        async for line in process.stdout:
            said.append(line.decode(errors="replace"))
            if BEGINS in line:
                begun.set()
        code = await process.wait()
    finally:
        begun.set()
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        raise Disagreement(f"vLLM's bench ended with {code}: {''.join(said)[-2_000:]}")
    found: dict[str, Any] = json.loads(Path(folder, "theirs.json").read_text())
    return found


def _side_by_side(records: Sequence[Record], source: Source, theirs: dict[str, Any]) -> list[Compared]:
    done = [one for one in records if one.outcome is goodput.Outcome.DONE]
    if not done or not theirs["completed"]:
        raise Disagreement(f"ours completed {len(done)} requests, theirs {theirs['completed']}")
    found = []
    for name in ("ttft", "tpot"):
        times = [getattr(one, f"{name}_ms") for one in done]
        found.append(Compared(f"mean {name}, ms", statistics.fmean(times), theirs[f"mean_{name}_ms"]))
        found += [
            Compared(f"p{level} {name}, ms", quantile(times, level / 100), theirs[f"p{level}_{name}_ms"])
            for level in (50, 90)
        ]
    good = sum(one.good(source.objective) for one in done)
    their_good = theirs["request_goodput"] * theirs["duration"]
    found.append(Compared("good of all", good / len(records), their_good / (theirs["completed"] + theirs["failed"])))
    prompt = statistics.fmean(one.prompt_tokens for one in done)
    found.append(Compared("prompt tokens", prompt, theirs["total_input_tokens"] / theirs["completed"]))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = options().parse_args(argv)
    try:
        found = asyncio.run(compared(args))
    except Disagreement as error:
        print(f"agreement: {error}", file=sys.stderr)
        return 2
    print(f"{'':16}{'ours':>10}{'vLLM':>10}{'apart':>9}")
    for one in found:
        print(f"{one.what:16}{one.ours:10.4g}{one.theirs:10.4g}{one.apart:9.1%}")
    return 0 if all(one.apart <= args.within for one in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
