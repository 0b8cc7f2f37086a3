"""Strategies in front of simulated engines, in virtual time: thousands of times faster than life, and repeatable.

    python -m bench.virtual --load 1 2 3 --strategy all --seeds 3 --requests 3000
    python -m bench.virtual --scenario fairness --seeds 1 --json fairness.json

`pass` sends everything to the engine; `cap` (tuned) and `gate` queue in front of it, first come first served, until the
deadline; `gate+edf` by deadline. `tokens` are the admission policies without the shared queue, `signalbox` is the real
queue (scripts, book and session on a private store) with tickets from the real policies.

Load 1 is what `pass` carries at 95 % attainment. Engines are like an 8B model on an A100. A simulated request costs
about 0.2 ms, with `signalbox` 0.6 ms. The JSON holds results only, so that the same command gives the same bytes.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from bench import sim_metrics
from bench.sim_defences import wrong
from bench.sim_lab import STRATEGIES, SWEEPS, Lab
from bench.sim_returns import returns
from bench.sim_store import Store
from bench.sim_studies import STUDIES, Study

ALL_STUDIES: dict[str, Study] = STUDIES | {"wrong": wrong, "returns": returns}
SCENARIOS = (*SWEEPS, *ALL_STUDIES)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=(*SCENARIOS, "all"), default="overload")
    parser.add_argument("--load", type=float, nargs="+", default=[1.0, 2.0, 3.0], help="multiples of capacity")
    parser.add_argument("--strategy", choices=(*STRATEGIES, "all"), nargs="+", default=["all"])
    parser.add_argument("--seeds", type=int, default=3, help="1 to this number")
    parser.add_argument("--requests", type=int, default=3000, help="per run")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, help="gateway processes")
    parser.add_argument(
        "--capacity", type=float, default=0.0, help="requests/s at load 1 of `overload`; searched if not given"
    )
    parser.add_argument("--json", type=pathlib.Path, help="where to write the results")
    parser.add_argument("--quiet", action="store_true", help="no word on progress")
    return parser


def run(lab: Lab, chosen: argparse.Namespace) -> dict[str, Any]:
    """The results by scenario."""
    if chosen.capacity > 0:
        lab.rates["overload"] = chosen.capacity
    names = SCENARIOS if chosen.scenario == "all" else (chosen.scenario,)
    strategies = list(STRATEGIES) if "all" in chosen.strategy else chosen.strategy
    found: dict[str, Any] = {}
    for name in names:
        if name in SWEEPS:
            found[name] = lab.sweep(SWEEPS[name](chosen.engines, chosen.processes), chosen.load, strategies)
        else:
            found[name] = ALL_STUDIES[name](lab)
    found["capacity_rps"] = {name: sim_metrics.rounded(rate) for name, rate in lab.rates.items()}
    return found


def show(found: Mapping[str, Any]) -> None:
    """Tables of what has the usual numbers; the rest name by name."""
    for scenario, results in found.items():
        print(f"\n{scenario}")
        usual = {label: numbers for label, numbers in results.items() if isinstance(numbers, Mapping)}
        tables = [(label, numbers["all"]) for label, numbers in usual.items() if "all" in numbers]
        if tables:
            print(sim_metrics.table(tables))
            print()
        for label, numbers in results.items():
            if label not in usual:
                print(f"  {label}: {numbers}")
            elif "all" not in numbers:
                print(f"  {label}: " + ", ".join(f"{name} {value}" for name, value in numbers.items()))
            else:
                print(f"  {label}: " + _parts(numbers))


def _parts(numbers: Mapping[str, Any]) -> str:
    """Attainment by tenant and prompt quartile, and what only this study has."""
    words = []
    for group in ("tenants", "quartiles"):
        parts = numbers.get(group, {})
        words.append(" ".join(f"{name} {part['attained']:.3f}" for name, part in parts.items()))
        words.extend(f"{name} of alone {part['of_alone']}" for name, part in parts.items() if "of_alone" in part)
    extra = {name: numbers["all"][name] for name in ("regained", "steps_after_leaving") if numbers["all"]["left"]}
    words.extend(f"{name} {value}" for name, value in extra.items())
    return "; ".join(words)


def main(arguments: list[str] | None = None) -> int:
    chosen = options().parse_args(arguments)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    with Store() as store:
        lab = Lab(store, chosen.requests, chosen.seeds)
        if not chosen.quiet:
            lab.log = lambda line: print(f"{time.perf_counter() - began_s:7.1f} s  {line}", file=sys.stderr, flush=True)
        found = run(lab, chosen)
        turns = store.turns
    show(found)
    spent = f"{time.perf_counter() - began_s:.1f} s, {time.process_time() - cpu_s:.1f} s of CPU, {turns} turns"
    print(f"\n{spent}", file=sys.stderr)
    if chosen.json is not None:
        head = {name: str(value) for name, value in sorted(vars(chosen).items()) if name not in ("json", "quiet")}
        text = json.dumps({"options": head, **found}, indent=1, sort_keys=True)
        chosen.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
