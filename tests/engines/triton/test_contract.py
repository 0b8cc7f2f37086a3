"""The Triton backend keeps the contract of every backend against the real server, in each dialect."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.contract.bench import Bench
from tests.contract.suite import CASES, NEEDS, Case, play
from tests.contract.triton.test_contract import UNSUPPORTED, Unbounded
from tests.engines.triton.asking import DIALECTS, INFLIGHT, MODELS, connected, watching
from tests.engines.triton.conftest import Own
from tests.engines.triton.server import TritonServer

CAN = frozenset({"kill", "checks", "repeats", "stop"})
MORE = {
    "inflight-tokens": frozenset({"exact", "busy-gauge"}),
    "inflight-ensemble": frozenset({"busy-gauge"}),
    "llmapi": frozenset[str](),
}


@asynccontextmanager
async def bench(server: TritonServer, tokenizer: Path, dialect: str) -> AsyncIterator[Bench]:
    async with (
        watching(server, MODELS[dialect]) as watch,
        connected(server, tokenizer, dialect) as backend,
    ):

        async def kill() -> None:
            server.kill()

        yield (Unbounded if dialect == "llmapi" else Bench)(
            backend=backend,
            model="demo",
            busy=watch.active,
            kill=kill,
            can=CAN | MORE[dialect],
            unsupported=UNSUPPORTED,
            idle_s=2.0,  # that it is faster is shown in test_cancel
        )


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "one", [case for case in CASES if "kill" not in NEEDS[case.__name__]], ids=lambda one: one.__name__
)
def test_contract(one: Case, dialect: str, triton: TritonServer, tokenizer: Path) -> None:
    asyncio.run(play(lambda: bench(triton, tokenizer, dialect), one))


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_contract_of_those_that_kill(dialect: str, own: Own, tokenizer: Path) -> None:
    server = await own.start(*(INFLIGHT if dialect.startswith("inflight") else (MODELS[dialect],)))
    killing = [case for case in CASES if "kill" in NEEDS[case.__name__]]
    for one in sorted(killing, key=lambda case: "dead_engine" in case.__name__):
        await play(lambda: bench(server, tokenizer, dialect), one)
