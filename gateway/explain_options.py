"""The options of `signalbox explain`: a request, a load, what waits."""

import argparse
import math
from pathlib import Path

from policies.steptime import Coefficients

EXAMPLE_TIMES = "15,81,95,0.11"

REQUEST = {
    "max-tokens": "most output tokens; without, what the file says, or none",
    "cached-tokens": "of the prompt, in the engine's prefix cache",
    "expected-tokens": "expected output; without, what is taken without history",
    "longest-tokens": "output that nine in ten answers stay within; without, the expected",
    "ttft-ms": "to the first token, in place of the class's",
    "tpot-ms": "per token after it, in place of the class's",
    "deadline-ms": "to the last token, in place of the class's",
}
LOAD = {
    "running": "requests that decode",
    "running-prompt-tokens": "prompt of each of them; without, the request's",
    "running-output-tokens": "expected output of each of them; without, the request's",
    "outstanding": "prompt tokens that were dispatched and have no first token yet",
    "tightest-tpot-ms": "tightest pace objective of what runs",
}
QUEUE = {
    "waiting-ahead": "requests that go first, of all tenants and classes",
    "ahead-tokens": "their prompt tokens to be computed; without, each is like this one",
    "queued": "all that wait in the pool; without, those ahead",
    "tenant-queued": "of these, the tenant's",
    "tenant-in-flight": "tokens that engines have of the tenant",
    "shed-percent": "part of its class's arrivals that may not wait",
    "used-requests": "by the tenant in this minute",
    "used-tokens": "by the tenant in this minute",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All but where the configuration is."""
    asked = parser.add_argument_group("the request")
    asked.add_argument("--model", help="which pool; not needed with a file that names it, or with one pool")
    size = asked.add_mutually_exclusive_group(required=True)
    size.add_argument("--prompt-tokens", type=_positive, metavar="N")
    size.add_argument("--file", type=Path, metavar="BODY", help="a request body; its tokens are guessed from its bytes")
    asked.add_argument("--tenant", help="one of the configuration; without, one of weight 1 and no limits")
    asked.add_argument("--class", dest="service", metavar="CLASS", help="without, the file's or the default")
    _add_numbers(asked, REQUEST)
    load = parser.add_argument_group("the load, on each backend")
    _add_numbers(load, LOAD)
    load.add_argument(
        "--step-times",
        type=_times,
        metavar="A0,A1,A2,A3",
        help="as learned: ms a step, µs a prefill token, µs a decoding request, µs a token of context; without, only"
        f" the configured prefill rate is known. An 8B model on an A100: {EXAMPLE_TIMES}",
    )
    _add_numbers(parser.add_argument_group("the queue and the tenant"), QUEUE)
    parser.add_argument("--json", action="store_true", help="all numbers, for programs")


def _add_numbers(group: "argparse._ArgumentGroup", options: dict[str, str]) -> None:
    for name, says in options.items():
        group.add_argument(f"--{name}", type=_whole, metavar="N", default=0, help=says)


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"a whole number from 0 to 999999999 is needed, not {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if (value := _whole(text)) == 0:
        raise argparse.ArgumentTypeError("a prompt has at least 1 token")
    return value


def _times(text: str) -> Coefficients:
    try:
        a0, a1, a2, a3 = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"four numbers are needed, such as {EXAMPLE_TIMES}, not {text!r}") from None
    if not (min(a0, a1, a2, a3) >= 0 and max(a0, a1, a2, a3) < math.inf and a0 + a1 > 0):
        raise argparse.ArgumentTypeError(f"times must not be negative, and the first two not both 0: {text!r}")
    return Coefficients(a0_s=a0 / 1e3, a1_s=a1 / 1e6, a2_s=a2 / 1e6, a3_s=a3 / 1e6, a4_s=0.0)
