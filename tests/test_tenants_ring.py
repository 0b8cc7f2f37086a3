"""The ring of stored tenants and keys as values, and what a process makes of one."""

import logging
from pathlib import Path
from typing import Any

import pytest

from gateway import ring as module
from gateway.config import ConfigError, decode
from gateway.ring import (
    KEEP_ENDED_S,
    Denied,
    KeyRecord,
    Ring,
    TenantRecord,
    drop_tenant,
    end_key,
    find_key,
    put_key,
    put_tenant,
)
from gateway.tenants import LONGEST_HEADER, AdminKeys, Tenants, hash_key
from policies.quota import TenantLimits

POOL = '[[pool]]\nmodel = "m"\naliases = ["alias"]\n[[pool.backend]]\nkind = "simulated"\nname = "one"\n'
ADMIN = f'[server]\nadmin_keys = ["{hash_key("admin")}"]\n'
NOW = 1_800_000_000


def tenants(toml: str = ADMIN, **environ: str) -> Tenants:
    return Tenants(decode((toml + POOL).encode()), environ)


def digest(key: str) -> str:
    return hash_key(key).removeprefix("sha256:")


def key(tenant: str = "bob", **fields: Any) -> KeyRecord:
    return KeyRecord(**{"tenant": tenant, "id": "i", "created": NOW, **fields})


def ring(*keys: tuple[str, KeyRecord], **made: TenantRecord) -> Ring:
    return Ring(version=1, tenants=made or {"bob": TenantRecord()}, keys={digest(name): one for name, one in keys})


def name_of(found: Tenants, secret: str) -> str | None:
    tenant = found.of(f"Bearer {secret}".encode())
    assert found.of_key(secret.encode()) == tenant
    return tenant.name if tenant else None


def test_changes_leave_the_ring_they_were_made_from() -> None:
    start = Ring()
    one = put_tenant(start, "bob", TenantRecord(weight=2))
    two = put_key(one, digest("k"), key(), ())
    three = drop_tenant(two, "bob")
    assert (start.tenants, one.keys, list(two.keys_of("bob")), three.tenants, three.keys) == (
        {},
        {},
        [digest("k")],
        {},
        {},
    )
    assert find_key(two, "bob", "i") == (digest("k"), key())
    assert repr(two) == "<Ring 0: 1 tenants, 1 keys>"


def test_a_key_needs_a_tenant_of_the_ring_or_of_the_configuration() -> None:
    with pytest.raises(Denied, match="no tenant 'bob'") as caught:
        put_key(Ring(), digest("k"), key(), ())
    assert caught.value.refusal.param == "name"
    assert put_key(Ring(), digest("k"), key(), {"bob": 1}).keys


def test_what_an_earlier_tenant_of_the_name_left_opens_nothing() -> None:
    left = put_key(Ring(), digest("k"), key(), {"bob"})
    assert not put_tenant(left, "bob", TenantRecord()).keys
    assert put_tenant(ring(("k", key())), "bob", TenantRecord(weight=3)).keys


@pytest.mark.parametrize(
    ("fields", "at", "ends"),
    [
        ({}, NOW, NOW),
        ({}, NOW + 60, NOW + 60),
        ({"expires": NOW + 30}, NOW + 60, NOW + 30),
        ({"expires": NOW + 90}, NOW + 60, NOW + 60),
        ({"expires": NOW + 90}, NOW, NOW),
        ({"expires": NOW - 5}, NOW, NOW - 5),
        ({"revoked": NOW - 5}, NOW + 60, NOW - 5),
    ],
)
def test_a_key_ends_at_the_earliest_of_what_was_said(fields: dict[str, int], at: int, ends: int) -> None:
    before = ring(("k", key(**fields)))
    after = end_key(before, "bob", "i", at, NOW + 0.5)
    assert after.keys[digest("k")].ends_at() == ends
    assert (after is before) == (ends == before.keys[digest("k")].ends_at())
    assert end_key(after, "bob", "i", at, NOW + 0.5) is after


