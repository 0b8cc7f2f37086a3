"""The gateway's own process runs short, stands still, or is killed with what it serves."""

import http.client
import resource
import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support.process import gateway, until

CONFIG = """
[[pool]]
model = "demo"
[[pool.backend]]
kind = "simulated"
name = "one"
a0_ms = 5.0
limits = { max_running = 4 }
"""
BODY = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "c.toml"
    path.write_text(CONFIG)
    return str(path)


def asks_over(line: http.client.HTTPConnection) -> int:
    """The status of a request over a connection that is open already."""
    body = b'{"model":"demo","messages":[{"role":"user","content":"Hi"}],"max_tokens":1}'
    line.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    answer = line.getresponse()
    answer.read()
    return answer.status


def test_without_file_descriptors_open_connections_are_served_and_new_ones_later(config: str, tmp_path: Path) -> None:
    with gateway(tmp_path / "g", "--config", config) as one:
        where = urlsplit(one.url)
        assert where.hostname
        assert where.port
        line = http.client.HTTPConnection(where.hostname, where.port, timeout=20)
        assert asks_over(line) == 200
        pid = one.process.pid
        spare = len(list(Path(f"/proc/{pid}/fd").iterdir())) + 10
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (spare, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
        flood = [socket.create_connection((where.hostname, where.port), timeout=20) for _ in range(60)]
        assert [asks_over(line) for _ in range(5)] == [200] * 5
        for each in flood:
            each.close()
        until(lambda: one.status("/livez") == 200, 20, lambda: one.log)
        assert one.ask("/v1/chat/completions", BODY)["usage"]["completion_tokens"] == 2
        line.close()
        assert one.stop() == 0


def test_a_process_that_stood_still_goes_on(config: str, tmp_path: Path) -> None:
    """As after a suspended virtual machine: what it held was given back meanwhile, and it declares itself again."""
    with gateway(tmp_path / "g", "--config", config) as one:
        assert one.ask("/v1/chat/completions", BODY)["usage"]["completion_tokens"] == 2
        family = [one.process, *one.descendants()]
        for process in family:
            process.send_signal(signal.SIGSTOP)
        time.sleep(7)  # longer than what a process is taken for dead after
        for process in reversed(family):
            process.send_signal(signal.SIGCONT)
        until(lambda: one.status("/readyz") == 200, 20, lambda: one.log)
        assert one.ask("/v1/chat/completions", BODY)["usage"]["completion_tokens"] == 2
        assert one.stop() == 0


def test_a_killed_worker_is_replaced_while_the_other_serves(config: str, tmp_path: Path) -> None:
    """As the kernel does to the largest process when memory is short."""
    with gateway(tmp_path / "g", "--config", config, "--workers", "2") as one:

        def workers() -> list[psutil.Process]:
            return [each for each in one.process.children() if "gateway.workers" in each.cmdline()]

        until(lambda: len(workers()) >= 2, 20, lambda: one.log)
        killed = workers()[0]
        killed.kill()
        psutil.wait_procs([killed], timeout=10)
        for _ in range(5):
            assert one.ask("/v1/chat/completions", BODY)["usage"]["completion_tokens"] == 2
        until(lambda: len([each for each in workers() if each.pid != killed.pid]) >= 2, 20, lambda: one.log)
        assert one.stop() == 0
