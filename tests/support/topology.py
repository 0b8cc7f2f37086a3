"""Stores of several servers for tests: a primary with a replica and sentinels, and a cluster of three primaries."""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from tests.support.store import binaries

SERVICE = "main"
SLOTS = 16384
PERIODS = ("INFO-PERIOD", "400", "PING-PERIOD", "250", "ASK-PERIOD", "50", "PUBLISH-PERIOD", "50")
"""Of sentinels, in ms. A replica whose INFO is older than five pings is not promoted, and INFO comes once a second;
a primary whose INFO is older than two periods does not get its predecessor for a replica."""

START_TRIES = 5


def wait(condition: Callable[[], Any], limit_s: float = 15.0, what: str = "") -> None:
    """Until it holds; servers that are not there yet count as not."""
    ends = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(redis.ConnectionError, redis.exceptions.ResponseError, redis.TimeoutError):
            if condition():
                return
        assert time.monotonic() < ends, f"not within {limit_s} s: {what or condition}"
        time.sleep(0.01)


def free_ports(count: int) -> list[int]:
    """Ports that were free just now, all different."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class Node:
    """One server on a TCP port of its own. Called with a command's words it answers like redis-cli."""

    def __init__(self, binary: str, settings: Callable[[int, int], list[str]]) -> None:
        """`settings(port, bus port)` are the words of its command line."""
        self.binary = binary
        self.home = Path(tempfile.mkdtemp(prefix="node-test-"))
        self._client: redis.Redis | None = None
        self.process: subprocess.Popen[bytes] | None = None
        for left in reversed(range(START_TRIES)):
            self.port, bus = free_ports(2)
            self._words = settings(self.port, bus)
            try:
                self.start()
                return
            except RuntimeError:  # another took the port meanwhile
                if not left:
                    raise

    def __call__(self, *words: Any) -> Any:
        if self._client is None:
            self._client = redis.Redis(
                "127.0.0.1", self.port, single_connection_client=True, protocol=2, socket_timeout=2.0
            )
            self._client.response_callbacks.clear()  # answers as they come
        try:
            return self._client.execute_command(*words)
        except redis.ConnectionError:
            self.disconnect()
            raise

    def start(self) -> None:
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.binary, *self._words, "--bind", "127.0.0.1", "--loglevel", "notice", "--dir", str(self.home)],
                stdout=log,
            )
        for _ in range(1000):
            if self.process.poll() is not None:
                raise RuntimeError((self.home / "log").read_text()[-2000:])
            with contextlib.suppress(redis.ConnectionError):
                if self("PING"):
                    return
            time.sleep(0.01)
        raise RuntimeError(f"{self.binary} did not start")

    def disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def kill(self) -> None:
        """As kill -9 does."""
        self.disconnect()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def scores(self, key: bytes) -> list[tuple[bytes, float]]:
        """A sorted set, in order."""
        flat = self("ZRANGE", key, 0, -1, "WITHSCORES")
        return [(member, float(score)) for member, score in zip(flat[::2], flat[1::2], strict=True)]

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)


def _data(port: int, _: int) -> list[str]:
    return ["--port", str(port), "--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"]