def test_another_tenants_key_can_not_be_ended() -> None:
    with pytest.raises(Denied, match="has no key"):
        end_key(ring(("k", key())), "carol", "i", NOW, NOW)


def test_a_key_lives_until_its_end_and_not_at_it() -> None:
    assert key().lives(NOW + 1e9)
    assert key(expires=NOW + 1).lives(NOW + 0.999)
    assert not key(expires=NOW + 1).lives(NOW + 1)
    assert not key(expires=NOW + 9, revoked=NOW).lives(NOW)


def test_there_is_a_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TENANTS", 1)
    monkeypatch.setattr(module, "MOST_KEYS", 2)
    full = ring(("a", key(id="a", revoked=NOW - 1)), ("b", key(id="b")))
    with pytest.raises(Denied, match="there are 1 tenants"):
        put_tenant(full, "carol", TenantRecord())
    assert put_tenant(full, "bob", TenantRecord(weight=2)).tenants["bob"].weight == 2
    fuller = put_key(full, digest("c"), key(id="c"), ())
    assert fuller.keys.keys() == {digest("b"), digest("c")}, "the ended one makes room"
    with pytest.raises(Denied, match="there are 2 keys"):
        put_key(fuller, digest("d"), key(id="d"), ())


def test_ended_keys_are_forgotten_after_a_while() -> None:
    old = ring(
        ("a", key(id="a", revoked=NOW - KEEP_ENDED_S - 1)),
        ("b", key(id="b", expires=NOW - KEEP_ENDED_S + 1)),
        ("c", key(id="c", created=1)),
    )
    assert put_key(old, digest("d"), key(id="d"), ()).keys.keys() == {digest("b"), digest("c"), digest("d")}


def test_a_process_takes_a_ring_over_in_one_step() -> None:
    found = tenants(f'{ADMIN}[[tenant]]\nname = "alice"\nkeys = ["{hash_key("of-alice")}"]\n')
    first = ring(("k", key()), ("further", key("alice", id="f")), ("stray", key("nobody", id="s")))
    assert found.adopt(first, NOW) == float("inf")
    assert [name_of(found, one) for one in ("of-alice", "further", "k", "stray")] == ["alice", "alice", "bob", None]
    assert found._by_header
    found.adopt(Ring(), NOW)
    assert not found._by_header
    assert [name_of(found, one) for one in ("of-alice", "further", "k")] == ["alice", None, None]
    assert [one.name for one in found.all] == ["alice"]


def test_the_configuration_wins_over_the_store() -> None:
    found = tenants(f'{ADMIN}[[tenant]]\nname = "bob"\nweight = 5\nkeys = ["{hash_key("k")}"]\n')
    found.adopt(ring(("k", key("carol")), bob=TenantRecord(weight=2), carol=TenantRecord()), NOW)
    tenant = found.of(b"Bearer k")
    assert tenant is not None
    assert (tenant.name, tenant.weight) == ("bob", 5)
    assert sorted(one.name for one in found.all) == ["bob", "carol"]


def test_keys_are_taken_over_while_they_live_and_the_next_end_is_told() -> None:
    found = tenants()
    keys = ring(("a", key(expires=NOW + 5)), ("b", key(expires=NOW + 9)), ("c", key(revoked=NOW)), ("d", key()))
    assert found.adopt(keys, NOW) == NOW + 5
    assert [name_of(found, one) for one in "abcd"] == ["bob", "bob", None, "bob"]
    assert found.adopt(keys, NOW + 5) == NOW + 9
    assert name_of(found, "a") is None


