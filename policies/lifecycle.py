"""The life of a request. This table is the only place where a state changes."""

import enum


class State(enum.StrEnum):
    RECEIVED = "received"
    QUEUED = "queued"
    GRANTED = "granted"
    STREAMING = "streaming"
    DONE = "done"
    REFUSED = "refused"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Event(enum.StrEnum):
    SUBMIT = "submit"  # a ticket went to the shared queue
    GRANT = "grant"  # a lease on a backend came back
    RETRY = "retry"  # the backend failed before its first chunk; the ticket goes back
    CHUNK = "chunk"  # the engine's first chunk arrived: the point of no return
    FINISH = "finish"
    REFUSE = "refuse"
    EXPIRE = "expire"
    LEAVE = "leave"  # the client went away
    FAIL = "fail"


class IllegalStep(Exception):
    """Raised by `step` for an event that cannot happen in a state; nothing has changed."""


_ENDS = {Event.EXPIRE: State.EXPIRED, Event.LEAVE: State.CANCELLED, Event.FAIL: State.FAILED}
_REFUSABLE = {**_ENDS, Event.REFUSE: State.REFUSED}

NEXT: dict[State, dict[Event, State]] = {
    State.RECEIVED: {Event.SUBMIT: State.QUEUED, **_REFUSABLE},
    State.QUEUED: {Event.GRANT: State.GRANTED, **_REFUSABLE},
    State.GRANTED: {Event.CHUNK: State.STREAMING, Event.RETRY: State.QUEUED, **_REFUSABLE},
    State.STREAMING: {Event.FINISH: State.DONE, **_ENDS},
    State.DONE: {},
    State.REFUSED: {},
    State.EXPIRED: {},
    State.CANCELLED: {},
    State.FAILED: {},
}

TERMINAL = frozenset(state for state, edges in NEXT.items() if not edges)


def step(state: State, event: Event) -> State:
    """The state after `event`. Raises IllegalStep where the table has no such edge."""
    try:
        return NEXT[state][event]
    except KeyError:
        raise IllegalStep(f"{event.value} cannot happen in {state.value}") from None
