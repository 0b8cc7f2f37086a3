"""A real Prometheus scrapes two workers, evaluates the rules of docker/ and finds its numbers."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.files import DOCKER, compose
from tests.support.process import gateway, until

BINARY = shutil.which("prometheus")
POOL = """
[[pool]]
model = "m"
[[pool.backend]]
kind = "simulated"
name = "one"
a0_ms = 1.0
"""
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(BINARY is None, reason="prometheus is not here: it is a Debian package of that name"),
]


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **query: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=5) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def value(self, query: str) -> float | None:
        found = self.get("/api/v1/query", query=query)
        return float(found["result"][0]["value"][1]) if found and found["result"] else None


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """As the compose file starts it, on another port and with less patience."""
    shutil.copytree(DOCKER / "prometheus", folder / "etc")
    settings = yaml.safe_load((folder / "etc" / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = [job for job in settings["scrape_configs"] if job["job_name"] == "signalbox"]
    job["static_configs"] = [{"targets": [target]}]
    settings["scrape_configs"] = [job]
    (folder / "etc" / "prometheus.yml").write_text(yaml.safe_dump(settings))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [
        word.replace("/etc/prometheus", str(folder / "etc")) for word in compose()["services"]["prometheus"]["command"]
    ]
    words = [word.replace("=/prometheus", f"={folder / 'data'}") for word in words]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(BINARY), *words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log, cwd=folder
        )
    try:
        one = Prometheus(f"http://127.0.0.1:{port}")
        until(lambda: one.get("/api/v1/status/runtimeinfo") is not None, 30, (folder / "log").read_text)
        yield one
    finally:
        process.kill()
        process.wait()


def test_two_workers_are_scraped_and_the_rules_evaluate(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(POOL)
    with (
        gateway(tmp_path / "g", "--workers", "2", "--config", str(tmp_path / "c.toml")) as one,
        prometheus(tmp_path, one.url.removeprefix("http://")) as server,
    ):
        story = (tmp_path / "log").read_text
        until(lambda: server.value('up{job="signalbox"}') == 1, 30, story)
        asked = 0
        ends = time.monotonic() + 60
        while not server.value("model_class:signalbox_requests:rate5m") and time.monotonic() < ends:
            one.ask("/v1/chat/completions", HELLO | {"stream": False})
            asked += 1
        until(lambda: server.value('signalbox_requests_total{reason="ok"}') == asked, 30, story)
        until(lambda: server.value("signalbox_workers") == 2, 30, story)
        until(lambda: server.value("signalbox_queue_processes") == 2, 30, story)
        assert server.value("sum(gen_ai_client_token_usage_sum{gen_ai_token_type='output'})") == 5 * asked
        assert server.value("model_class:signalbox_goodput:ratio_rate5m") == pytest.approx(1, abs=0.01)
        (target,) = server.get("/api/v1/targets")["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")
        rules = [rule for group in server.get("/api/v1/rules")["groups"] for rule in group["rules"]]
        assert len(rules) > 30
        assert {rule["health"] for rule in rules} == {"ok"}, [rule.get("lastError") for rule in rules]
        firing = [rule["name"] for rule in rules if rule["type"] == "alerting" and rule["state"] == "firing"]
        assert firing == []
        metadata = server.get("/api/v1/metadata", metric="gen_ai_server_time_to_first_token_seconds")
        assert metadata["gen_ai_server_time_to_first_token_seconds"][0]["type"] == "histogram"
