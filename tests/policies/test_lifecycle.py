"""The life cycle's table: what may follow what, and that nothing else can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.lifecycle import NEXT, TERMINAL, Event, IllegalStep, State, step

EARLY = (State.RECEIVED, State.QUEUED, State.GRANTED)


def test_every_state_has_a_row() -> None:
    assert NEXT.keys() == set(State)


def test_every_event_is_used() -> None:
    assert {event for edges in NEXT.values() for event in edges} == set(Event)


def test_the_straight_way_ends_done() -> None:
    state = State.RECEIVED
    for event in (Event.SUBMIT, Event.GRANT, Event.CHUNK, Event.FINISH):
        state = step(state, event)
    assert state is State.DONE


def test_a_failed_attempt_goes_back_to_the_queue() -> None:
    assert step(State.GRANTED, Event.RETRY) is State.QUEUED


def test_there_is_no_way_back_after_the_first_chunk() -> None:
    assert NEXT[State.STREAMING].keys() == {Event.FINISH, Event.EXPIRE, Event.LEAVE, Event.FAIL}


@pytest.mark.parametrize("state", EARLY)
def test_a_request_without_a_chunk_can_be_refused(state: State) -> None:
    assert step(state, Event.REFUSE) is State.REFUSED


@pytest.mark.parametrize("state", [*EARLY, State.STREAMING])
@pytest.mark.parametrize(
    ("event", "end"), [(Event.LEAVE, State.CANCELLED), (Event.EXPIRE, State.EXPIRED), (Event.FAIL, State.FAILED)]
)
def test_a_live_request_can_end_badly_anywhere(state: State, event: Event, end: State) -> None:
    assert step(state, event) is end


def test_the_ends_are_ends() -> None:
    assert {State.DONE, State.REFUSED, State.EXPIRED, State.CANCELLED, State.FAILED} == TERMINAL


@given(st.sampled_from(State), st.sampled_from(Event))
def test_a_step_is_in_the_table_or_illegal(state: State, event: Event) -> None:
    if event in NEXT[state]:
        assert step(state, event) is NEXT[state][event]
    else:
        with pytest.raises(IllegalStep, match=f"{event.value} cannot happen in {state.value}"):
            step(state, event)


def test_every_live_state_can_be_reached_and_left() -> None:
    reached, frontier = set[State](), [State.RECEIVED]
    while frontier:
        state = frontier.pop()
        if state not in reached:
            reached.add(state)
            frontier.extend(NEXT[state].values())
    assert reached == set(State)
