"""Reads the stream in which other processes' turns leave this one's outcomes.

A stream, not a list: what was read but not acted on is read again from the cursor, which the next turn acknowledges.
"""

import asyncio
from typing import Any

import redis.exceptions

from gateway import clock
from gateway.queue.channel import CONNECT_S, GONE, Channel, StoreAway, StoreUnfit, ask
from gateway.queue.keys import Keys
from gateway.queue.link import facts_of
from gateway.queue.session import Session
from gateway.queue.turns import Turns

BLOCK_MS = 5000
RETRY_S = 0.2


class Mailbox:
    """One blocked read at a time, on a connection of its own to the server in which the turns are made."""

    def __init__(self, session: Session, turns: Turns, keys: Keys) -> None:
        self._session = session
        self._turns = turns
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
                channel = await self._turns.target.open()
            except (StoreAway, StoreUnfit):  # the turns report it
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await self._check(channel)
                while True:
                    await self._read(channel)
            except TimeoutError:
                pause_s = 0.0
            except (redis.exceptions.ResponseError, *GONE):
                pause_s = RETRY_S
            finally:
                channel.close()
            await asyncio.sleep(pause_s)

    async def _check(self, channel: Channel) -> None:
        """Nothing would ever come from a primary that has been replaced. Raises StoreAway."""
        async with asyncio.timeout(CONNECT_S):
            run_id = facts_of(await ask(channel, "INFO", "server"))["run_id"]
        if run_id != self._session.run_id:
            raise StoreAway("the mailbox is in another server")

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
