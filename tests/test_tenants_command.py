"""`signalbox tenants` against a gateway in a process of its own, with two workers."""

import json
import re
import socket
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.cli import main
from tests.support.process import ROOT, Gateway, gateway, until

CERTS = ROOT / "tests" / "support" / "certs"
TOML = f"""
[server]
host = "localhost"
workers = 2
admin_key_env = "TEST_ADMIN_KEY"
tls_cert_file = "{CERTS}/server.pem"
tls_key_file = "{CERTS}/server.pem"
[[pool]]
model = "demo"
[[pool.backend]]
kind = "simulated"
name = "one"
"""
ADMIN_KEY = "the admin's"
HELLO: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    home = tmp_path_factory.mktemp("served")
    (home / "c.toml").write_text(TOML)
    environ = {"TEST_ADMIN_KEY": ADMIN_KEY}
    with gateway(home, "--config", str(home / "c.toml"), environ=environ, ca_file=CERTS / "ca.pem") as one:
        yield one


def test_the_greeting_does_without_a_tenant(served: Gateway) -> None:
    assert "-H 'Authorization: Bearer KEY'" in served.out


class Command:
    """Runs `signalbox tenants` in this process; `out` and `err` are what the last call said."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url, self._capsys = url, capsys
        self.out = self.err = ""

    def __call__(self, *words: str) -> int:
        code = main(["tenants", *words, "--url", self.url, "--ca-file", str(CERTS / "ca.pem")])
        self.out, self.err = self._capsys.readouterr()
        assert len(self.err.splitlines()) <= 1
        return code

    def json(self, *words: str) -> Any:
        assert self(*words, "--json") == 0
        return json.loads(self.out)


@pytest.fixture
def tenants(served: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    monkeypatch.setenv("SIGNALBOX_ADMIN_KEY", ADMIN_KEY)
    command = Command(served.url, capsys)
    yield command
    for one in command.json("list")["data"]:
        assert command("remove", one["name"]) == 0


def opens(served: Gateway, key: str) -> bool:
    try:
        served.ask("/v1/chat/completions", HELLO, key)
    except urllib.error.HTTPError as error:
        assert error.code == 401
        return False
    return True


def settled(served: Gateway, key: str, *, good: bool) -> None:
    """Both workers, whichever answers: a few connections in a row say the same."""
    until(lambda: all(opens(served, key) is good for _ in range(8)), 5.0)


def made(command: Command, *words: str) -> tuple[str, str]:
    """Key and id that a call printed."""
    assert command(*words) == 0, command.err
    found = re.fullmatch(r"key: (sk-\S{43})   \(shown only now\)\nid:  (key_[0-9a-f]{16})\n", command.out)
    assert found, command.out
    return found[1], found[2]


def test_a_tenant_from_its_making_to_its_end(served: Gateway, tenants: Command) -> None:
    assert tenants("list") == 0
    assert len(tenants.out.splitlines()) == 1
    options = ("--weight", "2.5", "--class", "standard", "--model", "demo", "--tokens-per-min", "1000")
    assert tenants("add", "bob", *options) == 0
    head, line = tenants.out.splitlines()
    assert head.split() == [
        "name", "source", "keys", "weight", "class", "models",
        "requests_per_min", "tokens_per_min", "tokens_in_flight", "max_queued",
    ]  # fmt: skip
    assert line.split() == ["bob", "store", "0", "2.5", "standard", "demo", "-", "1000", "-", "-"]
    assert tenants("set", "bob", "--class", "", "--all-models", "--max-queued", "3") == 0
    assert tenants.out.splitlines()[1].split() == ["bob", "store", "0", "2.5", "-", "all", "-", "1000", "-", "3"]
    key, key_id = made(tenants, "new-key", "bob", "--label", "for ci", "--expires-in-s", "1000")
    settled(served, key, good=True)
    assert tenants("keys", "bob") == 0
    assert re.search(
        rf"^{key_id}  good   store   for ci  (\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ  ){{2}}-$", tenants.out, re.M
    )
    newer, newer_id = made(tenants, "rotate", "bob", key_id, "--grace-s", "1000")
    settled(served, newer, good=True)
    settled(served, key, good=True)
    assert tenants("revoke", "bob", key_id) == 0
    assert tenants.out == f"revoked {key_id} of bob\n"
    settled(served, key, good=False)
    assert {one["id"]: one["state"] for one in tenants.json("keys", "bob")["data"]} == {
        key_id: "revoked",
        newer_id: "good",
    }
    assert tenants("remove", "bob") == 0
    assert tenants.out == "removed bob and its keys\n"
    settled(served, newer, good=False)


def test_json_is_the_gateways_answer(tenants: Command) -> None:
    assert tenants.json("add", "bob", "--weight", "2")["weight"] == 2
    assert tenants.json("set", "bob", "--requests-per-min", "5")["requests_per_min"] == 5
    key = tenants.json("new-key", "bob")
    assert key["key"].startswith("sk-")
    assert tenants.json("revoke", "bob", key["id"]) == {}
    assert [one["name"] for one in tenants.json("list")["data"]] == ["bob"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("remove", "nobody"), "there is no tenant 'nobody' (not_found)"),
        (("add", "b", "--weight", "0"), "weight: Expected `float` >= 0.001 (invalid_request)"),
        (("add", "b", "--model", "x"), "models[0]: there is no model 'x'; there is demo (invalid_request)"),
        (("set", "..", "--weight", "1"), "there is no tenant '..' (not_found)"),
        (("revoke", "a/b?c#d", "%2e"), "there is no DELETE /admin/tenants/a/b?c"),
    ],
)
def test_what_the_gateway_refuses_is_one_line(tenants: Command, words: tuple[str, ...], says: str) -> None:
    assert tenants(*words) == 1
    assert tenants.err.startswith(f"signalbox: {says}")
    assert tenants.out == ""


def test_a_wrong_command_is_told_from_a_refusal(
    tenants: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tenants("set", "bob") == 2
    assert tenants.err == "signalbox: tenants set: say what to change\n"
    with monkeypatch.context() as without:
        without.delenv("SIGNALBOX_ADMIN_KEY")
        assert tenants("list") == 2
        assert "--admin-key-env: the environment variable SIGNALBOX_ADMIN_KEY is not set" in tenants.err
        without.setenv("OTHER", "wrong")
        assert tenants("list", "--admin-key-env", "OTHER") == 1
        assert "an admin key is needed" in tenants.err
    assert main(["tenants", "list", "--url", tenants.url, "--ca-file", "no-such-file"]) == 2
    assert "--ca-file: no-such-file can't be loaded" in capsys.readouterr().err
    for words in ([], ["fly"], ["rotate", "bob"], ["add", "bob", "--weight", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(["tenants", *words])
        assert caught.value.code == 2
        assert "usage: signalbox tenants" in capsys.readouterr().err


def test_a_gateway_that_is_not_there_is_one_line(tenants: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", "nonsense", f"{tenants.url}/v2"):
        assert main(["tenants", "list", "--url", url]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"signalbox: {url} ") or "there is no GET" in line
