"""API keys to tenants."""

from pathlib import Path

import pytest

from gateway import tenants as module
from gateway.config import ConfigError, decode
from gateway.tenants import Tenants, hash_key, new_key

POOLS = """
[[pool]]
model = "m"
aliases = ["alias"]
[[pool.backend]]
kind = "simulated"
name = "one"
[[pool]]
model = "n"
[[pool.backend]]
kind = "simulated"
name = "one"
"""


def tenants(toml: str, **environ: str) -> Tenants:
    return Tenants(decode((toml + POOLS).encode()), environ)


@pytest.fixture
def two() -> Tenants:
    return tenants(
        f"""
        [[tenant]]
        name = "a"
        keys = ["{hash_key("key-a")}", "{hash_key("key-a2")}"]
        weight = 2.5
        [[tenant]]
        name = "b"
        keys = ["{hash_key("key-b")}"]
        class = "batch"
        models = ["alias"]
        """
    )


def test_a_key_leads_to_its_tenant_first_and_again(two: Tenants) -> None:
    for _ in range(2):
        for header, name in [(b"Bearer key-a", "a"), (b"bearer  key-a2 ", "a"), (b"Bearer key-b", "b")]:
            tenant = two.of(header)
            assert tenant is not None
            assert tenant.name == name
    assert two.of_key(b"key-b") == two.of(b"Bearer key-b")


@pytest.mark.parametrize(
    "header", [None, b"", b"Bearer", b"Bearer ", b"key-a", b"Basic key-a", b"Bearer key-A", b"Bearer\xff\xfe \x00"]
)
def test_anything_else_leads_nowhere(two: Tenants, header: bytes | None) -> None:
    assert two.of(header) is None
    assert two.of(header) is None


def test_a_tenant_carries_what_the_configuration_says(two: Tenants) -> None:
    a, b = two.all
    assert (a.name, a.weight, a.rank, a.models) == ("a", 2.5, 0, frozenset())
    assert (b.name, b.weight, b.rank, b.models) == ("b", 1.0, 2, frozenset({"m"}))
    assert a.may_use("m")
    assert a.may_use("n")
    assert b.may_use("m")
    assert not b.may_use("n")


def test_without_tenants_everyone_is_the_default_one() -> None:
    nobody = tenants("")
    for header in (None, b"Bearer whatever"):
        tenant = nobody.of(header)
        assert tenant is not None
        assert (tenant.name, tenant.rank) == ("default", 0)
    assert not nobody.has_demo_keys()


def test_only_known_keys_are_remembered_and_not_too_many(two: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOWN_HEADERS", 8)
    for n in range(100):
        assert two.of(b"Bearer no-%d" % n) is None
    assert not two._by_header
    for n in range(1, 100):
        assert two.of(b"Bearer" + b" " * n + b"key-a") is not None
        assert len(two._by_header) <= 8


def test_demo_keys_are_noticed() -> None:
    assert tenants(f"[[tenant]]\nname = 'a'\nkeys = ['{hash_key('sk-demo-bob')}']").has_demo_keys()


def test_a_key_comes_from_the_environment_by_name() -> None:
    toml = "[[tenant]]\nname = 'a'\nkey_env = 'A_KEY'"
    tenant = tenants(toml, A_KEY="secret\n").of(b"Bearer secret")
    assert tenant is not None
    for environ in ({}, {"A_KEY": " "}):
        with pytest.raises(ConfigError, match=r"\$\.tenant\[0\]\.key_env: .*A_KEY is not set or empty"):
            tenants(toml, **environ)


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    toml = f"[[tenant]]\nname = 'a'\nkey_file = '{file}'"
    with pytest.raises(ConfigError, match=r"\$\.tenant\[0\]\.key_file: can't read"):
        tenants(toml)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        tenants(toml)
    file.write_text("one\n\n two \n")
    found = tenants(toml)
    assert found.of(b"Bearer one") == found.of(b"Bearer two") is not None


def test_a_secret_of_two_tenants_is_an_error() -> None:
    toml = f"[[tenant]]\nname = 'a'\nkeys = ['{hash_key('same')}']\n[[tenant]]\nname = 'b'\nkey_env = 'B'"
    with pytest.raises(ConfigError, match=r"\$\.tenant\[1\]\.key_env: a key of 'b' also belongs to 'a'"):
        tenants(toml, B="same")


def test_made_keys_are_long_and_different() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) >= 43
