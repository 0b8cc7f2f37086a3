"""Tenants and keys in the store: every process holds all of them, and a change anywhere is in effect within a second.

    tenants     hash: name to record, JSON
    keys        hash: SHA-256 of the secret in hex to record, JSON; the secret itself is nowhere
    keyring     stream of one entry: version and stamp of the two

They exist once something was made, and are the operator's: no process removes them. A change is a transaction that
holds only against the version it was made for. The higher version wins: a process that finds the store behind what it
knows itself (emptied, restarted without its data, a failover that lost the last write) puts back what it has.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
import redis.exceptions

from gateway.clock import now, wall
from gateway.queue.channel import GONE, Channel, StoreAway, StoreUnfit, ask
from gateway.queue.keys import Keys
from gateway.queue.target import Target
from gateway.ring import KeyRecord, Ring, TenantRecord
from gateway.supervisor import Supervisor
from gateway.tenants import Tenants

log = logging.getLogger(__name__)

Change = Callable[[Ring], Ring]
Read = dict[str, tuple[bytes, Any]]
"""A hash as it was last read, with what its records mean: at a change only the new ones are decoded."""

BLOCK_MS = 500
"""How long a read for news may wait: then the version is looked at, whatever the stream said."""
ANSWER_S = 2.0
START_S = 5.0
RETRY_S = 0.2
LINGER_S = 0.05
"""After news: a burst of changes is read as one."""
AT_ONCE = 1_000
"""Records in one command, so that it does not hold the store for long."""
LONGEST_S = 60.0
"""Until the next look at the wall clock, which may be set."""


class Keyring:
    """This process's copy of the ring, and the way to change it. Its task belongs to the supervisor.

    `away` while the store can't be asked: the copy stays in force, and no change can be made.
    """

    def __init__(self, target: Target, tenants: Tenants) -> None:
        prefix = Keys(target.namespace).prefix
        self.ring = Ring()
        self.away = False
        self._target = target
        self._tenants = tenants
        self._news, self._of_tenants, self._of_keys = f"{prefix}keyring", f"{prefix}tenants", f"{prefix}keys"
        self._read: tuple[Read, Read] = {}, {}
        self._lock = asyncio.Lock()
        self._ending: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Keyring {self.ring!r}{', store away' if self.away else ''}>"

    async def start(self, supervisor: Supervisor) -> None:
        """Read what the store has, and from now on what changes. Raises StoreAway after START_S, or StoreUnfit."""
        limit_s = now() + START_S
        while True:
            try:
                async with self._asking() as channel:
                    await self._agree(channel)
                break
            except StoreAway:
                if now() >= limit_s:
                    raise
            await asyncio.sleep(RETRY_S)
        self._task = supervisor.start("keyring", self._follow())

    async def aclose(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def newest(self) -> Ring:
        """The ring as the store has it now; what this process knows if the store can't be asked."""
        if not self.away:
            with contextlib.suppress(StoreAway, StoreUnfit):
                async with self._lock, self._asking() as channel:
                    await self._agree(channel)
        return self.ring

    async def change(self, change: Change) -> Ring:
        """Make a change for all processes; the ring with it, already in effect here.

        `change` may be called again, with what others made meanwhile; what it raises is raised here. Raises StoreAway
        where the store can't be asked: then the change was not made, or its text says that it may have been.
        """
        async with self._lock:
            if self.away:
                raise StoreAway("the store is away: tenants and keys can't be changed now")
            wanted: list[Ring] = []
            try:
                return await self._try(change, wanted)
            except StoreAway:
                if not wanted:
                    raise
            try:  # its answer was lost: has it been made?
                return await self._try(change, wanted)
            except StoreAway as error:
                raise StoreAway(f"{error}; the change may still have been made") from None

    # -- one exchange with the store, under the lock ----------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[Channel]:
        """A channel for a few commands, all of them within ANSWER_S. Raises StoreAway."""
        channel = await self._target.open()
        try:
            async with asyncio.timeout(ANSWER_S):
                yield channel
        except (*GONE, redis.exceptions.RedisError) as error:
            raise StoreAway(str(error) or "the store does not answer") from None
        finally:
            channel.close()

    async def _try(self, change: Change, wanted: list[Ring]) -> Ring:
        """Once, on one channel. What was sent to the store is added to `wanted` before it goes."""
        async with self._asking() as channel:
            while True:
                await self._agree(channel)
                if wanted and self.ring.mark == wanted[-1].mark:
                    return self.ring
                changed = change(self.ring)
                if changed is self.ring:
                    return changed
                ring = msgspec.structs.replace(changed, version=self.ring.version + 1, stamp=secrets.token_hex(8))
                wanted.append(ring)
                if await self._put(channel, self.ring, ring):
                    self._adopt(ring)
                    return ring
                wanted.clear()

    async def _agree(self, channel: Channel) -> None:
        """Until this process and the store have the same: the higher version of the two."""
        while (mark := await self._mark(channel)) != self.ring.mark:
            if mark[0] >= self.ring.version:
                ring = await self._load(channel)
                if ring.version >= self.ring.version:
                    self._adopt(ring)
            elif await self._put(channel, None, self.ring):
                log.warning("the store had lost tenants or keys and was given back %r", self.ring)

    async def _mark(self, channel: Channel) -> tuple[int, str]:
        return _mark(await ask(channel, "XREVRANGE", self._news, "+", "-", "COUNT", "1"))

    async def _load(self, channel: Channel) -> Ring:
        await ask(channel, "MULTI")
        await ask(channel, "XREVRANGE", self._news, "+", "-", "COUNT", "1")
        await ask(channel, "HGETALL", self._of_tenants)
        await ask(channel, "HGETALL", self._of_keys)
        news, tenants, keys = await ask(channel, "EXEC")
        version, stamp = _mark(news)
        self._read = _records(tenants, TenantRecord, self._read[0]), _records(keys, KeyRecord, self._read[1])
        return Ring(
            version=version,
            stamp=stamp,
            tenants={name: record for name, (_, record) in self._read[0].items()},
            keys={digest: key for digest, (_, key) in self._read[1].items() if _is_digest(digest)},
        )

    async def _put(self, channel: Channel, before: Ring | None, after: Ring) -> bool:
        """Write what differs (without `before` all of it); False if another process wrote since the last look."""
        await ask(channel, "WATCH", self._news)
        mark = await self._mark(channel)
        if (mark != before.mark) if before is not None else (mark[0] >= after.version):
            await ask(channel, "UNWATCH")
            return False
        await ask(channel, "MULTI")
        if before is None:
            await ask(channel, "DEL", self._of_tenants, self._of_keys)
        for key, was, wanted in (
            (self._of_tenants, before.tenants if before else {}, after.tenants),
            (self._of_keys, before.keys if before else {}, after.keys),
        ):
            for command in _difference(key, was, wanted):
                await ask(channel, *command)
        news = ("version", str(after.version), "stamp", after.stamp)
        await ask(channel, "XADD", self._news, "MAXLEN", "1", "*", *news)
        answers: list[Any] | None = await ask(channel, "EXEC")
        if answers is None:
            return False
        if failed := [one for one in answers if isinstance(one, Exception)]:
            raise failed[0]
        return True

    # -- what is in effect here -------------------------------------------------------------------------------------

    def _adopt(self, ring: Ring) -> None:
        self.ring = ring
        self._take_effect()

    def _take_effect(self) -> None:
        """Now, and again when the next key ends."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        ends = self._tenants.adopt(self.ring, at := wall())
        if ends < float("inf"):
            pause_s = min(max(ends - at, 0.0), LONGEST_S)
            self._ending = asyncio.get_running_loop().call_later(pause_s, self._take_effect)

    async def _follow(self) -> None:
        """Until cancelled: wait for news, look at the version at least every BLOCK_MS, survive the store."""
        while True:
            try:
                channel = await self._target.open()
                try:
                    while True:
                        await self._hear(channel)
                finally:
                    channel.close()
            except (*GONE, StoreUnfit, redis.exceptions.RedisError) as error:
                if not self.away:
                    log.warning("tenants and keys stay as they are, the store is away: %s", error)
                self.away = True
            await asyncio.sleep(RETRY_S)

    async def _hear(self, channel: Channel) -> None:
        async with asyncio.timeout(ANSWER_S), self._lock:
            await self._agree(channel)
            newest = await ask(channel, "XREVRANGE", self._news, "+", "-", "COUNT", "1")
        if self.away:
            log.warning("the store is back: %r", self)
        self.away = False
        cursor = newest[0][0].decode() if newest else "0-0"
        async with asyncio.timeout(BLOCK_MS / 1000 + ANSWER_S):
            news = await ask(channel, "XREAD", "BLOCK", str(BLOCK_MS), "STREAMS", self._news, cursor)
        if news:
            await asyncio.sleep(LINGER_S)


def _mark(newest: list[Any]) -> tuple[int, str]:
    """Version and stamp in the stream's last entry; those of the empty ring where there is none. Raises StoreUnfit."""
    if not newest:
        return Ring().mark
    try:
        _, (_, version, _, stamp) = newest[0]
        return int(version), stamp.decode()
    except ValueError as error:
        raise StoreUnfit(f"the store's version of tenants and keys can't be read: {error}") from None


def _records(pairs: list[bytes], kind: type[Any], before: Read) -> Read:
    """The records of a hash. One that can't be read opens nothing."""
    found: Read = {}
    for field, raw in zip(pairs[::2], pairs[1::2], strict=True):
        try:
            name = field.decode()
            was = before.get(name)
            found[name] = was if was is not None and was[0] == raw else (raw, msgspec.json.decode(raw, type=kind))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.error("the store's record of %r can't be read and is left out: %s", field, error)  # noqa: TRY400
    return found


def _is_digest(text: str) -> bool:
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


def _difference(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[list[str]]:
    """The commands that make one hash into another."""
    gone = [name for name in before if name not in after]
    new = [(name, record) for name, record in after.items() if before.get(name) is not record]
    commands = [["HDEL", key, *gone[at : at + AT_ONCE]] for at in range(0, len(gone), AT_ONCE)]
    for at in range(0, len(new), AT_ONCE):
        pairs = (text for name, one in new[at : at + AT_ONCE] for text in (name, msgspec.json.encode(one).decode()))
        commands.append(["HSET", key, *pairs])
    return commands
