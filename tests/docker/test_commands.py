"""The commands that the images and the compose file start, run here: the same words, other ports and folders."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from tests.docker.files import DOCKER, ROOT, argv, compose, stages
from tests.support import store as stores
from tests.support.process import Gateway, gateway, until

SERVICES = compose()["services"]
KEY = "sk-of-this-test"


@contextmanager
def store(folder: Path) -> Iterator[str]:
    """The compose file's Redis, on a unix socket."""
    binary = stores.binaries()["redis"] or stores.binaries()["valkey"]
    if binary is None:
        pytest.skip("there is neither redis-server nor valkey-server here")
    words = SERVICES["redis"]["command"]
    assert words[0] == "redis-server"
    path = folder / "s"
    with subprocess.Popen(
        [binary, *words[1:], "--port", "0", "--unixsocket", str(path), "--dir", str(folder)], stdout=subprocess.DEVNULL
    ) as process:
        try:
            until(path.exists, 10)
            yield f"unix://{path}"
        finally:
            process.kill()


@contextmanager
def as_in_the_image(folder: Path, image: str) -> Iterator[Gateway]:
    """What the image runs, with the compose file's configuration, before the compose file's Redis."""
    words = [*argv(stages()[image], "ENTRYPOINT"), *argv(stages()[image], "CMD")]
    assert words[:2] == ["signalbox", "serve"]
    mounted = dict(volume.split(":")[1::-1] for volume in SERVICES["gateway"]["volumes"])
    home = folder / "store"
    home.mkdir()
    with store(home) as url:
        text = (DOCKER / mounted["/etc/signalbox/config.toml"]).read_text()
        text = text.replace("redis://redis:6379", url).replace("grpc://jaeger:4317", "grpc://127.0.0.1:1")
        (folder / "config.toml").write_text(text)
        options = [word.replace("/etc/signalbox/config.toml", str(folder / "config.toml")) for word in words[2:]]
        (name,) = SERVICES["gateway"]["environment"]
        with gateway(folder / "gateway", *options, environ={name: KEY}) as one:
            one.url = re.sub(r"//[^:]+:", "//127.0.0.1:", one.url)
            yield one


@pytest.mark.timeout(90)
def test_the_gateway_comes_up_as_in_the_compose_file(tmp_path: Path) -> None:
    with as_in_the_image(tmp_path, SERVICES["gateway"]["build"]["target"]) as one:
        hello = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        assert one.ask("/v1/chat/completions", hello, KEY)["usage"]["completion_tokens"] == 3
        assert one.status("/metrics") == 200
        workers = [child for child in one.process.children() if "gateway.workers" in child.cmdline()]
        assert len(workers) == 2
        check = argv(stages()["slim"], "HEALTHCHECK")
        assert check[0] == "python"
        port = one.url.rpartition(":")[2]
        words = [sys.executable, *(word.replace(":8080", f":{port}") for word in check[1:])]
        assert subprocess.run(words, capture_output=True, check=False).returncode == 0
        assert one.stop() == 0
        assert subprocess.run(words, capture_output=True, check=False).returncode != 0


def test_without_the_key_it_says_what_is_missing(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gateway", "check", "--config", str(DOCKER / "config.toml")]
    environ = {name: value for name, value in os.environ.items() if name != "SIGNALBOX_KEY"}
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "SIGNALBOX_KEY" in done.stderr


def test_the_store_is_one_that_the_queue_can_use(tmp_path: Path) -> None:
    with store(tmp_path) as url:
        client = redis.Redis(unix_socket_path=url.removeprefix("unix://"))
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert client.config_get("appendonly")["appendonly"] == "yes"
        client.close()
    assert SERVICES["redis"]["healthcheck"]["test"] == ["CMD", "redis-cli", "ping"]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not here: it is a Debian package")
def test_prometheus_takes_its_options(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = [
            word.replace("/etc/prometheus", str(DOCKER / "prometheus")) for word in SERVICES["prometheus"]["command"]
        ]
        words = [word.replace("=/prometheus", f"={tmp_path}") for word in words]
        command = ["prometheus", *words, f"--web.listen-address=127.0.0.1:{port}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20, cwd=tmp_path)
    assert done.returncode == 1
    assert "address already in use" in done.stderr, "it got as far as its port"
