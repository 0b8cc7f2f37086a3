"""Tenants and keys in a real store: what one process changes is in effect on another, whatever becomes of the store."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway import keyring as module
from gateway.clock import wall
from gateway.config import decode
from gateway.keyring import Keyring
from gateway.queue.channel import StoreAway, StoreUnfit
from gateway.queue.target import Target
from gateway.ring import Denied, KeyRecord, Ring, TenantRecord, drop_tenant, end_key, no_tenant, put_key, put_tenant
from gateway.supervisor import Supervisor
from gateway.tenants import Tenants, hash_key
from tests.support import store as stores
from tests.support.site import POOL
from tests.support.store import StoreServer

shared_server, server, own_server = stores.shared_server, stores.server, stores.own_server

ADMIN = f'[server]\nadmin_keys = ["{hash_key("admin")}"]\n{POOL}'
NEWS, TENANTS, KEYS = "{ns}:keyring", "{ns}:tenants", "{ns}:keys"
WITHIN_S = 1.0
"""A change is in effect on every replica."""


class Replica:
    """A process's tenants and its keyring."""

    def __init__(self, store: StoreServer, toml: str = ADMIN) -> None:
        self.tenants = Tenants(decode(toml.encode()))
        self.ring = Keyring(Target(store.url, "ns"), self.tenants)

    def opens(self, key: str) -> bool:
        """Whether a request with this key would get in, as a header that may be remembered."""
        return self.tenants.of(f"Bearer {key}".encode()) is not None

    async def add(self, key: str, tenant: str = "bob", **fields: Any) -> None:
        """A key, and its tenant if there is none."""
        digest = hash_key(key).removeprefix("sha256:")
        record = KeyRecord(tenant=tenant, id=f"id-{key}", created=int(wall()), **fields)

        def change(ring: Ring) -> Ring:
            there = ring if tenant in ring.tenants else put_tenant(ring, tenant, TenantRecord())
            return put_key(there, digest, record, ())

        await self.ring.change(change)

    async def revoke(self, key: str, tenant: str = "bob") -> None:
        now = wall()
        await self.ring.change(lambda ring: end_key(ring, tenant, f"id-{key}", int(now), now))


@asynccontextmanager
async def replicas(store: StoreServer, count: int = 2, toml: str = ADMIN) -> AsyncIterator[list[Replica]]:
    """Processes on one store. A crash of one's task fails the test."""
    supervisor = Supervisor(lambda: None)
    made = [Replica(store, toml) for _ in range(count)]
    async with AsyncExitStack() as ending:
        ending.push_async_callback(supervisor.aclose)
        for one in made:
            await one.ring.start(supervisor)
            ending.push_async_callback(one.ring.aclose)
        yield made
        assert supervisor.crashed is None


