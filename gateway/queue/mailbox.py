"""Reads the stream in which other processes' turns leave this one's outcomes.

A stream, not a list: what was read but not acted on is read again from the cursor, which the next turn acknowledges.
"""

import asyncio
from typing import Any

import redis.exceptions
from redis.asyncio.connection import AbstractConnection

from gateway import clock
from gateway.queue.keys import Keys
from gateway.queue.link import GONE, StoreAway, StoreUnfit, Target, open_connection
from gateway.queue.session import Session

BLOCK_MS = 5000
RETRY_S = 0.2


class Mailbox:
    """One blocked read at a time, on a connection of its own."""

    def __init__(self, session: Session, target: Target, keys: Keys) -> None:
        self._session = session
        self._target = target
        self._keys = keys
        self._named = asyncio.Event()
        self._limit: asyncio.Timeout | None = None

    def renamed(self) -> None:
        """The process has another name: stop reading the old stream."""
        self._named.set()
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(clock.now())

    async def run(self) -> None:
        await self._named.wait()
        while True:
            try:
                connection = await open_connection(self._target)
            except (StoreAway, StoreUnfit):  # the turns report it
                await asyncio.sleep(RETRY_S)
                continue
            try:
                while True:
                    await self._read(connection)
            except TimeoutError:
                pause_s = 0.0
            except (redis.exceptions.ResponseError, *GONE):
                pause_s = RETRY_S
            finally:
                await connection.disconnect(nowait=True)
            await asyncio.sleep(pause_s)

    async def _read(self, connection: AbstractConnection) -> None:
        name, key = self._session.name, self._keys.mailbox(self._session.name)
        self._limit = asyncio.timeout(BLOCK_MS / 1000 + 2)
        async with self._limit:
            try:
                await connection.send_command(
                    "XREAD", "COUNT", 100, "BLOCK", BLOCK_MS, "STREAMS", key, self._session.cursor or "0-0"
                )
                answer: list[Any] | None = await connection.read_response(disable_decoding=True)
            finally:
                self._limit = None
        for entry, fields in answer[0][1] if answer else ():
            self._session.mail(name, entry.decode(), fields[1], clock.now())
