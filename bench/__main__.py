"""`python -m bench COMMAND` is `signalbox COMMAND` for the commands of this package, without an installation."""

import argparse
import sys
from collections.abc import Sequence

from bench import goodput_command


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    goodput_command.add(commands.add_parser("bench", help="goodput of any OpenAI-compatible server under a trace"))
    args = parser.parse_args(argv)
    code: int = args.command(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
