"""The engines of a plan: from a configuration, from the command line, or from a running gateway."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from backends.protocol import Limits
from backends.simulated import Simulated
from bench.costs import Engine
from bench.live import Live
from gateway.config import Config, ConfigError, load
from policies.steptime import Coefficients

DEFAULT_FILE = Path("config.toml")
EXAMPLE_TIMES = "15,81,95,0.11"
TIMES = (
    "ms a step, µs a prompt token, µs a decoding request, µs a token of context, µs a token computed before; simulated "
    "engines and running gateways say theirs"
)
CHUNK_TOKENS, MAX_RUNNING, KV_PER_REQUEST = 2_048, 64, 2_048
"""What the queue takes for an engine that says nothing (`docs/scheduling.md`)."""


class EngineError(Exception):
    """There is no engine to plan with. Its text is one line for the operator."""


def add_arguments(group: "argparse._ArgumentGroup") -> None:
    """Where the engines are described."""
    add = group.add_argument
    add("--config", metavar="FILE", type=Path, help="take the engines of this configuration; else of config.toml here")
    add("--model", default="", help="which of its pools; not needed with one")
    add(
        "--step-times", metavar="A0,A1,A2,A3[,A4]", type=times, help=f"{TIMES}. An 8B model on an A100: {EXAMPLE_TIMES}"
    )
    for name in ("chunk-tokens", "max-running", "kv-tokens"):
        add(f"--{name}", type=int, metavar="N", default=0, help="in place of what the engine says")


def times(text: str) -> Coefficients:
    """Step times as they are written on a command line. Raises ArgumentTypeError."""
    try:
        found = [float(part) for part in text.split(",")]
        a0, a1, a2, a3, a4 = found if len(found) == 5 else (*found, 0.0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"four or five numbers, such as {EXAMPLE_TIMES}, not {text!r}") from None
    if not all(0 <= value < math.inf for value in (a0, a1, a2, a3, a4)) or a0 + a1 <= 0:
        raise argparse.ArgumentTypeError(f"times must not be negative, and the first two not both 0: {text!r}")
    return Coefficients(a0_s=a0 / 1e3, a1_s=a1 / 1e6, a2_s=a2 / 1e6, a3_s=a3 / 1e6, a4_s=a4 / 1e6)


def engines(args: argparse.Namespace, live: Live | None) -> list[Engine]:
    """The engines of one pool. Raises EngineError, ConfigError."""
    if live is not None:
        return [changed(engine, args) for engine in live.engines]
    if args.config is None and not DEFAULT_FILE.exists():
        if args.step_times is None:
            raise EngineError("there is no config.toml here: give --config, --step-times, or --gateway")
        return [changed(Engine(name="engine", times=args.step_times, **_limits(Limits())), args)]
    return [changed(engine, args) for engine in _configured(load(args.config or DEFAULT_FILE), args)]


def _configured(config: Config, args: argparse.Namespace) -> Sequence[Engine]:
    pools = [pool for pool in config.pools if not args.model or args.model in (pool.model, *pool.aliases)]
    if len(pools) != 1:
        names = ", ".join(pool.model for pool in config.pools)
        raise EngineError(f"--model: {args.model or 'it'} must name one of the configured pools: {names}")
    found = []
    for backend in pools[0].backends:
        if isinstance(backend, Simulated):
            shape = {name: getattr(backend, name) for name in ("chunk_tokens", "max_running", "kv_tokens")}
            found.append(Engine(name=backend.name, times=_simulated(backend), **shape))
        elif args.step_times is None:
            raise EngineError(
                f"the step times of {backend.name!r} are not in its configuration: give --step-times, or --gateway for "
                "what a running gateway has learned"
            )
        else:
            found.append(Engine(name=backend.name, times=args.step_times, **_limits(backend.limits)))
    return found


def _simulated(engine: Simulated) -> Coefficients:
    return Coefficients(
        a0_s=engine.a0_ms * 1e-3 / engine.speed,
        a1_s=engine.a1_us_per_prefill_token * 1e-6 / engine.speed,
        a2_s=engine.a2_us_per_running * 1e-6 / engine.speed,
        a3_s=engine.a3_us_per_kv_token * 1e-6 / engine.speed,
        a4_s=engine.a4_us_per_context_token * 1e-6 / engine.speed,
    )


def _limits(limits: Limits) -> dict[str, int]:
    running = limits.max_running or MAX_RUNNING
    return {
        "chunk_tokens": limits.chunk_tokens or CHUNK_TOKENS,
        "max_running": running,
        "kv_tokens": limits.kv_tokens or running * KV_PER_REQUEST,
    }


def changed(engine: Engine, args: argparse.Namespace) -> Engine:
    """With what the command line says instead. Raises EngineError for what can't be."""
    for name in ("chunk_tokens", "max_running", "kv_tokens"):
        if getattr(args, name) < 0:
            raise EngineError(f"--{name.replace('_', '-')} must be above 0")
    return Engine(
        name=engine.name,
        times=args.step_times or engine.times,
        chunk_tokens=args.chunk_tokens or engine.chunk_tokens,
        max_running=args.max_running or engine.max_running,
        kv_tokens=args.kv_tokens or engine.kv_tokens,
    )


__all__ = ["ConfigError", "EngineError", "add_arguments", "changed", "engines", "times"]
