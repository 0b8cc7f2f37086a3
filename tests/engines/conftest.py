"""One tiny model, and few engine starts: each takes half a minute. The order of the files is part of that.

`engine` has a tool parser like the server it is compared with; `plain` has none, and is started where a test needs an
engine that comes up after the first one was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from blockbuster import BlockBuster

from backends.vllm import Vllm

if TYPE_CHECKING:
    from backends.vllm_engine import InProcess

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / ".models" / "tiny"
START_S = 300.0
CHUNK = 256
"""Tokens of one prefill step of `plain`. Not less: vLLM 0.32 on a CPU dies of a seeded request in two chunks."""

PATIENCE_S = 9.0
"""The watchdog's, of the engine that is stopped. Above the 5 s in which vLLM looks again for a step's result whose
notice it missed: after a pause of over a second it waits for a notice that was given before."""
ORDER = (
    "test_parity",
    "test_kill",
    "test_streams",
    "test_contract",
    "test_cancel",
    "test_hang",
    "test_gateway",
    "test_orphan",
)

FLAGS: dict[str, Any] = {
    "max-model-len": 2048,
    "enforce-eager": True,
    "dtype": "bfloat16",
    "max-num-seqs": 16,
    # A model that knows nothing would fill an object with spaces until its tokens are gone.
    "structured-outputs-config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
TOOLS: dict[str, Any] = {"tool-call-parser": "hermes", "enable-auto-tool-choice": True}

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]  # no engine here, nothing to ask

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Undo the random order in this folder: what is killed goes last, and files as in `ORDER`."""
    here = Path(__file__).parent
    ours = [item for item in items if item.path.parent == here]
    rank = {name: position for position, name in enumerate(ORDER)}
    ours.sort(key=lambda item: (rank.get(item.path.stem, -1), item.path.stem, _line(item)))
    places = (place for place, item in enumerate(items) if item.path.parent == here)
    for place, item in zip(list(places), ours, strict=True):
        item.add_marker(pytest.mark.engines)
        item.add_marker(pytest.mark.timeout(START_S * 2))
        item.add_marker(pytest.mark.filterwarnings("ignore"))  # torch and vLLM warn of each other
        items[place] = item


def pytest_sessionfinish() -> None:
    """Collect what vLLM's dead engines leave unclosed while nobody counts that as an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def _line(item: pytest.Item) -> int:
    return item.reportinfo()[1] or 0


@pytest.fixture(scope="session", autouse=True)
def nothing_blocks() -> Iterator[BlockBuster]:
    """As everywhere, except while an engine comes up: vLLM reads files in the loop then."""
    guard = BlockBuster(scanned_modules=["backends"])
    guard.functions["threading.Lock.acquire"].can_block_in("backends/vllm_seam.py", "_add")  # vLLM checks a grammar
    guard.activate()
    yield guard
    guard.deactivate()


@pytest_asyncio.fixture(loop_scope="session")
async def every_task_ends() -> AsyncIterator[None]:
    """As everywhere, for tasks of our own: the engine's go on from test to test."""
    yield
    left = _ours()
    if left:
        await asyncio.wait(left, timeout=2.0)
    assert not _ours(), "the test left tasks behind"


def _ours() -> set[asyncio.Task[Any]]:
    def file(task: asyncio.Task[Any]) -> str:
        return str(getattr(getattr(task.get_coro(), "cr_code", None), "co_filename", ""))

    return {task for task in asyncio.all_tasks() if "/backends/" in file(task) and "vllm_" in file(task)}


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The tiny model, built where it is not there yet."""
    if not TINY.is_dir():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "make_tiny.py"), str(TINY)], check=True, timeout=120)
    return TINY


class Server:
    """vLLM's own HTTP server on the same model with the same flags."""

    def __init__(self, model: Path, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.log = folder / "server.log"
        flags = [_flag(name, value) for name, value in (FLAGS | TOOLS).items()]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *flags]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--scheduling-policy", "priority"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """The status and the whole body of the answer. Blocks."""
        url = f"http://127.0.0.1:{self.port}{path}"
        ask = urllib.request.Request(url, body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(ask, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    async def ready(self) -> None:
        """Waits until it answers."""
        async with asyncio.timeout(START_S):
            while True:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{self.port}/health", timeout=5)
                    return
                await asyncio.sleep(0.2)

    def end(self) -> None:
        """It and its engine are gone when this returns."""
        self.process.terminate()
        try:
            self.process.wait(15)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def _flag(name: str, value: Any) -> str:
    return f"--{name}" if value is True else f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"


@pytest.fixture(scope="session")
def starting(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server, while it starts: the engine can start beside it."""
    server = Server(tiny, tmp_path_factory.mktemp("server"))
    yield server
    server.end()


async def start(config: Vllm, guard: BlockBuster) -> InProcess:
    """The engine as the gateway gets it."""
    guard.deactivate()
    try:
        backend: Any = await config.connect("tiny")
    finally:
        guard.activate()
    return backend  # type: ignore[no-any-return]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(tiny: Path, nothing_blocks: BlockBuster) -> AsyncIterator[InProcess]:
    backend = await start(Vllm(name="first", model=str(tiny), args=FLAGS | TOOLS), nothing_blocks)
    yield backend
    await backend.aclose()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plain(tiny: Path, nothing_blocks: BlockBuster) -> AsyncIterator[InProcess]:
    args = FLAGS | {"max-num-seqs": 4, "max-num-batched-tokens": CHUNK, "enable-prefix-caching": False}
    backend = await start(Vllm(name="second", model=str(tiny), args=args, watchdog_s=PATIENCE_S), nothing_blocks)
    yield backend
    await backend.aclose()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(starting: Server) -> Server:
    await starting.ready()
    return starting
