"""The command line, mostly as an operator meets it: in processes of its own."""

import json
import logging
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from gateway import __version__
from gateway.cli import check_reach, main
from gateway.config import Config, ConfigError, decode
from gateway.serving import ListenError, check_tls, is_loopback, listen
from gateway.telemetry.logs import JsonLines
from gateway.tenants import Tenants, hash_key
from tests.support.process import ROOT, Gateway, gateway, until
from tests.support.store import StoreServer, shared_server

__all__ = ["shared_server"]

SHIPPED = ROOT / "config.toml"
POOL = '[[pool]]\nmodel = "m"\n[[pool.backend]]\nkind = "simulated"\nname = "one"\n'
HELLO: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5}


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands that run in this process set up its logging."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def configured(file: Path, toml: str) -> list[str]:
    file.write_text(toml)
    return ["--config", str(file)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"signalbox {__version__}\n"


def test_a_key_comes_with_its_line_for_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "carol"]) == 0
    out = capsys.readouterr().out
    key = re.search(r"sk-\S+", out)
    assert key
    tenant = Tenants(decode(f"[[tenant]]\nname = 'carol'\nkeys = ['{hash_key(key[0])}']\n{POOL}".encode()))
    assert hash_key(key[0]) in out
    assert tenant.of_key(key[0].encode()) is not None


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("wat = 1", r"c\.toml: \$\.wat: unknown field"),
        (POOL + 'speed = "x"', r"\$\.pool\[0\]\.backend\[0\]\.speed: Expected `float`, got `str`"),
        ("[[tenant]]\nname = 'a'\nkey_env = 'SIGNALBOX_TEST_NO_SUCH'\n" + POOL, r"\$\.tenant\[0\]\.key_env: "),
        ("[server]\ntls_cert_file = 'no'\ntls_key_file = 'no'\n" + POOL, r"\$\.server\.tls_cert_file: can't be loaded"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_wrong_configuration_is_one_line(
    command: str, toml: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *configured(tmp_path / "c.toml", toml)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"signalbox: ", error)
    assert re.search(says, error)


def test_no_configuration_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve"]) == 2
    assert "there is no config.toml here: give --config FILE, or serve --upstream URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--port", "70000"], "port"), (["--workers", "0"], "workers"), (["--host", ""], "host")]
)
def test_the_command_line_is_checked_like_the_file(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--config", str(SHIPPED), *arguments]) == 2
    assert f"$.{says}" in capsys.readouterr().err


def test_a_taken_port_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--config", str(SHIPPED), "--port", str(port)]) == 1
    assert capsys.readouterr().err == f"signalbox: can't listen on 127.0.0.1:{port}: Address already in use\n"


def test_an_upstream_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["serve", "--upstream", f"http://127.0.0.1:{port}"]) == 2
    assert f"signalbox: http://127.0.0.1:{port} can't be asked for its models" in capsys.readouterr().err


def test_an_upstream_that_is_no_url_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--upstream", "ftp://x"]) == 2
    assert "signalbox: --upstream ftp://x: url" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_these_are_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_these_are_not(host: str) -> None:
    assert not is_loopback(host)


def reach(toml: str, host: str, *, allow_open: bool = False) -> None:
    config = decode(f"[server]\nhost = '{host}'\n{toml}{POOL}".encode())
    check_reach(config, Tenants(config), allow_open=allow_open)


def test_without_tenants_others_are_kept_out_unless_asked_in() -> None:
    reach("", "127.0.0.1")
    reach("", "0.0.0.0", allow_open=True)
    with pytest.raises(ConfigError, match=r"\$\.server\.host: .*no tenants.*--allow-open"):
        reach("", "0.0.0.0")


def test_a_demo_key_never_leaves_the_machine() -> None:
    demo = f"[[tenant]]\nname = 'a'\nkeys = ['{hash_key('sk-demo-alice')}']\n"
    reach(demo, "::1")
    for allow_open in (False, True):
        with pytest.raises(ConfigError, match="demo keys"):
            reach(demo, "0.0.0.0", allow_open=allow_open)
    reach(demo.replace(hash_key("sk-demo-alice"), hash_key("own")), "0.0.0.0")


def test_listening_on_nonsense_is_an_error_of_ours() -> None:
    config = decode(f"[server]\nhost = 'no.such.host.invalid'\n{POOL}".encode())
    with pytest.raises(ListenError, match=r"can't listen on no\.such\.host\.invalid:8080"):
        listen(config.server)


def test_without_files_there_is_no_tls_to_check() -> None:
    check_tls(Config().server)


def log_line(**record: object) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(JsonLines().format(logging.makeLogRecord({"name": "some.where", **record})))
    return line