class Watched:
    """A primary, a replica, and three sentinels that fail over within about a second."""

    def __init__(self, binary: str) -> None:
        self._open: list[Node] = []
        try:
            self._build(binary)
        except BaseException:
            self.close()
            raise

    def _build(self, binary: str) -> None:
        self.primary, self.replica = self._node(binary, _data), self._node(binary, _data)
        self.replica("REPLICAOF", "127.0.0.1", str(self.primary.port))
        wait(lambda: b"online" in self.primary("INFO", "replication"), what="a replica")
        self.sentinels = [self._node(binary, self._sentinel) for _ in range(3)]
        for one in self.sentinels:
            one("SENTINEL", "DEBUG", *PERIODS)
        wait(lambda: all(self._ready(one) for one in self.sentinels), what="sentinels that know each other")
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels)
        self.url = f"redis+sentinel://{hosts}/{SERVICE}"

    def _node(self, binary: str, settings: Callable[[int, int], list[str]]) -> Node:
        node = Node(binary, settings)
        self._open.append(node)
        return node

    def _sentinel(self, port: int, _: int) -> list[str]:
        file = Path(tempfile.mkdtemp(prefix="node-test-")) / "sentinel.conf"
        file.write_text(
            f"port {port}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary.port} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} 800\n"
            f"sentinel failover-timeout {SERVICE} 1500\n"
        )
        self._files = [*getattr(self, "_files", []), file.parent]
        return [str(file), "--sentinel"]

    def _ready(self, sentinel: Node) -> bool:
        pairs = sentinel("SENTINEL", "MASTER", SERVICE)
        facts = dict(zip(pairs[::2], pairs[1::2], strict=True))
        return int(facts[b"num-other-sentinels"]) == 2 and int(facts[b"num-slaves"]) == 1

    def promoted(self) -> bool:
        """Whether the replica is the primary now, and all sentinels say so."""
        said = [one("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE) for one in self.sentinels]
        return b"role:master" in self.replica("INFO", "replication") and all(
            int(address[1]) == self.replica.port for address in said
        )

    def close(self) -> None:
        for node in self._open:
            node.close()
        for folder in getattr(self, "_files", []):
            shutil.rmtree(folder, ignore_errors=True)


def _clustered(port: int, bus: int) -> list[str]:
    return [
        *("--port", str(port), "--cluster-enabled", "yes", "--cluster-port", str(bus)),
        *("--cluster-node-timeout", "1000", "--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"),
    ]  # fmt: skip


class Clustered:
    """Three primaries and a replica of the one that owns the queue's slot, `owner`."""

    def __init__(self, binary: str, namespace: str = "signalbox") -> None:
        self.slot = key_slot(f"{{{namespace}}}:".encode())
        self._open: list[Node] = []
        try:
            self._build(binary)
        except BaseException:
            self.close()
            raise

    def _build(self, binary: str) -> None:
        for _ in range(4):
            self._open.append(Node(binary, _clustered))
        *primaries, self.replica = self._open
        bounds = [0, 5461, 10923, SLOTS]
        for node, (first, after) in zip(primaries, itertools.pairwise(bounds), strict=True):
            node("CLUSTER", "ADDSLOTSRANGE", first, after - 1)
            if first <= self.slot < after:
                self.owner = node
        self.others = [node for node in primaries if node is not self.owner]
        for node in self._open[1:]:
            bus = self._open[0]._words[self._open[0]._words.index("--cluster-port") + 1]
            node("CLUSTER", "MEET", "127.0.0.1", self._open[0].port, bus)
        wait(lambda: all(self._knows(node, 4) for node in self._open), what="a cluster that knows itself")
        self.replica("CLUSTER", "REPLICATE", self.id_of(self.owner))
        wait(lambda: b"online" in self.owner("INFO", "replication"), what="a replica")
        wait(lambda: all(b"cluster_state:ok" in node("CLUSTER", "INFO") for node in self._open), what="a whole cluster")
        wait(lambda: all(self._replicas(node) == 1 for node in self._open), what="word of the replica")
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in primaries)

    def id_of(self, node: Node) -> str:
        return str(node("CLUSTER", "MYID"), "ascii")

    def owns(self, node: Node) -> bool:
        """Whether this node takes itself for the owner of the queue's slot."""
        ranges = node("CLUSTER", "SLOTS")
        return any(first <= self.slot <= last and primary[1] == node.port for first, last, primary, *_ in ranges)

    def move(self, source: Node, target: Node) -> Iterator[str]:
        """Move the queue's slot with its keys, step by step, as redis-cli does; yields what comes next."""
        yield "open"
        target("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.id_of(source))
        source("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.id_of(target))
        yield "keys"
        while keys := source("CLUSTER", "GETKEYSINSLOT", self.slot, 10):
            source("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        yield "close"
        for node in (target, source, *(one for one in self._open if one not in {target, source, self.replica})):
            node("CLUSTER", "SETSLOT", self.slot, "NODE", self.id_of(target))

    def _knows(self, node: Node, count: int) -> bool:
        return f"cluster_known_nodes:{count}".encode() in node("CLUSTER", "INFO")

    def _replicas(self, node: Node) -> int:
        return int(node("CLUSTER", "NODES").count(b"slave"))

    def close(self) -> None:
        for node in self._open:
            node.close()


def _binary(kind: str) -> str:
    found = binaries()[kind]
    if found is None:
        pytest.skip(f"no {kind}-server here: not on PATH, not packaged, not in SIGNALBOX_TEST_STORES")
    return found


@pytest.fixture(params=["valkey", "redis"])
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    site = Watched(_binary(request.param))
    yield site
    site.close()


@pytest.fixture(params=["valkey", "redis"])
def clustered(request: pytest.FixtureRequest) -> Iterator[Clustered]:
    site = Clustered(_binary(request.param))
    yield site
    site.close()
