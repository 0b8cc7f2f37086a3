"""Stores of several servers, real ones: sentinels that fail over, a cluster whose slot changes hands."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.crc import key_slot

from gateway.config import Config, ServerConfig
from gateway.keyring import Keyring
from gateway.queue import finders, turns
from gateway.queue.channel import Address, Login
from gateway.queue.client import Queue, Store, StoreAway, StoreUnfit
from gateway.queue.finders import Cluster, Sentinels
from gateway.queue.place import Phase
from gateway.queue.target import Target
from gateway.ring import TenantRecord, put_tenant
from gateway.supervisor import Supervisor
from gateway.tenants import Tenants, hash_key
from tests.queue.conftest import Join, pool, ticket
from tests.queue.ledgers import check, tickets
from tests.queue.load import Load
from tests.queue.procs import KEYS
from tests.queue.test_client import granted, told, until
from tests.support.store import StoreServer, binaries
from tests.support.topology import Clustered, Node, Watched, clustered, wait, watched

__all__ = ["clustered", "watched"]

CERTS = Path(__file__).parent.parent / "support" / "certs"

only_valkey = pytest.mark.parametrize("clustered", ["valkey"], indirect=True)
only_redis = pytest.mark.parametrize("clustered", ["redis"], indirect=True)


async def _two(site: Watched | Clustered, join: Join) -> list[Queue]:
    queues = [await join(site) for _ in range(2)]
    for queue in queues:
        queue.declare(pool(4, 4))
    return queues


async def _until(condition: Callable[[], bool], limit_s: float = 15.0) -> None:
    """For conditions that ask servers."""
    await asyncio.to_thread(wait, condition, limit_s)


def _number(node: Node, record: str) -> int:
    """Of a process's last turn."""
    return int(node("HGET", record, "number") or 0)


async def test_sentinels_fail_over_under_load(watched: Watched, join: Join) -> None:
    load = Load(*await _two(watched, join))
    await load.goes_on()
    await asyncio.to_thread(watched.primary.kill)
    await load.goes_on()
    for queue in load.queues:
        assert queue.session.rejoins >= 1
        assert queue.turns.link is not None
        assert queue.turns.link.address.port == watched.replica.port
    await load.settle(watched.replica)


@pytest.mark.parametrize("watched", ["redis"], indirect=True)
async def test_a_failover_that_loses_another_processs_turn(watched: Watched, join: Join) -> None:
    a, b = [await join(watched) for _ in range(2)]
    for queue in (a, b):
        queue.declare(pool(1))
    first = a.submit(ticket())
    await granted(first)
    second = b.submit(ticket(waits_ms=60_000))
    await told(b)
    records = [KEYS.process(f"{queue.session.base}.0") for queue in (a, b)]
    await _until(lambda: all(_number(watched.replica, one) == _number(watched.primary, one) > 0 for one in records))
    watched.replica.freeze()
    watched.primary("CLIENT", "KILL", "TYPE", "replica")  # from here on the replica hears nothing
    first.end()
    await granted(second)
    await told(a)
    await asyncio.to_thread(watched.primary.kill)
    watched.replica.thaw()
    assert _number(watched.replica, records[0]) < a.turns.count
    await until(lambda: a.session.rejoins == b.session.rejoins == 1 and not (a.lost or b.lost), 15)
    third = a.submit(ticket(waits_ms=60_000))
    for queue in (a, b):
        await until(lambda q=queue: q.book.known == 1 and not q.book.pending)
        await told(queue)
    await _until(lambda: sorted(t[0] for t in tickets(watched.replica).values()) == [1, 2])
    check(watched.replica)
    assert (second.phase, third.phase) == (Phase.HELD, Phase.WAITING)
    second.end()
    await granted(third)


