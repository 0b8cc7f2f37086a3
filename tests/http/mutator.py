"""Makes bad request bodies out of good ones. The same dice make the same bodies."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from backends.protocol import PATHS, Kind

TEXT = 'A few words, a quote " and a line\nbreak; é, 𝄞.'
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": TEXT}]}]

GOOD: list[tuple[str, dict[str, Any]]] = [
    (
        PATHS[Kind.CHAT],
        {"messages": MESSAGES, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}},
    ),
    (PATHS[Kind.CHAT], {"messages": MESSAGES, "max_completion_tokens": 3, "n": 2, "stop": ["x", "y"], "seed": 7}),
    (PATHS[Kind.CHAT], {"messages": MESSAGES, "temperature": 0.5, "top_p": 0.9, "service_tier": "flex", "user": "u"}),
    (PATHS[Kind.COMPLETION], {"prompt": TEXT, "max_tokens": 2, "stream": True, "presence_penalty": -1.5}),
    (PATHS[Kind.COMPLETION], {"prompt": TEXT, "min_tokens": 1, "logit_bias": {}, "metadata": {"a": "b"}}),
    (PATHS[Kind.EMBEDDINGS], {"input": [TEXT, "two"], "encoding_format": "base64", "dimensions": 4}),
    (PATHS[Kind.TOKENIZE], {"messages": MESSAGES, "return_token_strs": True}),
    (PATHS[Kind.RESPONSES], {"input": TEXT, "stream": True}),
    (PATHS[Kind.MESSAGES], {"messages": MESSAGES, "max_tokens": 3}),
]

ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**53,
    2**63,
    2**64,
    -(2**63) - 1,
    10**40,
    0.5,
    -0.0,
    1e308,
    float("inf"),
]
ODD += [
    float("nan"),
    "",
    "\0",
    "x" * 3_000,
    "\ud800",
    "\u202e",
    "1",
    "null",
    [],
    [[]],
    {},
    {"": {}},
    [None],
    [{}],
    {"a": [1, {"b": 2}]},
]

WEDGES = [
    b"\0",
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\\u0000",
    b"\\ud800",
    b"\\",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
]
WEDGES += [
    b",",
    b":",
    b"1e999",
    b"-",
    b"/*x*/",
    b"//",
    b"NaN",
    b"\xef\xbb\xbf",
    b"\r\n\r\n",
    b"data: [DONE]\n\n",
    b"\x1b[2J",
]


def spots(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        found += spots(inner)
    return found


def swap(dice: random.Random, body: dict[str, Any]) -> bytes:
    where, key = dice.choice(spots(body))
    where[key] = dice.choice(ODD)
    return json.dumps(body).encode()


def drop(dice: random.Random, body: dict[str, Any]) -> bytes:
    where, key = dice.choice(spots(body))
    del where[key]
    return json.dumps(body).encode()


def add(dice: random.Random, body: dict[str, Any]) -> bytes:
    names = [
        "tools",
        "tool_choice",
        "logprobs",
        "response_format",
        "best_of",
        "echo",
        "functions",
        "x",
        "",
        "model\0",
        "stream",
    ]
    body[dice.choice(names)] = dice.choice(ODD)
    return json.dumps(body, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass")


def double(dice: random.Random, body: dict[str, Any]) -> bytes:
    """A name twice, spelled the same or with escapes."""
    key = dice.choice(list(body))
    name = json.dumps(key) if dice.random() < 0.5 else '"' + "".join(f"\\u{ord(c):04x}" for c in key) + '"'
    return json.dumps(body)[:-1].encode() + f", {name}: {json.dumps(dice.choice(ODD))}}}".encode()


def truncate(dice: random.Random, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return data[: dice.randrange(len(data))]


def flip(dice: random.Random, body: dict[str, Any]) -> bytes:
    data = bytearray(json.dumps(body, ensure_ascii=False).encode())
    for _ in range(dice.randint(1, 6)):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(data)


def wedge(dice: random.Random, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.choice(WEDGES) * dice.choice((1, 1, 3, 50)) + data[at:]


def nest(dice: random.Random, body: dict[str, Any]) -> bytes:
    depth = dice.choice((10, 500, 5_000, 30_000))
    opening, closing = dice.choice(((b"[", b"]"), (b'{"a":', b"}")))
    deep = opening * depth + b"1" + closing * (depth if dice.random() < 0.8 else depth - 1)
    key = dice.choice([*body, "x"]).encode()
    body.pop(key.decode(), None)
    return json.dumps(body)[:-1].encode() + b', "' + key + b'": ' + deep + b"}"


def huge(dice: random.Random, body: dict[str, Any]) -> bytes:
    """A number of many digits where one is expected."""
    digits = "9" * dice.choice((12, 20, 400, 5_000))
    number = dice.choice((digits, "-" + digits, digits + ".5", "1e" + digits, "0." + digits, "1E-" + digits[:4]))
    key = dice.choice(["max_tokens", "n", "seed", "temperature", "x", "dimensions"])
    body.pop(key, None)
    return json.dumps(body)[:-1].encode() + f', "{key}": {number}}}'.encode()


def wrap(dice: random.Random, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return (
        dice.choice((data + data, b"[" + data + b"]", b"\xef\xbb\xbf" + data, data + b"\0", b" \n" * 500 + data, b""))
        or b""
    )


def utf16(_: random.Random, body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode("utf-16")


MUTATIONS: list[Callable[[random.Random, dict[str, Any]], bytes]] = [
    swap, swap, drop, add, double, truncate, flip, flip, wedge, nest, huge, wrap, utf16,
]  # fmt: skip


def mutated(dice: random.Random, model: str) -> tuple[str, bytes]:
    """A path and a body that may be good, bad or ugly."""
    path, good = dice.choice(GOOD)
    return path, dice.choice(MUTATIONS)(dice, copy.deepcopy({"model": model, **good}))
