"""Every edge of the life cycle is taken over the real server, and after each of them nothing is held."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import pytest

import gateway.exchange
from backends.protocol import BackendError, Refused
from policies.lifecycle import NEXT, Event, State, step
from tests.support.quiet import zero
from tests.support.site import Site, running
from tests.support.twist import never, raising, twisted
from tests.support.wire import Wire, chat_body, events, request, wire

Edge = tuple[State, Event]
SCENES: dict[Edge, Callable[[Site], Awaitable[None]]] = {}

PAIR = "\n".join(
    ["[[pool]]", 'model = "demo"']
    + [
        f'[[pool.backend]]\nkind = "simulated"\nname = "{name}"\na0_ms = 4.0\nlimits = {{ max_running = 1 }}'
        for name in ("one", "two")
    ]
)
"""Two places for two requests, so that a retry has somewhere to go."""

ENDLESS = {"max_tokens": 8_000, "min_tokens": 8_000}


def takes(state: State, *edge: Event) -> Callable[[Any], Any]:
    def register(scene: Any) -> Any:
        for event in edge:
            assert (state, event) not in SCENES
            SCENES[state, event] = scene
        return scene

    return register


@asynccontextmanager
async def asking(site: Site, state: State, *lines: str, **fields: Any) -> AsyncIterator[Wire]:
    """A streamed request that has come as far as `state`, on a connection of its own."""
    before = len(site.live())
    async with wire(site) as line:
        await line.send(request(chat_body(stream=True, **fields), *lines))
        await site.until(lambda: [one.state for one in site.live()[before:]] == [state])
        yield line


@asynccontextmanager
async def full(site: Site) -> AsyncIterator[None]:
    """Both places are taken."""
    async with asking(site, State.STREAMING, **ENDLESS), asking(site, State.STREAMING, **ENDLESS):
        yield


def deaf(site: Site) -> AbstractAsyncContextManager[None]:
    """Engines that never answer."""
    return twisted(*site.trunk.members(), open=never)


async def told(line: Wire) -> tuple[int, str]:
    answer = await line.answer()
    return answer.status, answer.code


async def last(line: Wire) -> Any:
    return events((await line.answer()).body)[-1]


async def leave(site: Site, line: Wire, live: int = 0) -> None:
    line.leave()
    await site.until(lambda: len(site.live()) == live)


@takes(State.RECEIVED, Event.SUBMIT)
@takes(State.QUEUED, Event.GRANT)
@takes(State.GRANTED, Event.CHUNK)
@takes(State.STREAMING, Event.FINISH)
async def an_answer(site: Site) -> None:
    async with site.chat(max_tokens=2) as answer:
        assert answer.status == 200


@takes(State.RECEIVED, Event.REFUSE)
async def a_model_that_is_not_there(site: Site) -> None:
    async with site.chat(model="nothing") as answer:
        assert answer.status == 404


@takes(State.RECEIVED, Event.EXPIRE)
async def a_deadline_during_planning(site: Site) -> None:
    async with (
        twisted(*site.trunk.members(), plan=never),
        asking(site, State.RECEIVED, "x-deadline-ms: 80") as line,
    ):
        assert await told(line) == (504, "expired")


@takes(State.RECEIVED, Event.LEAVE)
async def a_client_that_leaves_while_it_sends(site: Site) -> None:
    async with wire(site) as line:
        await line.send(request(chat_body())[:-10])
        await site.until(lambda: len(site.live()) == 1)
        await leave(site, line)


@takes(State.RECEIVED, Event.FAIL)
async def a_bug_in_planning(site: Site) -> None:
    async with twisted(*site.trunk.members(), plan=raising(ZeroDivisionError())), site.chat() as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (500, "internal")


@takes(State.QUEUED, Event.REFUSE)
async def a_pool_that_closes_while_one_waits(site: Site) -> None:
    async with full(site), asking(site, State.QUEUED) as line:
        share = site.trunk.pools["demo"].share()
        closed = tuple(msgspec.structs.replace(one, open=False) for one in share.backends)
        site.trunk.queue.declare(msgspec.structs.replace(share, backends=closed))
        assert await told(line) == (503, "no_backend")


@takes(State.QUEUED, Event.EXPIRE)
async def a_first_token_deadline(site: Site) -> None:
    async with full(site), asking(site, State.QUEUED, "x-slo-ttft-ms: 150") as line:
        assert await told(line) == (504, "expired")


@takes(State.QUEUED, Event.LEAVE)
async def a_client_that_leaves_the_queue(site: Site) -> None:
    async with full(site), asking(site, State.QUEUED) as line:
        await leave(site, line, live=2)


@takes(State.QUEUED, Event.FAIL)
async def a_bug_in_submitting(site: Site) -> None:
    queue: Any = site.trunk.queue
    submit, queue.submit = queue.submit, lambda ticket: 1 / 0
    async with site.chat() as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (500, "internal")
    queue.submit = submit


@takes(State.GRANTED, Event.RETRY)
async def a_failure_of_one_backend(site: Site) -> None:
    first, second = site.trunk.members()
    for failing, other in ((first, "two"), (second, "one")):
        async with twisted(failing, open=raising(BackendError("broken"))):
            for _ in range(2):
                async with site.chat(max_tokens=1) as answer:
                    assert answer.status == 200
                    assert (await answer.json())["system_fingerprint"] == f"simulated-{other}"


@takes(State.GRANTED, Event.REFUSE)
async def a_request_that_the_engine_refuses(site: Site) -> None:
    no = Refused(400, "invalid_request", "not this one", "temperature")
    async with twisted(*site.trunk.members(), open=raising(no)), site.chat() as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "temperature")


@takes(State.GRANTED, Event.EXPIRE)
async def a_deadline_before_the_first_token(site: Site) -> None:
    async with deaf(site), asking(site, State.GRANTED, "x-deadline-ms: 150") as line:
        assert await told(line) == (504, "expired")


@takes(State.GRANTED, Event.LEAVE)
async def a_client_that_leaves_before_the_first_token(site: Site) -> None:
    async with deaf(site), asking(site, State.GRANTED) as line:
        await leave(site, line)


@takes(State.GRANTED, Event.FAIL)
async def a_failure_of_all_backends(site: Site) -> None:
    async with twisted(*site.trunk.members(), open=raising(BackendError("broken"))), site.chat() as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (502, "engine_error")


@takes(State.STREAMING, Event.EXPIRE)
async def a_total_deadline(site: Site) -> None:
    async with asking(site, State.STREAMING, "x-deadline-ms: 200", **ENDLESS) as line:
        assert (await last(line))["error"]["code"] == "expired"


@takes(State.STREAMING, Event.LEAVE)
async def a_client_that_leaves_its_stream(site: Site) -> None:
    async with asking(site, State.STREAMING, **ENDLESS) as line:
        await leave(site, line)


@takes(State.STREAMING, Event.FAIL)
async def an_engine_that_dies(site: Site) -> None:
    async with asking(site, State.STREAMING, **ENDLESS) as line:
        for member in site.trunk.members():
            assert member.backend is not None
            member.backend.crash()  # type: ignore[attr-defined]
        assert (await last(line))["error"]["code"] == "engine_lost"


async def test_a_client_may_leave_while_it_waits_for_its_second_try() -> None:
    async with running(PAIR) as site:
        first, second = site.trunk.members()
        failing = raising(BackendError("broken"))
        async with asking(site, State.STREAMING, **ENDLESS):
            busy = site.live()[0].member
            other = second if busy is first else first
            async with twisted(other, open=failing), asking(site, State.QUEUED) as line:
                await site.until(lambda: site.live()[1].tried)
                await leave(site, line, live=1)
        await zero(site)


def edges() -> set[Edge]:
    return {(state, event) for state, after in NEXT.items() for event in after}


def test_there_is_a_scene_for_every_edge() -> None:
    assert SCENES.keys() == edges()


@pytest.mark.parametrize("scene", dict.fromkeys(SCENES.values()))
async def test_edges_are_taken_and_leave_nothing(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[Edge] = set()

    def watched(state: State, event: Event) -> State:
        taken.add((state, event))
        return step(state, event)

    monkeypatch.setattr(gateway.exchange, "step", watched)
    async with running(PAIR) as site:
        async with asyncio.timeout(15):
            await scene(site)
        await zero(site)
    assert {edge for edge, its in SCENES.items() if its is scene} <= taken <= edges()