async def until(condition: Callable[[], bool], within_s: float = WITHIN_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_key_and_its_end_are_in_effect_everywhere_within_a_second(server: StoreServer) -> None:
    async with replicas(server) as (here, there):
        await here.add("k")
        assert here.opens("k")
        await until(lambda: there.opens("k"))
        assert there.tenants._by_header
        await there.revoke("k")
        assert not there.opens("k")
        await until(lambda: not here.opens("k"))
        await here.add("other")
        await here.ring.change(lambda ring: drop_tenant(ring, "bob"))
        await until(lambda: there.ring.ring.version == 4)
        assert not here.opens("other")
        assert not there.opens("other")
        assert server("HLEN", KEYS) == server("HLEN", TENANTS) == 0


async def test_a_wake_up_that_never_comes_is_not_missed(server: StoreServer) -> None:
    """The stream is made anew with a lower id, as after a failover: a blocked read does not return for it."""
    async with replicas(server) as (here, there):
        await here.add("k")
        await until(lambda: there.opens("k"))
        digest = hash_key("silent").removeprefix("sha256:")
        record = msgspec.json.encode(KeyRecord(tenant="bob", id="x"))
        server("MULTI")
        server("HSET", KEYS, digest, record)
        server("DEL", NEWS)
        server("XADD", NEWS, "1-1", "version", "2", "stamp", "other")
        server("EXEC")
        await until(lambda: here.opens("silent") and there.opens("silent"))


async def test_changes_at_the_same_time_are_all_made(server: StoreServer) -> None:
    async with replicas(server, 3) as group:
        adds = (one.add(f"{at}-{nth}", f"t{nth % 5}") for at, one in enumerate(group) for nth in range(15))
        await asyncio.gather(*adds)
        await until(lambda: {one.ring.ring.version for one in group} == {45})
        assert len({one.ring.ring.mark for one in group}) == 1
        for one in group:
            assert all(one.opens(f"{at}-{nth}") for at in range(3) for nth in range(15))
        assert server("HLEN", KEYS) == 45
        assert server("XLEN", NEWS) == 1


async def test_a_change_that_is_denied_leaves_nothing(server: StoreServer) -> None:
    async with replicas(server, 1) as (here,):

        def refuse(_: Ring) -> Ring:
            raise no_tenant("x")

        with pytest.raises(Denied):
            await here.ring.change(refuse)
        same = await here.ring.change(lambda ring: ring)
        assert same.version == 0
        assert server.keys() == []


async def test_a_process_that_starts_later_knows_everything_at_once(server: StoreServer) -> None:
    async with replicas(server, 1) as (here,):
        await here.add("k")
        async with replicas(server, 1) as (late,):
            assert late.opens("k")
    async with replicas(server, 1) as (after,):
        assert after.opens("k")


async def test_a_store_that_is_a_moment_late_is_waited_for(own_server: StoreServer) -> None:
    async with replicas(own_server, 1) as (before,):
        await before.add("k")
    own_server("SAVE")
    own_server.kill()
    starting = asyncio.get_running_loop().run_in_executor(None, own_server.start)
    async with replicas(own_server, 1) as (late,):
        assert late.opens("k")
    await starting


async def test_an_emptied_store_is_given_back_what_it_lost(server: StoreServer) -> None:
    async with replicas(server) as (here, there):
        await here.add("k")
        await until(lambda: there.opens("k"))
        server("FLUSHALL")
        await until(lambda: server("HLEN", KEYS) == 1 and server("XLEN", NEWS) == 1)
        assert here.opens("k")
        await there.add("l")
        await until(lambda: here.opens("l"))
        assert server("HLEN", KEYS) == 2


async def test_a_failover_that_loses_a_revocation_does_not_bring_the_key_back(server: StoreServer) -> None:
    async with replicas(server) as (here, there):
        await here.add("k")
        await until(lambda: there.opens("k"))
        saved = {key: server("DUMP", key) for key in (NEWS, TENANTS, KEYS)}
        await here.revoke("k")
        await until(lambda: not there.opens("k"))
        server("MULTI")
        for key, value in saved.items():
            server("RESTORE", key, 0, value, "REPLACE")
        server("EXEC")
        seen = [(here.opens("k"), there.opens("k")) for _ in range(3)]
        await until(lambda: bool(msgspec.json.decode(server("HVALS", KEYS)[0])["revoked"]))
        await here.ring.newest()
        assert [*seen, (here.opens("k"), there.opens("k"))] == [(False, False)] * 4
        async with replicas(server, 1) as (late,):
            assert not late.opens("k")


async def test_while_the_store_is_gone_what_was_known_stays_and_nothing_changes(own_server: StoreServer) -> None:
    async with replicas(own_server) as (here, there):
        await here.add("k")
        await until(lambda: there.opens("k"))
        own_server.kill()
        await until(lambda: here.ring.away and there.ring.away, 5.0)
        assert here.opens("k")
        assert (await here.ring.newest()).version == 1
        with pytest.raises(StoreAway):
            await here.add("l")
        with pytest.raises(StoreAway):
            await there.revoke("k")
        assert here.opens("k")
        assert "store away" in repr(here.ring)
        own_server.start()  # without its data
        await until(lambda: not (here.ring.away or there.ring.away), 5.0)
        await there.revoke("k")
        await until(lambda: not here.opens("k"))


async def test_a_store_that_hangs_is_told_from_one_that_answers(
    own_server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    async with replicas(own_server, 1) as (here,):
        await here.add("k")
        own_server.freeze()
        try:
            with pytest.raises(StoreAway):
                await here.add("l")
            assert here.opens("k")
        finally:
            own_server.thaw()
        await until(lambda: not here.ring.away, 5.0)
        await here.add("m")
        assert here.opens("m")


async def test_a_change_whose_answer_is_lost_is_made_once(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost, asked = Keyring._put, [False], []

    async def put(self: Keyring, *arguments: Any) -> bool:
        done = await real(self, *arguments)
        if not lost[0]:
            lost[0] = True
            raise ConnectionResetError
        return done

    async with replicas(server, 1) as (here,):
        monkeypatch.setattr(Keyring, "_put", put)
        digest = hash_key("k").removeprefix("sha256:")

        def change(ring: Ring) -> Ring:
            asked.append(ring.version)
            made = put_tenant(ring, "bob", TenantRecord())
            return put_key(made, digest, KeyRecord(tenant="bob", id="i"), ())

        ring = await here.ring.change(change)
        assert (lost, asked, ring.version) == ([True], [0], 1)
        assert here.opens("k")


async def test_a_change_that_never_reached_the_store_is_made_after_all(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = Keyring._put, [False]

    async def put(self: Keyring, *arguments: Any) -> bool:
        if not lost[0]:
            lost[0] = True
            raise ConnectionResetError
        return await real(self, *arguments)

    async with replicas(server, 1) as (here,):
        monkeypatch.setattr(Keyring, "_put", put)
        await here.add("k")
        assert here.ring.ring.version == 1
        assert server("HLEN", KEYS) == 1


async def test_a_key_ends_on_time_also_where_its_header_is_remembered(server: StoreServer) -> None:
    async with replicas(server) as (here, there):
        await here.add("k", expires=int(wall()) + 2)
        await until(lambda: there.opens("k"))
        assert here.opens("k")
        await until(lambda: not (here.opens("k") or there.opens("k")), 3.0)


async def test_records_that_can_not_be_read_open_nothing(server: StoreServer, caplog: pytest.LogCaptureFixture) -> None:
    async with replicas(server, 1) as (here,):
        await here.add("k")
        await here.add("l")
        server("HSET", TENANTS, b"\xff\xfe", b"{}", "broken", b"{", "wrong", b'{"weight": "x"}', "new", b'{"later": 1}')
        server("HSET", KEYS, "short", b'{"tenant": "bob", "id": "s"}', hash_key("l").removeprefix("sha256:"), b"[]")
        server("XADD", NEWS, "*", "version", "9", "stamp", "s")
        with caplog.at_level(logging.ERROR):
            await until(lambda: here.ring.ring.version == 9)
        assert here.ring.ring.tenants.keys() == {"bob", "new"}
        assert here.opens("k")
        assert not here.opens("l")
        assert len([one for one in caplog.records if "can't be read" in one.message]) == 4
        await here.add("m")  # and it goes on
        assert server("HEXISTS", TENANTS, "broken") == 1


async def test_a_version_that_can_not_be_read_names_itself(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_S", 0.0)
    server("XADD", NEWS, "*", "version", "x", "stamp", "s")
    with pytest.raises(StoreUnfit, match="version of tenants and keys can't be read"):
        async with replicas(server, 1):
            pass
    server("DEL", NEWS)
    server("SET", NEWS, "a string")
    with pytest.raises(StoreAway, match="WRONGTYPE"):
        async with replicas(server, 1):
            pass


async def test_thousands_of_records_go_and_come(server: StoreServer) -> None:
    async with replicas(server) as (here, there):

        def fill(ring: Ring) -> Ring:
            tenants = {f"t{nth}": TenantRecord(weight=nth + 1.0) for nth in range(900)}
            names = ((nth, hash_key(f"k{nth}").removeprefix("sha256:")) for nth in range(2_500))
            keys = {digest: KeyRecord(tenant=f"t{nth % 900}", id=f"i{nth}") for nth, digest in names}
            return msgspec.structs.replace(ring, tenants=tenants, keys=keys)

        await here.ring.change(fill)
        await until(lambda: there.ring.ring.version == 1, 5.0)
        assert there.ring.ring == here.ring.ring
        assert there.opens("k2499")
        await here.ring.change(lambda ring: msgspec.structs.replace(ring, tenants={}, keys={}))
        await until(lambda: there.ring.ring.version == 2, 5.0)
        assert not there.opens("k2499")
        assert server("EXISTS", KEYS, TENANTS) == 0