def test_what_the_configuration_lacks_opens_nothing(caplog: pytest.LogCaptureFixture) -> None:
    found = tenants()
    record = TenantRecord(top_class="gold", models=("gone", "alias"))
    with caplog.at_level(logging.WARNING):
        found.adopt(ring(bob=record, carol=TenantRecord(models=("gone",))), NOW)
    bob, carol = sorted(found.all, key=lambda one: one.name)
    assert bob.rank == 2, "the lowest"
    assert bob.may_use("m")
    assert not carol.may_use("m"), "a list of which nothing is left is not the empty one"
    assert len(caplog.records) == 3


def test_limits_come_from_either_side() -> None:
    found = tenants(f"{ADMIN}[[tenant]]\nname = 'a'\nrequests_per_min = 5\nmax_queued = 2\n")
    found.adopt(ring(bob=TenantRecord(tokens_in_flight=9, tokens_per_min=8)), NOW)
    assert [one.limits for one in found.all] == [
        TenantLimits(requests_per_min=5, max_queued=2),
        TenantLimits(tokens_in_flight=9, tokens_per_min=8),
    ]
    with pytest.raises(ConfigError, match=r"\$\.tenant\[0\]\.max_queued"):
        tenants("[[tenant]]\nname = 'a'\nmax_queued = -1\n")


def test_unchanged_records_keep_their_tenant() -> None:
    found, record = tenants(), TenantRecord(weight=2)
    found.adopt(ring(bob=record, carol=TenantRecord()), NOW)
    before = {one.name: one for one in found.all}
    found.adopt(ring(bob=record, carol=TenantRecord()), NOW)
    after = {one.name: one for one in found.all}
    assert after["bob"] is before["bob"]
    assert after["carol"] is not before["carol"]


def test_a_long_header_opens_but_is_not_remembered() -> None:
    found = tenants()
    found.adopt(ring(("k", key())), NOW)
    assert found.of(b"Bearer" + b" " * LONGEST_HEADER + b"k") is not None
    assert not found._by_header


def test_an_admin_key_closes_the_gateway_and_a_tenant_may_wait_for_its_keys() -> None:
    assert tenants("").open is not None
    closed = tenants()
    assert closed.open is None
    assert closed.of(None) is closed.of(b"Bearer admin") is None
    with pytest.raises(ConfigError, match="has no key"):
        tenants("[[tenant]]\nname = 'a'\n")
    assert len(tenants(f"{ADMIN}[[tenant]]\nname = 'a'\n").all) == 1


def test_an_open_gateway_says_that_the_store_has_tenants(caplog: pytest.LogCaptureFixture) -> None:
    found = tenants("")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found.adopt(ring(), NOW)
    assert [one.message for one in caplog.records] == [
        "the store has 1 tenants, but without an admin key everyone is let in here"
    ]
    assert name_of(found, "anything") == "default"


def test_admin_keys_come_as_hashes_or_by_name(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("in-a-file\n")
    toml = f'{ADMIN}admin_key_env = "A"\nadmin_key_file = "{file}"\n'
    keys = AdminKeys(decode((toml + POOL).encode()), {"A": "in-a-variable"})
    assert [keys.let_in(one) for one in (b"admin", b"in-a-file", b"in-a-variable", b"", b"x")] == [True] * 3 + [
        False
    ] * 2
    assert repr(keys) == "<AdminKeys 3>"
    with pytest.raises(ConfigError, match=r"\$\.server\.admin_key_env: .*A is not set or empty"):
        tenants(toml)
    file.write_text("\n")
    with pytest.raises(ConfigError, match=r"\$\.server\.admin_key_file: .*holds no key"):
        tenants(toml, A="x")
    with pytest.raises(ConfigError, match=r"\$\.server\.admin_keys\[0\]"):
        tenants('[server]\nadmin_keys = ["secret"]\n')


def test_an_admin_key_is_no_tenants_key() -> None:
    with pytest.raises(ConfigError, match=r"\$\.tenant\[0\]\.keys\[0\]: a key of 'a' is also an admin key"):
        tenants(f"{ADMIN}[[tenant]]\nname = 'a'\nkeys = ['{hash_key('admin')}']\n")
