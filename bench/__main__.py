"""`python -m bench COMMAND` is `signalbox COMMAND` for the commands of this package, without an installation."""

import argparse
import sys
from collections.abc import Sequence

from bench import goodput_command, plan_command, simulate_command


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    goodput_command.add(commands.add_parser("bench", help="goodput of any OpenAI-compatible server under a trace"))
    plan_command.add_profile(commands.add_parser("profile", help="the shape of a workload"))
    plan_command.add_plan(commands.add_parser("plan", help="what engines carry of it"))
    simulate_command.add(commands.add_parser("simulate", help="policies in front of simulated engines"))
    args = parser.parse_args(argv)
    try:
        code: int = args.command(args)
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
