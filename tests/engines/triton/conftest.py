"""One real Triton server with both layouts for all tests; those that kill start their own.

They are in a process of their own (`make test-engines`), as the engines of the folder above block the loop at times.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.engines.triton.asking import CONTEXT_TOKENS
from tests.engines.triton.server import TritonServer, installed
from tests.engines.triton_models.repository import write
from tests.engines.triton_models.standin import text
from tests.support.tokenizers import pieces, save

LINGER_S = 3.0


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Marks first. At last the tests of the mixed pool get back into their order: the last one kills two engines."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.engines)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(240))
            if not installed():
                item.add_marker(pytest.mark.skip("there is no Triton server: scripts/triton.sh installs it"))
    yield
    places = [place for place, item in enumerate(items) if item.path == here / "test_mixed.py"]
    in_order = sorted((items[place] for place in places), key=lambda item: item.reportinfo()[1] or 0)
    for place, item in zip(places, in_order, strict=True):
        items[place] = item


@pytest.fixture
async def every_task_ends() -> AsyncIterator[None]:
    """As everywhere: these tests have a loop each."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=LINGER_S)
    assert not left, f"the test left tasks behind: {sorted(map(repr, left))}"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer files with the ids of the stand-ins."""
    return save(pieces(text.PIECES), tmp_path_factory.mktemp("standin"), model_max_length=CONTEXT_TOKENS)


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("triton")
    write(folder / "models")
    server = TritonServer(folder)
    asyncio.run(server.start())
    yield server
    asyncio.run(server.aclose())


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator["Own"]:
    """Makes servers of the test's own."""
    maker = Own(tmp_path)
    yield maker
    await asyncio.gather(*(server.aclose(gently=False) for server in maker.servers))


class Own:
    """Servers that end with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.servers: list[TritonServer] = []

    async def start(self, *models: str, **engine: str | float) -> TritonServer:
        """`models` are those to load, all if there are none; `engine` is as in `triton_models.repository.write`."""
        folder = self._folder / f"triton{len(self.servers)}"
        write(folder / "models", **engine)  # type: ignore[arg-type]
        server = TritonServer(folder, models)
        self.servers.append(server)
        return await server.start()
