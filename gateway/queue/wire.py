"""What travels in a turn: event codes and their fields, outcomes, statuses. `lua/events.lua` has the other half."""

import enum
from typing import Any

import msgspec
from msgspec import Struct

SUBMIT, FIRST, PROGRESS, FINISH, HELD, POOL, HELLO, BYE, BEAT = range(1, 10)
GRANT, REFUSE, ERROR = 1, 2, 3
NEW, RETRY, AGAIN = 0, 1, 2
"""A submit's standing: new; held a lease before and goes ahead of its class; declared again after a loss."""

MAX_EVENTS = 32
"""Events in a turn: more would hold the store for too long at once."""

EVENTS: dict[str, tuple[int, str]] = {
    "submit": (
        SUBMIT,
        "number:int tenant:str rank:int pool:str prompt:int output:int waits_ms:int total_ms:int tpot_ms:int"
        " backends:names standing:int age_ms:int",
    ),
    "first": (FIRST, "number:int"),
    "progress": (PROGRESS, "number:int kv:int"),
    "finish": (FINISH, "number:int output:int ran:int"),
    "held": (
        HELD,
        "number:int tenant:str rank:int pool:str prompt:int output:int tpot_ms:int backend:str prefill:int kv:int",
    ),
    "pool": (POOL, "pool:str max_queued:int backends:shares"),
    "hello": (HELLO, "former:text"),
    "bye": (BYE, ""),
    "beat": (BEAT, ""),
}
"""Code and fields of each event; the loader compares them with the header of `lua/events.lua`."""

SHARE = "name:str max_running:int prefill_tokens_per_s:int kv_tokens:int chunk_tokens:int open:int"
TURN = "process:str number:int cursor:str batch:msgpack wall_ms:int"


class Status(enum.StrEnum):
    OK = "ok"
    UNKNOWN = "unknown"  # the process was reaped, or the store has lost it
    GAP = "gap"  # the store has lost turns
    STALE = "stale"  # a late duplicate
    VERSION_MISMATCH = "version_mismatch"  # the namespace is kept by another schema


Outcome = tuple[int, int, str, int]
"""Ticket number; GRANT, REFUSE or ERROR; a word (backend, reason or message); ms until a retry makes sense."""


class Reply(Struct, array_like=True, frozen=True):
    """The answer to a turn. `due_ms` is when another turn is worth it without an event, 0 for never. `live` is
    the number of this process's tickets in the store if the turn beat, else -1; `waiting` that of the pools it touched,
    else -1.
    """

    status: Status
    now_ms: int
    outcomes: list[Outcome] = []
    due_ms: int = 0
    live: int = -1
    waiting: int = -1


Event = list[Any]
encode_batch = msgspec.msgpack.Encoder().encode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_mail = msgspec.msgpack.Decoder(list[Outcome]).decode


def command(*parts: bytes) -> bytes:
    """A command in the server's protocol."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