def test_a_log_line_is_json() -> None:
    line = log_line(levelname="INFO", msg="hello %s\nthere", args=("you",), tenant="alice", path=Path("x"))
    assert (line["level"], line["logger"], line["message"]) == ("info", "some.where", "hello you\nthere")
    assert (line["tenant"], line["path"]) == ("alice", "x")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])


def test_a_log_line_carries_the_traceback() -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        line = log_line(msg="it failed", exc_info=sys.exc_info())
    assert line["message"] == "it failed"
    assert "ValueError: boom" in line["exception"]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """The shipped configuration, served."""
    with gateway(tmp_path_factory.mktemp("shipped"), "--config", str(SHIPPED)) as one:
        yield one


def test_the_greeting_is_true(shipped: Gateway) -> None:
    assert f"curl -N {shipped.url}/v1/chat/completions" in shipped.out
    assert "Authorization: Bearer sk-demo-alice" in shipped.out
    assert "demo (also gpt-4o-mini): fast (simulated), slow (simulated)" in shipped.out
    body = re.search(r"-d '(.*)'", shipped.out)
    assert body
    answer = shipped.ask(
        "/v1/chat/completions", json.loads(body[1]) | {"stream": False, "max_tokens": 3}, "sk-demo-alice"
    )
    assert answer["usage"]["completion_tokens"] == 3


def test_the_sdk_is_served(shipped: Gateway) -> None:
    with openai.OpenAI(base_url=f"{shipped.url}/v1", api_key="sk-demo-bob") as client:
        assert [model.id for model in client.models.list()] == ["demo", "gpt-4o-mini"]
        whole = client.chat.completions.create(model="demo", messages=HELLO["messages"], max_tokens=5)
        stream = client.chat.completions.create(
            model="gpt-4o-mini", messages=HELLO["messages"], max_tokens=5, stream=True
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert whole.choices[0].message.content == streamed != ""


def readme_block(language: str, holding: str, url: str) -> str:
    """The README's first code block of a language that holds a word, for a gateway at another address."""
    blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if holding in block).replace("http://127.0.0.1:8080", url)


