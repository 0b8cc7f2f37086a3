"""Puts `lua/*.lua` together, as a Function library or as a plain script, after checking its headers against `wire`."""

import functools
import importlib.resources
import re

from gateway.queue import keys, wire

FILES = (
    "state",
    "ledger",
    "fairness",
    "tenant",
    "order",
    "recall",
    "shed",
    "placement",
    "arrival",
    "dispatch",
    "events",
    "reap",
    "turn",
)
"""In this order: each may use what those before it define."""

LIBRARY = f"signalbox_{keys.SCHEMA}"
FUNCTION = f"{LIBRARY}_turn"

_CHECKS = {
    "int": "is_int",
    "price": "is_price",
    "str": "is_str",
    "text": "is_text",
    "names": "is_names",
    "shares": "is_shares",
}
_FILE = re.compile(r"-- (\w+) v\d+: \S")
_EVENT = re.compile(r"^-- event (\w+) = (\d+): ?(.*)$", re.MULTILINE)
_SHARE = re.compile(r"^-- share: (.*)$", re.MULTILINE)
_ARGV = re.compile(r"^-- ARGV (.*)$", re.MULTILINE)
_CONSTANTS = re.compile(r"^local ([A-Z][A-Z0-9_, ]*) = ([-0-9.e, ]+?) *(?:--.*)?$", re.MULTILINE)
_WORD = re.compile(r"\b[A-Z][A-Z0-9_]*\b")
_SCHEMA = re.compile(r"^local SCHEMA = (\d+)", re.MULTILINE)


class HeaderMismatch(Exception):
    """A Lua file and `gateway.queue.wire` disagree about what travels: a fault of this build, not of its user."""


def _read(name: str) -> str:
    text = importlib.resources.files("gateway.queue").joinpath("lua", f"{name}.lua").read_text()
    header = _FILE.match(text)
    if header is None or header[1] != name:
        raise HeaderMismatch(f"{name}.lua does not begin with `-- {name} v<number>: <what it is>`")
    return text


def _same(what: str, lua: object, python: object) -> None:
    if lua != python:
        raise HeaderMismatch(f"{what}: lua says {lua!r}, python says {python!r}")


def inline_constants(text: str) -> str:
    """Numbers in place of the names of constants: a Lua chunk has at most 200 locals, and a number costs no look-up.

    Constants are locals of capital letters with numbers for values. Raises HeaderMismatch for one declared
    twice.
    """
    values: dict[str, str] = {}
    for names, numbers in _CONSTANTS.findall(text):
        for name, number in zip(names.split(", "), numbers.split(", "), strict=True):
            if name in values:
                raise HeaderMismatch(f"the constant {name} is declared twice")
            values[name] = f"({number})" if number.startswith("-") else number
    return _WORD.sub(lambda word: values.get(word[0], word[0]), _CONSTANTS.sub("", text))


def _checks(fields: str) -> str:
    return "{" + ", ".join(_CHECKS[field.partition(":")[2]] for field in fields.split()) + "}"


def check_headers(sources: dict[str, str]) -> None:
    """Raises HeaderMismatch where the typed headers differ from `wire` and `keys`."""
    events = {name: (int(code), fields) for name, code, fields in _EVENT.findall(sources["events"])}
    _same("events.lua, events", events, wire.EVENTS)
    _same("events.lua, share", _SHARE.findall(sources["events"]), [wire.SHARE])
    _same("turn.lua, ARGV", _ARGV.findall(sources["turn"]), [wire.TURN])
    _same("state.lua, SCHEMA", _SCHEMA.findall(sources["state"]), [str(keys.SCHEMA)])


@functools.cache
def body() -> str:
    """The library without its entry: local functions, the last of them `turn(KEYS, ARGV)`."""
    sources = {name: _read(name) for name in FILES}
    check_headers(sources)
    shapes = ", ".join(_checks(fields) for _, fields in sorted(wire.EVENTS.values()))
    sources["events"] = (
        sources["events"]
        .replace("local SHARE --@share", f"local SHARE = {_checks(wire.SHARE)}", 1)
        .replace("local SHAPES --@shapes", f"local SHAPES = {{{shapes}}} --", 1)
    )
    return inline_constants("\n".join(sources.values()))


@functools.cache
def library() -> str:
    """For FUNCTION LOAD. `allow-oom`: at the memory limit leases must still end; the queue is bounded by count."""
    return (
        f"#!lua name={LIBRARY}\n{body()}\n"
        f"redis.register_function{{function_name='{FUNCTION}', callback=turn, flags={{'allow-oom'}}}}\n"
    )


@functools.cache
def script() -> str:
    """The same for SCRIPT LOAD, where a managed store has no functions."""
    return f"#!lua flags=allow-oom\n{body()}\nreturn turn(KEYS, ARGV)\n"


@functools.cache
def look() -> str:
    """For EVAL: reads what waits and what is taken, by the same constants as the library."""
    constants = "\n".join(found[0] for name in FILES for found in _CONSTANTS.finditer(_read(name)))
    return "#!lua flags=no-writes\n" + inline_constants(f"{constants}\n{_read('look')}")
