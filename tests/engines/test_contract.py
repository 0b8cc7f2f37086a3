"""The in-process engine keeps the contract that every backend keeps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.contract.bench import Bench
from tests.contract.suite import CASES, Case, play

if TYPE_CHECKING:
    from backends.vllm_engine import InProcess

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.__name__)
async def test_contract(one: Case, plain: InProcess) -> None:
    async def busy() -> int:
        gauge = await plain.gauge()
        return max(plain._llm.get_num_unfinished_requests(), (gauge.running or 0) + (gauge.waiting or 0))

    async def kill() -> None:
        pytest.fail("the engine is shared: test_kill kills one")

    @asynccontextmanager
    async def bench() -> AsyncIterator[Bench]:
        can = frozenset({"stop", "exact", "choices", "checks", "repeats", "busy-gauge"})
        yield Bench(backend=plain, model="tiny", busy=busy, kill=kill, can=can, idle_s=0.3)

    await play(bench, one)
