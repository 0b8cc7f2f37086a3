"""What travels in a turn: event codes and their fields, outcomes, statuses. `lua/events.lua` has the other half."""

import enum
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

SUBMIT, FIRST, PROGRESS, FINISH, HELD, POOL, HELLO, BYE, BEAT, TENANT = range(1, 11)
GRANT, REFUSE, ERROR, NEARER = 1, 2, 3, 4
NOT_RUN, RAN, ANSWERED = 0, 1, 2
"""What a finish says of the engine: it never began, it computed the prompt, it gave all of the answer."""

NEW, RETRY, AGAIN = 0, 1, 2
"""A submit's standing: new; held a lease before and goes ahead of its tenant's line; declared again after a loss."""

MAX_EVENTS = 32
"""Events in a turn: more would hold the store for too long at once."""

EVENTS: dict[str, tuple[int, str]] = {
    "submit": (
        SUBMIT,
        "number:int tenant:str rank:int pool:str prompt:int output:int waits_ms:int total_ms:int tpot_ms:int"
        " backends:names standing:int age_ms:int uncached:int variance:int high:int place:int prefill_price:price"
        " output_price:price billed:int identity:text target:int",
    ),
    "first": (FIRST, "number:int"),
    "progress": (PROGRESS, "number:int kv:int spread:int"),
    "finish": (FINISH, "number:int output:int ran:int"),
    "held": (
        HELD,
        "number:int tenant:str rank:int pool:str prompt:int output:int tpot_ms:int backend:str prefill:int kv:int"
        " uncached:int spread:int prefill_price:price output_price:price",
    ),
    "pool": (POOL, "pool:str max_queued:int backends:shares"),
    "hello": (HELLO, "former:text"),
    "bye": (BYE, ""),
    "beat": (BEAT, ""),
    "tenant": (TENANT, "tenant:str requests_per_min:int tokens_per_min:int tokens_in_flight:int max_queued:int"),
}
"""Code and fields of each event; the loader compares them with the header of `lua/events.lua`."""

SHARE = (
    "name:str max_running:int prefill_tokens_per_s:int kv_tokens:int chunk_tokens:int open:int"
    " step_us:int prefill_ns:int running_us:int kv_ns:int safety_milli:int kv_deviations_milli:int"
)
TURN = "process:str number:int cursor:str batch:msgpack wall_ms:int"


class Status(enum.StrEnum):
    OK = "ok"
    UNKNOWN = "unknown"  # the process was reaped, or the store has lost it
    GAP = "gap"  # the store has lost turns
    STALE = "stale"  # a late duplicate
    VERSION_MISMATCH = "version_mismatch"  # the namespace is kept by another schema


class Outcome(NamedTuple):
    """What became of a ticket: GRANT, REFUSE or ERROR; a word (backend, reason or message); ms until the first token
    should be there, or until a retry makes sense. NEARER: its deadlines are `ms` nearer than it said, since it had come
    before; another outcome follows.

    `left` is what its tenant has left, if it has limits: requests, tokens, and ms until all of each are back.
    """

    number: int
    code: int
    word: str
    ms: int
    left: tuple[int, int, int, int] | None = None


class Reply(Struct, array_like=True, frozen=True):
    """The answer to a turn. `due_ms` is when another turn is worth it without an event, 0 for never. `live` is
    the number of this process's tickets in the store if the turn beat, else -1; `waiting` that of the pools it touched,
    else -1. `depths`, if the turn beat, is how many wait in each pool and the thousandths of its arrivals that may not
    wait, by rank.
    """

    status: Status
    now_ms: int
    outcomes: list[Outcome] = []
    due_ms: int = 0
    live: int = -1
    waiting: int = -1
    depths: list[tuple[str, list[int], list[int]]] = []


Event = list[Any]
encode_batch = msgspec.msgpack.Encoder().encode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_mail = msgspec.msgpack.Decoder(list[Outcome]).decode


def command(*parts: bytes) -> bytes:
    """A command in the server's protocol."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
