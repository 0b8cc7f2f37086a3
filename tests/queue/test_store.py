"""Stores that must not be used, and how a store is told: each error names its field."""

import msgspec
import pytest

from gateway.queue import client
from gateway.queue.advice import advise
from gateway.queue.channel import Address, Login, ask
from gateway.queue.client import Queue, Store, StoreAway, StoreUnfit
from gateway.queue.keys import SCHEMA
from gateway.queue.link import Link, check_server, facts_of
from gateway.queue.target import Target
from gateway.queue.urls import Url, read_url, shown
from gateway.supervisor import Supervisor
from tests.queue.conftest import Join, pool, ticket
from tests.support.store import StoreServer


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"on_loss": "local"}, "store.on_loss"),
        ({"url": "http://h"}, r"store\.url: .*redis://"),
        ({"url": "unix://"}, r"store\.url: .*path"),
        ({"url": "unix:///x?no_such=1"}, r"store\.url: .*'no_such'"),
        ({"url": "redis://h?ssl_ca_certs=f"}, r"store\.url: .*needs TLS"),
        ({"url": "rediss://h?ssl_cert_reqs=perhaps"}, r"store\.url: .*perhaps"),
        ({"url": "redis+sentinel://h:1,i:2"}, r"store\.url: .*name of the service"),
        ({"url": "redis+sentinel://h:1/s/x"}, r"store\.url: .*name of the service"),
        ({"url": "redis+sentinel://h:99999/s"}, r"store\.url: .*no such port"),
        ({"url": "redis+sentinel://h,,i/s"}, r"store\.url: .*no host"),
        ({"url": "unix+sentinel://h/s"}, r"store\.url: "),
        ({"url": "redis+cluster://h:1/2"}, r"store\.url: .*no databases"),
        ({"url": "redis+cluster://h:1?db=2"}, r"store\.url: .*no databases"),
        ({"sentinel_password_env": "A", "sentinel_password_file": "b"}, "store.sentinel_password_env"),
        ({"url": "redis://h", "sentinel_password_env": "A"}, "no sentinels"),
        ({"namespace": "a{b}"}, "store.namespace"),
        ({"url": "localhost"}, "store.url"),
        ({"password_env": "A", "password_file": "b"}, "store.password_env"),
        ({"max_queued": -1}, "max_queued"),
        ({"max_queue": 1}, "max_queue"),
    ],
)
def test_a_bad_section_names_its_field(section: dict[str, object], words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.convert(section, Store)


def test_what_urls_say() -> None:
    assert read_url("redis://u:p%40@h/3") == Url("server", (Address("h", 6379),), Login("u", "p@", 3))
    assert read_url("unix:///run/s?db=2") == Url("server", (Address(path="/run/s"),), Login("", "", 2))
    found = read_url("redis+sentinel://u:p%2C@[::1]:1,h/main/4?sentinel_username=s")
    addresses = (Address("::1", 1), Address("h", 26379))
    assert found == Url("sentinel", addresses, Login("u", "p,", 4), None, "main", "s")
    assert read_url("redis+cluster://h:1,i").addresses == (Address("h", 1), Address("i", 6379))
    assert read_url("rediss+cluster://h?ssl_ca_certs=f").secure is not None


async def test_a_store_that_is_not_there(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 0.2)
    with pytest.raises(StoreAway, match=r"store\.url: .*nowhere"):
        await Queue.connect(Store(url="unix:///nowhere"), supervisor)


async def test_secrets_come_by_name(
    own_server: StoreServer, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    from pathlib import Path

    own_server("CONFIG", "SET", "requirepass", "s3cret")
    with pytest.raises(StoreUnfit, match=r"password_env.*NOAUTH|password_env.*[Aa]uthentication"):
        await Queue.connect(Store(url=own_server.url), supervisor)
    with pytest.raises(StoreUnfit, match=r"store.password_env: the environment has no NOT_THERE"):
        await Queue.connect(Store(url=own_server.url, password_env="NOT_THERE"), supervisor)
    with pytest.raises(StoreUnfit, match=r"password_file"):
        await Queue.connect(Store(url=own_server.url, password_file=str(tmp_path) + "/none"), supervisor)
    monkeypatch.setenv("STORE_PASSWORD", "wrong")
    with pytest.raises(StoreUnfit, match=r"password_env"):
        await Queue.connect(Store(url=own_server.url, password_env="STORE_PASSWORD"), supervisor)
    path = Path(str(tmp_path)) / "secret"
    path.write_text("s3cret\n")
    queue = await Queue.connect(Store(url=own_server.url, password_file=str(path)), supervisor)
    await queue.aclose()


async def test_an_evicting_store_is_refused(own_server: StoreServer, supervisor: Supervisor) -> None:
    own_server("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(StoreUnfit, match="maxmemory-policy is allkeys-lru"):
        await Queue.connect(Store(url=own_server.url), supervisor)


@pytest.mark.parametrize(
    "facts",
    [
        {"redis_version": "6.2.14"},
        {"redis_version": "7.2.4", "valkey_version": "7.1.0"},
    ],
)
def test_an_old_server_is_refused(facts: dict[str, str]) -> None:
    with pytest.raises(StoreUnfit, match=r"is too old: redis 7\.0 or valkey 7\.2"):
        check_server(facts)


def test_a_replica_is_only_away() -> None:
    with pytest.raises(StoreAway, match="replica"):
        check_server({"redis_version": "7.4.0", "role": "slave"})


async def test_another_schema_keeps_its_namespace(server: StoreServer, supervisor: Supervisor) -> None:
    server("HSET", "{signalbox}:meta", "schema", SCHEMA + 1)
    with pytest.raises(StoreUnfit, match=rf"store\.namespace: gateways of schema {SCHEMA + 1} keep it"):
        await Queue.connect(Store(url=server.url), supervisor)
    queue = await Queue.connect(Store(url=server.url, namespace="other"), supervisor)
    await queue.aclose()


async def test_a_server_without_functions_gets_the_script(own_server: StoreServer, join: Join) -> None:
    own_server("ACL", "SETUSER", "default", "-function", "-fcall")
    link = await Link.connect(Target(own_server.url, "signalbox"), "{signalbox}:")
    assert not link.functions
    link.close()
    queue = await join(own_server)
    queue.declare(pool(1))
    first, second = queue.submit(ticket()), queue.submit(ticket())
    assert await first.granted() == 0
    own_server("SCRIPT", "FLUSH")
    first.end()
    assert await second.granted() == 0


async def test_a_library_that_was_dropped_is_loaded_again(server: StoreServer, join: Join) -> None:
    queue = await join(server)
    queue.declare(pool(1))
    first, second = queue.submit(ticket()), queue.submit(ticket())
    assert await first.granted() == 0
    server("FUNCTION", "FLUSH")
    first.end()
    assert await second.granted() == 0
    assert queue.session.rejoins == 0


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({}, "server", "set appendonly yes"),
        ({"appendonly": "yes"}, "server", None),
        ({"appendonly": "yes", "appendfsync": "always"}, "server", "everysec is enough"),
        ({"appendonly": "yes", "appendfsync": "no"}, "server", "half a minute"),
        ({"appendonly": "yes"}, "sentinel", "min-replicas-to-write 1"),
        ({"appendonly": "yes", "min-replicas-to-write": "1"}, "sentinel", None),
    ],
)
async def test_advice(own_server: StoreServer, settings: dict[str, str], kind: str, words: str | None) -> None:
    for name, value in settings.items():
        own_server("CONFIG", "SET", name, value)
    channel = await Target(own_server.url, "signalbox").open()
    facts = {**facts_of(await ask(channel, "INFO")), "connected_slaves": "2"}
    found = await advise(channel, facts, kind)
    assert kind == "server" or (await advise(channel, {**facts, "connected_slaves": "1"}, kind)).well
    assert found.well == (words is None)
    assert (words or "as it should be") in found.text
    assert f"appendonly {settings.get('appendonly', 'no')}, appendfsync" in found.text
    own_server("ACL", "SETUSER", "default", "-config")
    hidden = await advise(channel, {**facts, "aof_enabled": "01"[settings.get("appendonly") == "yes"]}, kind)
    assert "CONFIG GET is not permitted" in hidden.text
    assert ("set appendonly yes" in hidden.text) == ("appendonly" not in settings)
    channel.close()


async def test_advice_is_given_once_and_never_in_the_way(
    own_server: StoreServer, supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await Queue.connect(Store(url=own_server.url), supervisor)
    (line,) = [record for record in caplog.records if record.message.startswith("the store has")]
    assert "set appendonly yes" in line.message
    assert line.levelname == "WARNING"
    await queue.aclose()


def test_a_url_is_shown_without_its_secrets() -> None:
    assert shown("redis+sentinel://u:p@h:1,i/s?x=1") == "redis+sentinel://h:1,i/s?x=1"
    assert shown("redis://h") == "redis://h"
    assert shown("unix:///a@b") == "unix:///a@b"
    assert shown("embedded") == "embedded"