def test_the_readmes_python_works(shipped: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(readme_block("python", "OpenAI", shipped.url), names)
    names["client"].close()
    assert len(capsys.readouterr().out.split()) > 10


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_readmes_curl_works(shipped: Gateway) -> None:
    block = readme_block("sh", "curl", shipped.url)
    done = subprocess.run(["sh", "-ec", block], check=True, capture_output=True, text=True, timeout=25)
    assert done.stdout.startswith("data: {")
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_a_stranger_is_turned_away(shipped: Gateway) -> None:
    for key in ("", "sk-demo-eve"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            shipped.ask("/v1/chat/completions", HELLO, key)
        assert caught.value.code == 401
        caught.value.close()


def test_upstreams_need_no_configuration(shipped: Gateway, tmp_path: Path) -> None:
    key = {"UPSTREAM_KEY": "sk-demo-alice"}
    arguments = ["--upstream", shipped.url, "--upstream", f"{shipped.url}/v1/", "--upstream-key-env", "UPSTREAM_KEY"]
    with gateway(tmp_path / "front", *arguments, environ=key) as front:
        assert "demo: 127.0.0.1-0 (openai)" in front.out
        assert "Bearer" not in front.out
        answer = front.ask("/v1/chat/completions", HELLO)
        direct = shipped.ask("/v1/chat/completions", HELLO, "sk-demo-alice")
        assert answer["choices"] == direct["choices"]
        assert front.stop() == 0


def test_check_tells_what_is_there(shipped: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", str(SHIPPED)]) == 0
    out = capsys.readouterr().out
    assert "1 pools, 3 classes, 2 tenants" in out
    assert re.search(r"store +embedded (valkey|redis) \d+\.\d+", out)
    assert re.search(r"demo +fast +simulated +simulated 1 +demo seed-0 +8,192 +64 +200,000 +8,000\n", out)
    dead = POOL + '[[pool.backend]]\nkind = "openai"\nname = "dead"\nurl = "http://127.0.0.1:9"\n'
    assert main(["check", *configured(tmp_path / "c.toml", dead)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"m +one +simulated .*\d\n", out)
    assert re.search(r"m +dead +openai.* NOT WELL: .*127\.0\.0\.1:9", out)


@pytest.mark.parametrize("shared_server", ["redis"], indirect=True)
def test_check_says_how_a_store_is_kept(
    shared_server: StoreServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shared_server.socket
    store = f"[store]\nurl = 'unix://default:secret@{path}'\non_loss = 'local'\n"
    assert main(["check", *configured(tmp_path / "c.toml", store + POOL)]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"store +unix://{path} (valkey|redis) \d.* at {path}\n +appendonly no, .*set appendonly yes", out)
    assert "secret" not in out


def test_check_notices_a_store_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = f"[store]\nurl = 'unix://{tmp_path}/none.sock'\n"
    assert main(["check", *configured(tmp_path / "c.toml", store + POOL)]) == 1
    assert re.search(r"store .*none\.sock +NOT WELL: ", capsys.readouterr().out)


def test_serving_without_its_store_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = f"[server]\nport = 0\n[store]\nurl = 'unix://{tmp_path}/none.sock'\n"
    assert main(["serve", *configured(tmp_path / "c.toml", store + POOL)]) == 1
    assert re.match(r"signalbox: store\.url: ", capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_everything_it_started(signum: signal.Signals, tmp_path: Path) -> None:
    with gateway(tmp_path, *configured(tmp_path / "c.toml", POOL)) as one:
        family = one.descendants()
        assert any("server" in process.name() for process in family)
        assert one.stop(signum) == 0
        until(lambda: not alive(family), 5)
        assert "exception" not in one.log


def test_a_drain_refuses_new_work_and_lets_streams_finish(tmp_path: Path) -> None:
    with gateway(tmp_path, *configured(tmp_path / "c.toml", POOL)) as one:
        body = HELLO | {"model": "m", "max_tokens": 80, "stream": True}
        stream = one.post("/v1/chat/completions", body)
        assert stream.readline().startswith(b"data: ")
        one.process.terminate()
        until(lambda: one.status("/readyz") == 503, 5)
        with pytest.raises(urllib.error.HTTPError) as caught:
            one.ask("/v1/chat/completions", HELLO | {"model": "m"})
        assert caught.value.code == 503
        assert caught.value.headers["x-signalbox-reason"] == "draining"
        caught.value.close()
        assert stream.read().endswith(b"data: [DONE]\n\n")
        stream.close()
        assert one.process.wait(10) == 0


def test_it_speaks_tls(tmp_path: Path) -> None:
    certs = ROOT / "tests" / "support" / "certs"
    toml = f"[server]\nhost = 'localhost'\ntls_cert_file = '{certs}/server.pem'\ntls_key_file = '{certs}/server.pem'\n"
    with gateway(tmp_path, *configured(tmp_path / "c.toml", toml + POOL), ca_file=certs / "ca.pem") as one:
        assert one.url.startswith("https://localhost:")
        assert one.ask("/v1/chat/completions", HELLO | {"model": "m"})["usage"]["completion_tokens"] == 5


def test_kill_9_leaves_no_store(tmp_path: Path) -> None:
    with gateway(tmp_path, *configured(tmp_path / "c.toml", POOL)) as one:
        family = one.descendants()
        assert family
        one.stop(signal.SIGKILL)
        until(lambda: not alive(family), 5)


def test_a_slow_head_is_cut_off(tmp_path: Path) -> None:
    toml = "[server]\nheader_s = 0.3\n" + POOL
    with gateway(tmp_path, *configured(tmp_path / "c.toml", toml)) as one:
        port = int(one.url.rpartition(":")[2])
        for sent in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                client.sendall(sent)
                assert client.recv(100) == b""


def workers_of(one: Gateway) -> list[psutil.Process]:
    return [process for process in one.process.children() if "gateway.workers" in process.cmdline()]


def test_workers_share_the_port_and_a_dead_one_comes_back(tmp_path: Path) -> None:
    with gateway(tmp_path, "--workers", "2", *configured(tmp_path / "c.toml", POOL)) as one:
        before = workers_of(one)
        assert len(before) == 2
        before[0].kill()
        until(lambda: "it starts again" in one.log and len(workers_of(one)) == 2, 10, lambda: one.log)
        until(lambda: one.status("/readyz") == 200, 10, lambda: one.log)
        assert one.ask("/v1/chat/completions", HELLO | {"model": "m"})["usage"]["completion_tokens"] == 5
        family = one.descendants()
        assert one.stop() == 0
        until(lambda: not alive(family), 5)


def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    with gateway(tmp_path, "--workers", "2", *configured(tmp_path / "c.toml", POOL)) as one:
        family = one.descendants()
        assert len(family) == 3
        one.stop(signal.SIGKILL)
        until(lambda: not alive(family), 5, lambda: one.log)


def test_workers_that_can_not_start_stop_the_parent(tmp_path: Path) -> None:
    store = f"[store]\nurl = 'unix://{tmp_path}/none.sock'\n"
    one = Gateway(["--workers", "2", *configured(tmp_path / "c.toml", store + POOL)], tmp_path)
    assert one.process.wait(20) == 1
    assert "store.url" in one.log
    assert "Traceback" not in one.log
    assert "Signalbox serves" not in one.out
