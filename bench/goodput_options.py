"""The options of `signalbox bench`, and what they ask for."""

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from bench import goodput, traces
from bench.arrivals import OWN_CLOCK, Source, own_rate, trace_of
from bench.target import PATHS, Target

URL = "http://127.0.0.1:8080"
KEY_ENV = "SIGNALBOX_API_KEY"
REQUESTS = 1_000
TRACE = "azure-chat"
IN_MIX: dict[str, Any] = {
    "trace": TRACE, "part": "all", "cv": None, "goodput": [], "classes": [], "leave": 0.0, "max_tokens": 0,
}  # fmt: skip
"""Options that a source has of its own, and what they are where nobody gave them."""


class OptionError(Exception):
    """An option is wrong. Its text names it."""


class Mix(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of several sources: `[[source]]` tables with the fields of Source."""

    sources: Annotated[tuple[Source, ...], Meta(min_length=1)] = field(name="source")


class Wish(Struct, frozen=True, kw_only=True):
    """All that is to be run: each load with each seed."""

    sources: tuple[Source, ...]
    loads: tuple[float, ...]
    seeds: tuple[int, ...]
    requests: int
    seconds: float

    def requests_at(self, load: float) -> int:
        return max(1, round(self.seconds * load)) if self.seconds else self.requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whom to ask, what, and where to write what came of it."""
    _add_target(parser.add_argument_group("the server"))
    _add_load(parser.add_argument_group("the load"))
    _add_clients(parser.add_argument_group("the clients"))
    out = parser.add_argument_group("the report")
    out.add_argument("--label", metavar="TEXT", help="its name in comparisons; without it, the URL and model")
    out.add_argument("--json", metavar="FILE", type=Path, help="the report as JSON, for `bench compare` too")
    out.add_argument("--html", metavar="FILE", type=Path, help="the report as one page that needs no network")
    out.add_argument("--records", metavar="FILE", type=Path, help="one JSON line a request; it is a trace again")
    out.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _add_target(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--url", default=URL, help=f"an OpenAI-compatible server; {URL} if not given")
    add("--model", default="", help="its model; without it, the only one it lists")
    add("--endpoint", choices=tuple(PATHS), default="chat")
    add("--key-env", metavar="NAME", default=KEY_ENV, help=f"the variable with the API key; {KEY_ENV}")
    add("--tokenizer", metavar="FOLDER", default="", help="count prompts by its tokenizer.json; else the server counts")
    add("--extra", metavar="JSON", default="{}", help="further fields of every request's body")
    add("--ca-file", metavar="FILE", default="", help="certificates to trust, for an https URL")
    add("--insecure", action="store_true", help="don't check the server's certificate")


def _add_load(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    shipped = ", ".join(traces.SHIPPED)
    add("--trace", default=TRACE, help=f"a CSV or JSON-lines file, or {shipped}; {TRACE} if not given")
    add("--mix", metavar="FILE", type=Path, help="in place of a trace: TOML with a [[source]] for each kind of request")
    add("--part", choices=("all", "fit", "report"), default="all", help="all rows, the first 60 %%, or the last 40 %%")
    add("--rate", metavar="R", type=float, nargs="+", help="requests/s; several are run one after the other")
    add("--speed", metavar="F", type=float, nargs="+", help="the same as multiples of the trace's own rate")
    add(
        "--cv", type=float, help="of Gamma gaps: 1 is Poisson; without it the trace's own clock, or 1 where it has none"
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument("--requests", metavar="N", type=int, default=REQUESTS, help=f"of each run; {REQUESTS}")
    size.add_argument("--seconds", metavar="S", type=float, default=0.0, help="of each run, in place of --requests")
    add("--seeds", metavar="N", type=int, default=1, help="runs of each load, for confidence intervals; 1")
    limit = "limit of each answer, which then ends when the model ends it; without it exactly as long as the trace's"
    add("--max-tokens", metavar="N", type=int, default=0, help=limit)
    add("--context", metavar="N", type=int, default=0, help="cut prompts to fit; without it, what the server says")
    add("--warmup", metavar="N", type=int, default=0, help="requests before, which do not count")
    add("--processes", metavar="N", type=int, default=0, help="of the load generator; without it, as the load needs")


def _add_clients(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add(
        "--goodput",
        metavar="GOAL:MS",
        nargs="+",
        default=[],
        help="when an answer is good: ttft:2000 tpot:100 e2el:60000",
    )
    add(
        "--tell",
        action="store_true",
        help="send these with each request, as x-slo-ttft-ms, x-slo-tpot-ms, x-deadline-ms",
    )
    add("--deadline-ms", metavar="MS", type=int, default=0, help="send x-deadline-ms")
    add(
        "--tenant",
        metavar="NAME=SHARE[:KEY_ENV]",
        action="append",
        default=[],
        help="part of the requests, and the key",
    )
    add("--class", metavar="NAME=SHARE", action="append", default=[], dest="classes", help="x-priority-class, by part")
    add("--leave", metavar="SHARE", type=float, default=0.0, help="of clients that go before the end, at any time")
    add(
        "--retries", metavar="N", type=int, default=0, help="refused clients come again as told (retry-after), so often"
    )
    add("--patience-s", metavar="S", type=float, default=600.0, help="until the first byte, and between two; 600")


def wish(args: argparse.Namespace) -> Wish:
    """The runs. Raises OptionError, TraceError."""
    for name, least in (
        ("requests", 1),
        ("seeds", 1),
        ("seconds", 0),
        ("max_tokens", 0),
        ("warmup", 0),
        ("retries", 0),
    ):
        if getattr(args, name) < least:
            raise OptionError(f"--{name.replace('_', '-')} must be {least} or more, not {getattr(args, name)}")
    chosen = sources(args)
    return Wish(
        sources=chosen,
        loads=loads(args, chosen),
        seeds=tuple(range(1, args.seeds + 1)),
        requests=args.requests,
        seconds=args.seconds,
    )


def sources(args: argparse.Namespace) -> tuple[Source, ...]:
    """Of the trace or the mix. Raises OptionError, TraceError."""
    found = _mixed(args) if args.mix else (_single(args),)
    for source in found:
        trace_of(source)
    return found


def _single(args: argparse.Namespace) -> Source:
    cv = args.cv
    if cv is None:
        cv = OWN_CLOCK if traces.read(args.trace).timed else 1.0
    try:
        given = {
            "name": Path(args.trace).name.split(".")[0],
            "trace": args.trace,
            "cv": cv,
            "objective": goodput.goals(args.goodput),
            "tenants": {name: share for name, share, _ in _tenants(args.tenant)},
            "classes": {name: share for name, share, _ in map(_shared("--class"), args.classes)},
            "leave": args.leave,
            "max_tokens": args.max_tokens,
            "part": args.part,
        }
        return msgspec.convert(given, Source)
    except msgspec.ValidationError as error:
        raise OptionError(_named(str(error))) from None
    except ValueError as error:
        raise OptionError(str(error)) from None


def _named(text: str) -> str:
    """msgspec's message with the option in front."""
    what, _, path = text.partition(" - at `$.")
    return f"--{path.rstrip('`').split('[')[0].replace('_', '-')}: {what}" if path else what


def _mixed(args: argparse.Namespace) -> tuple[Source, ...]:
    for name, nothing in IN_MIX.items():
        if getattr(args, name) != nothing:
            option = "class" if name == "classes" else name.replace("_", "-")
            raise OptionError(f"--{option}: with --mix it is said in the file, for each source")
    file: Path = args.mix
    try:
        return msgspec.toml.decode(file.read_bytes(), type=Mix).sources
    except OSError as error:
        raise OptionError(f"--mix: {file}: {error.strerror or error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OptionError(f"--mix: {file}: {error}") from None


def loads(args: argparse.Namespace, sources: tuple[Source, ...]) -> tuple[float, ...]:
    """Requests/s, in order. Raises OptionError."""
    if args.rate and args.speed:
        raise OptionError("--rate and --speed say the same: give one of them")
    own = own_rate(sources)
    if not args.rate and not own:
        raise OptionError("--rate is needed: the trace has no arrivals of its own")
    loads = tuple(args.rate or [own * speed for speed in args.speed or [1.0]])
    if not all(0 < load < 1e6 for load in loads):
        raise OptionError("--rate and --speed must be above 0")
    return tuple(sorted(set(loads)))


def target(args: argparse.Namespace) -> Target:
    """The server; its model as given. Raises OptionError."""
    try:
        extra = msgspec.json.decode(args.extra, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise OptionError(f"--extra must be a JSON object: {error}") from None
    keys = {"": os.environ[args.key_env].strip()} if os.environ.get(args.key_env, "").strip() else {}
    keys |= {name: _key(env) for name, _, env in _tenants(args.tenant) if env}
    found = Target(
        url=args.url,
        model=args.model,
        endpoint=args.endpoint,
        keys=keys,
        tell=args.tell,
        deadline_ms=args.deadline_ms,
        extra=extra,
        retries=args.retries,
        patience_s=args.patience_s,
        ca_file=args.ca_file,
        insecure=args.insecure,
    )
    try:
        _ = found.origin
    except ValueError as error:
        raise OptionError(f"--url: {error}") from None
    return found


def _key(env: str) -> str:
    key = os.environ.get(env, "").strip()
    if not key:
        raise OptionError(f"--tenant: the environment variable {env} is not set or empty")
    return key


def _tenants(words: Iterable[str]) -> list[tuple[str, float, str]]:
    return [_shared("--tenant")(word) for word in words]


def _shared(option: str) -> "_Shared":
    return _Shared(option)


class _Shared(Struct, frozen=True):
    """Reads NAME=SHARE[:KEY_ENV]."""

    option: str

    def __call__(self, word: str) -> tuple[str, float, str]:
        name, _, rest = word.partition("=")
        share, _, env = rest.partition(":")
        try:
            if name and float(share) > 0:
                return name, float(share), env
        except ValueError:
            pass
        raise OptionError(f"{self.option}: {word!r} is not NAME=SHARE with a share above 0")


def asked(args: argparse.Namespace, model: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """What a report says of how it was made: the options that count, and no keys."""
    names = ("url", "endpoint", "part", "max_tokens", "warmup", "tell", "deadline_ms", "leave", "retries", "goodput")
    return {"model": model, **{name: getattr(args, name) for name in names if getattr(args, name)}, **more}
