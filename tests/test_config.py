"""The configuration: what it accepts, and where it says the fault is."""

from pathlib import Path

import msgspec
import pytest

from backends.openai import OpenAI
from backends.simulated import Simulated
from gateway.config import DEFAULT_CLASSES, Config, ConfigError, PoolConfig, check, decode, engines, load, models

SHIPPED = Path(__file__).parent.parent / "config.toml"
KEY_A = "sha256:" + "a" * 64
KEY_B = "sha256:" + "b" * 64
POOL = """
[[pool]]
model = "m"
[[pool.backend]]
kind = "simulated"
name = "one"
"""


def fault(toml: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        decode(toml.encode())
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_shipped_file_is_what_the_readme_says() -> None:
    config = load(SHIPPED)
    assert [one.name for one in config.classes] == ["interactive", "standard", "batch"]
    assert [one.name for one in config.tenants] == ["alice", "bob"]
    (pool,) = config.pools
    fast, slow = pool.backends
    assert isinstance(fast, Simulated)
    assert isinstance(slow, Simulated)
    assert fast.speed > slow.speed


def test_the_shipped_file_names_every_setting_of_its_server() -> None:
    text = SHIPPED.read_text(encoding="utf-8")
    section = text.partition("[server]")[2].partition("\n[")[0]
    for field in msgspec.structs.fields(type(Config().server)):
        assert f"{field.encode_name} = " in section


def test_a_pool_is_all_one_needs() -> None:
    config = decode(POOL.encode())
    assert config.classes == DEFAULT_CLASSES
    assert config.default_class == "standard"
    assert config.server.host == "127.0.0.1"
    assert config.store.url == "embedded"
    assert [path for path, _ in engines(config)] == ["$.pool[0].backend[0]"]


def test_it_survives_the_way_to_a_worker() -> None:
    config = load(SHIPPED)
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config


@pytest.mark.parametrize(
    ("toml", "path", "says"),
    [
        ("wat = 1" + POOL, "$.wat", "unknown field"),
        ("[server]\nprot = 1" + POOL, "$.server.prot", "unknown field"),
        ("[server]\nport = '80'" + POOL, "$.server.port", "Expected `int`, got `str`"),
        ("[server]\nport = 70000" + POOL, "$.server.port", "<= 65535"),
        ("[server]\ndrain_s = nan" + POOL, "$.server.drain_s", "Expected `float`"),
        ("[server]\ntls_cert_file = 'c'" + POOL, "$.server.tls_key_file", "both"),
        ("[store]\nurll = 'x'" + POOL, "$.store.urll", "unknown field"),
        (POOL + "speed = 'fast'", "$.pool[0].backend[0].speed", "Expected `float`, got `str`"),
        (POOL + "spped = 1", "$.pool[0].backend[0].spped", "unknown field"),
        (POOL + "[[pool.backend]]\nkind = 'tritton'", "$.pool[0].backend[1].kind", "tritton"),
        (POOL + "[[pool.backend]]\nname = 'two'", "$.pool[0].backend[1].kind", "required field is missing"),
        (POOL + "[[pool.backend]]\nkind = 'openai'\nname = 'x'", "$.pool[0].backend[1].url", "required field"),
        (POOL + "[[pool.backend]]\nkind = 'simulated'\nname = 'one'", "$.pool[0].backend[1].name", "is taken by"),
        (POOL + "[[pool]]\nmodel = 'n'", "$.pool[1].backend", "no backend"),
        ("[[pool]]\nmodel = 'a b'", "$.pool[0].model", "regex"),
        (POOL + POOL, "$.pool[1].model", "'m' is taken by $.pool[0].model"),
        (POOL.replace('"m"', '"m"\naliases = ["x", "m"]'), "$.pool[0].aliases[1]", "is taken by $.pool[0].model"),
        ("", "$.pool", "no pool"),
        ("default_class = 'gold'" + POOL, "$.default_class", "no class 'gold'; there is batch, interactive, standard"),
        ("[[class]]\nname = 'a'\nrank = 0" + POOL, "$.default_class", "no class 'standard'; there is a"),
        ("[[class]]\nname = 'standard'\nrank = 10" + POOL, "$.class[0].rank", "<= 9"),
        ("[[class]]\nname = 'standard'\nrank = 0\n" * 2 + POOL, "$.class[1].name", "is taken"),
        (
            "[[class]]\nname = 'standard'\nrank = 0\n[[class]]\nname = 'x'\nrank = 0" + POOL,
            "$.class[1].rank",
            "'0' is taken by $.class[0].rank",
        ),
        ("[[tenant]]\nname = 'a'" + POOL, "$.tenant[0].keys", "no key"),
        ("[[tenant]]\nname = 'a:b'\nkey_env = 'X'" + POOL, "$.tenant[0].name", "regex"),
        ("[[tenant]]\nname = 'a'\nkeys = ['sk-plain']" + POOL, "$.tenant[0].keys[0]", "regex"),
        (f"[[tenant]]\nname = 'a'\nkeys = ['{KEY_A}']\nweight = 0" + POOL, "$.tenant[0].weight", ">= 0.001"),
        (f"[[tenant]]\nname = 'a'\nkeys = ['{KEY_A}']\nweight = nan" + POOL, "$.tenant[0].weight", "Expected"),
        (f"[[tenant]]\nname = 'a'\nkeys = ['{KEY_A}']\nclass = 'gold'" + POOL, "$.tenant[0].class", "no class 'gold'"),
        (f"[[tenant]]\nname = 'a'\nkeys = ['{KEY_A}']\nmodels = ['m', 'n']" + POOL, "$.tenant[0].models[1]", "'n'"),
        (f"[[tenant]]\nname = 'a'\nkeys = ['{KEY_A}']\n" * 2 + POOL, "$.tenant[1].name", "is taken"),
        (
            f"[[tenant]]\nname = 'a'\nkeys = ['{KEY_A}']\n[[tenant]]\nname = 'b'\nkeys = ['{KEY_B}', '{KEY_A}']" + POOL,
            "$.tenant[1].keys[1]",
            "is taken by $.tenant[0].keys[0]",
        ),
    ],
)
def test_a_fault_has_its_place(toml: str, path: str, says: str) -> None:
    error = fault(toml)
    assert error.path == path
    assert says in error.message
    assert str(error) == f"{path}: {error.message}"


def test_an_engine_in_this_process_excludes_more_workers() -> None:
    vllm = '[[pool]]\nmodel = "v"\n[[pool.backend]]\nkind = "vllm"\nname = "v"\nmodel = "some/model"\n'
    decode((POOL + vllm).encode())
    error = fault("[server]\nworkers = 2\n" + POOL + vllm)
    assert error.path == "$.pool[1].backend[0].kind"
    assert "2 workers" in error.message


def test_no_toml_says_where() -> None:
    error = fault("[server\nport = 1")
    assert error.path == ""
    assert "line 1" in error.message


def test_not_text_is_an_error_too() -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        decode(b"\xff\xfe")


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load(missing)
    file = tmp_path / "some.toml"
    file.write_text("wat = 1")
    with pytest.raises(ConfigError, match=r"some\.toml: \$\.wat: unknown field"):
        load(file)


def test_aliases_lead_to_their_pool() -> None:
    config = decode(POOL.replace('"m"', '"m"\naliases = ["x"]').encode())
    assert models(config) == {"m": "m", "x": "m"}


def test_one_built_in_code_is_checked_the_same() -> None:
    pool = PoolConfig(model="m", backends=(OpenAI(name="a", url="http://127.0.0.1:1"),) * 2)
    with pytest.raises(ConfigError, match=r"\$\.pool\[0\]\.backend\[1\]\.name: 'a' is taken"):
        check(Config(pools=(pool,)))
