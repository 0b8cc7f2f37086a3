"""Backends whose verbs a test replaces: what no well-behaved engine does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from gateway.pool import Member


class Twisted:
    """The real backend, but for the verbs given."""

    def __init__(self, real: Any, verbs: dict[str, Any]) -> None:
        self.real = real
        self.__dict__.update(verbs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@asynccontextmanager
async def twisted(*members: Member, **verbs: Callable[..., Awaitable[Any]]) -> AsyncIterator[None]:
    """Within it these members' backends have other verbs."""
    for member in members:
        assert member.backend is not None
        member.backend = Twisted(member.backend, verbs)
    try:
        yield
    finally:
        for member in members:
            if isinstance(member.backend, Twisted):
                member.backend = member.backend.real


async def never(*_: Any) -> Any:
    """A verb that does not come back."""
    await asyncio.get_running_loop().create_future()


def raising(error: Exception) -> Callable[..., Awaitable[Any]]:
    """A verb that fails."""

    async def verb(*_: Any) -> Any:
        raise error

    return verb