@pytest.mark.parametrize("watched", ["valkey"], indirect=True)
async def test_a_primary_that_was_replaced_is_left_though_the_turn_may_yet_be_answered(
    watched: Watched, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_S", 60.0)
    queue = await join(watched)
    queue.declare(pool(1))
    held = queue.submit(ticket())
    await granted(held)
    watched.primary.freeze()
    try:
        await _until(watched.promoted)
        await until(lambda: queue.turns.link is not None and queue.session.rejoins == 1, 15)
        assert queue.turns.link is not None
        assert queue.turns.link.address.port == watched.replica.port
        await until(lambda: queue.book.known == 1 and not queue.book.pending)
        waiting = queue.submit(ticket())
        held.end()
        await granted(waiting)
    finally:
        watched.primary.thaw()


@pytest.mark.parametrize("watched", ["redis"], indirect=True)
async def test_sentinels_with_passwords_and_names(
    watched: Watched, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in watched.sentinels:
        one("ACL", "SETUSER", "gate", "on", ">s3cret", "+@all")
        one("ACL", "SETUSER", "default", "resetpass", "-@all", "+auth", "+ping")
    url = f"{watched.url}?sentinel_username=gate"
    with pytest.raises(StoreUnfit, match=r"sentinel"):
        await Queue.connect(Store(url=watched.url), supervisor)
    monkeypatch.setenv("WRONG", "no")
    with pytest.raises(StoreUnfit, match=r"store\.sentinel_password_env"):
        await Queue.connect(Store(url=url, sentinel_password_env="WRONG"), supervisor)
    monkeypatch.setenv("RIGHT", "s3cret")
    with pytest.raises(StoreUnfit, match=r"'other'.*No such master"):
        other = url.replace("/main", "/other")
        await Queue.connect(Store(url=other, sentinel_password_env="RIGHT"), supervisor)
    queue = await Queue.connect(Store(url=url, sentinel_password_env="RIGHT"), supervisor)
    await queue.aclose()


@asynccontextmanager
async def sentinel(answer: bytes) -> AsyncIterator[Address]:
    """Something that gives one answer to whatever it is asked; none if that is empty."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])


def configuration(epoch: int, port: int) -> bytes:
    words = ("ip", "10.0.0.1", "port", str(port), "config-epoch", str(epoch))
    return b"*6\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words)


async def test_the_newest_configuration_counts_and_silent_sentinels_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finders, "ANSWER_S", 0.4)
    unknown = b"-ERR No such master with that name\r\n"
    async with (
        sentinel(configuration(3, 7003)) as old,
        sentinel(configuration(5, 7005)) as new,
        sentinel(b"") as silent,
        sentinel(unknown) as ignorant,
    ):
        many = Sentinels((silent, old, ignorant, new), "main", Login(), None)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await many.find() == Address("10.0.0.1", 7005)
        assert loop.time() - began >= finders.ANSWER_S
        began = loop.time()
        assert await many.find() == Address("10.0.0.1", 7005)
        assert loop.time() - began < finders.ANSWER_S
        with pytest.raises(StoreUnfit, match="No such master"):
            await Sentinels((silent, ignorant), "main", Login(), None).find()
        with pytest.raises(StoreAway, match="no sentinel answers"):
            await Sentinels((silent,), "main", Login(), None).find()
        await many.aclose()


@only_valkey
async def test_a_clusters_replica_takes_over_under_load(clustered: Clustered, join: Join) -> None:
    load = Load(*await _two(clustered, join))
    await load.goes_on()
    await asyncio.to_thread(clustered.owner.kill)
    await load.goes_on()
    for queue in load.queues:
        assert queue.session.rejoins >= 1
        assert queue.turns.link is not None
        assert queue.turns.link.address.port == clustered.replica.port
    await load.settle(clustered.replica)


@only_redis
async def test_a_slot_moves_under_load(clustered: Clustered, join: Join) -> None:
    target = clustered.others[0]
    load = Load(*await _two(clustered, join))
    await load.goes_on()
    keys = {key.decode() for key in clustered.owner("KEYS", "*")}
    assert keys
    assert {key_slot(key.encode()) for key in keys} == {clustered.slot}
    for step in clustered.move(clustered.owner, target):
        if step == "keys":  # the queue stands still, and its keys can be moved as they are
            await until(lambda: all(queue.turns._trouble_s is not None for queue in load.queues))
    await load.goes_on()
    assert all(queue.session.rejoins >= 1 for queue in load.queues)
    await load.settle(target)
    assert clustered.owner("KEYS", "*") == []


@only_redis
async def test_what_is_no_cluster_and_what_is_one(clustered: Clustered, supervisor: Supervisor) -> None:
    with pytest.raises(StoreUnfit, match=r"give a redis\+cluster:// address"):
        await Queue.connect(Store(url=f"redis://127.0.0.1:{clustered.owner.port}"), supervisor)
    node = clustered.others[0]
    one_seed = Store(url=f"redis+cluster://127.0.0.1:1,127.0.0.1:{node.port}")
    queue = await Queue.connect(one_seed, supervisor)
    assert queue.turns.target.kind == "cluster"
    tenants = Tenants(Config(server=ServerConfig(admin_keys=(hash_key("admin"),))))
    ring = Keyring(queue.target, tenants)
    await ring.start(supervisor)
    await ring.change(lambda ring: put_tenant(ring, "bob", TenantRecord()))
    assert [tenant.name for tenant in tenants.all] == ["bob"]
    await ring.aclose()
    await queue.aclose()
    assert {key_slot(key) for key in clustered.owner("KEYS", "*")} == {clustered.slot}


def _secured(port: int, bus: int) -> list[str]:
    pem, ca = str(CERTS / "server.pem"), str(CERTS / "ca.pem")
    files = ("--tls-cert-file", pem, "--tls-key-file", pem, "--tls-ca-cert-file", ca)
    return ["--port", str(port), "--tls-port", str(bus), "--tls-auth-clients", "no", "--save", "", *files]


@pytest.fixture
def secured() -> Iterator[Node]:
    """A server that speaks TLS, on the port that is its bus port otherwise."""
    binary = binaries()["redis"]
    if binary is None:
        pytest.skip("no redis-server here: the packaged valkey-server has no TLS")
    node = Node(binary, _secured)
    yield node
    node.close()


async def test_tls(secured: Node, supervisor: Supervisor) -> None:
    port = secured._words[secured._words.index("--tls-port") + 1]
    with pytest.raises(StoreAway, match="certificate verify failed"):
        await Target(f"rediss://localhost:{port}", "signalbox").open()
    with pytest.raises(StoreUnfit, match=r"store\.url: its certificates"):
        await Target(f"rediss://localhost:{port}?ssl_ca_certs=/nowhere", "signalbox").open()
    options = f"ssl_ca_certs={CERTS / 'ca.pem'}"
    with pytest.raises(StoreAway, match="certificate verify failed"):  # it is for localhost
        await Target(f"rediss://127.0.0.1:{port}?{options}", "signalbox").open()
    queue = await Queue.connect(Store(url=f"rediss://localhost:{port}?{options}"), supervisor)
    queue.declare(pool(1))
    await granted(queue.submit(ticket()))
    await queue.aclose()
    any_name = f"rediss://127.0.0.1:{port}?{options}&ssl_check_hostname=no"
    (await Target(any_name, "signalbox").open()).close()


async def test_one_server_is_no_cluster(server: StoreServer, supervisor: Supervisor) -> None:
    node = Node(server.binary, lambda port, _: ["--port", str(port), "--save", ""])
    try:
        with pytest.raises(StoreUnfit, match="cluster support disabled"):
            await Queue.connect(Store(url=f"redis+cluster://127.0.0.1:{node.port}"), supervisor)
    finally:
        node.close()


async def test_a_node_without_an_endpoint_is_where_it_was_asked() -> None:
    slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$-1\r\n:7001\r\n$1\r\nx\r\n"
    async with sentinel(slots) as node:
        cluster = Cluster((Address("127.0.0.1", 1), node), 9, Login(), None)
        assert await cluster.find() == Address("127.0.0.1", 7001)
    async with sentinel(b"*0\r\n") as node:
        with pytest.raises(StoreAway, match="nobody owns slot 9"):
            await Cluster((node,), 9, Login(), None).find()
