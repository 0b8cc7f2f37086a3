"""Reads the stream in which other processes' turns leave this one's outcomes.

A stream, not a list: what was read but not acted on is read again from the cursor, which the next turn acknowledges.
"""

import asyncio
from typing import Any

import redis.exceptions

from gateway import clock
from gateway.queue.channel import GONE, Channel, StoreAway, StoreUnfit, ask
from gateway.queue.keys import Keys
from gateway.queue.session import Session
from gateway.queue.target import Target

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
                channel = await self._target.open()
            except (StoreAway, StoreUnfit):  # the turns report it
                await asyncio.sleep(RETRY_S)
                continue
            try:
                while True:
                    await self._read(channel)
            except TimeoutError:
                pause_s = 0.0
            except (redis.exceptions.ResponseError, *GONE):
                pause_s = RETRY_S
            finally:
                await channel.close()
            await asyncio.sleep(pause_s)

    async def _read(self, channel: Channel) -> None:
        name, key = self._session.name, self._keys.mailbox(self._session.name)
        self._limit = asyncio.timeout(BLOCK_MS / 1000 + 2)
        async with self._limit:
            try:
                command = ("XREAD", "COUNT", "100", "BLOCK", str(BLOCK_MS), "STREAMS", key)
                answer: list[Any] | None = await ask(channel, *command, self._session.cursor or "0-0")
            finally:
                self._limit = None
        for entry, fields in answer[0][1] if answer else ():
            self._session.mail(name, entry.decode(), fields[1], clock.now())
