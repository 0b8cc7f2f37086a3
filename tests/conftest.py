"""What every test is held to: nothing blocks the event loop, and no task outlives its test."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator

import hypothesis
import pytest
from blockbuster import BlockBuster

LINGER_S = 1.0
"""How long a task that a test started may take to end once the test and its fixtures have."""

hypothesis.settings.register_profile("house", deadline=None, print_blob=True)
hypothesis.settings.load_profile("house")


@pytest.fixture(scope="session", autouse=True)
def nothing_blocks() -> Iterator[None]:
    """A blocking call of our own code in a running event loop raises."""
    guard = BlockBuster(scanned_modules=["gateway", "backends", "policies"])
    guard.activate()
    yield
    guard.deactivate()


@pytest.fixture(autouse=True)
def no_task_left(request: pytest.FixtureRequest) -> None:
    """For coroutine tests; set up before every other fixture of theirs, hence torn down after them."""
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("every_task_ends")


@pytest.fixture
async def every_task_ends() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=LINGER_S)
    assert not left, f"the test left tasks behind: {sorted(map(repr, left))}"
