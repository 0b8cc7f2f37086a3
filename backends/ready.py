"""The stream of an answer that took no engine."""

from backends.protocol import Chunk, Usage


class Ready:
    """One chunk, with all of it."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def next(self) -> Chunk | None:
        """See `backends.protocol.Stream`."""
        body, self._body = self._body, None
        return None if body is None else Chunk(body, 0, Usage(), last=True)

    async def aclose(self) -> None:
        """See `backends.protocol.Stream`."""
        self._body = None
