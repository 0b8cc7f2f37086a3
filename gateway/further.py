"""Commands that other packages add to `signalbox`, as entry points of the group `signalbox.commands`.

An entry point names a function that is given the command's own argument parser; the first line of its docstring is the
help. It sets `command` to what is called with the parsed arguments and returns the exit code.
"""

import argparse
import inspect
from importlib.metadata import entry_points

GROUP = "signalbox.commands"


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", wanted: str) -> None:
    """Add the command that is `wanted`; all of them where there is none of that name, so that help can list them."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    for name in [wanted] if wanted in found else sorted(found):
        add = found[name].load()
        line = (inspect.getdoc(add) or "").partition("\n")[0]
        add(commands.add_parser(name, help=line.rstrip("."), description=line))
