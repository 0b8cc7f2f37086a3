"""The Triton backend keeps the contract of every backend, in each dialect, over a server in the test's own loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from backends.triton import Triton
from tests.contract.bench import Bench
from tests.contract.suite import CASES, Case, play
from tests.contract.triton.fake import FakeTriton, inflight, llmapi

CAN = frozenset({"kill", "checks", "repeats", "stop"})
UNSUPPORTED: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "n": 2,
    "logit_bias": {"1": 1},
    "min_p": 0.5,
}


class Unbounded(Bench):
    """For engines that can't be kept from ending: the stand-ins never do."""

    def prompt(self, **fields: Any) -> Any:
        fields.pop("ignore_eos", None)
        return super().prompt(**fields)


@asynccontextmanager
async def bench(dialect: str, tokenizer: Path) -> AsyncIterator[Bench]:
    async with FakeTriton(*(llmapi() if dialect == "llmapi" else inflight())) as fake:
        config = Triton(
            name="triton", url=fake.url, tokenizer=str(tokenizer), dialect=dialect, metrics_url="off", canary_s=0
        )
        backend = await config.connect("demo")

        async def busy() -> int:
            return len(fake.jobs)

        yield (Unbounded if dialect == "llmapi" else Bench)(
            backend=backend,
            model="demo",
            busy=busy,
            kill=fake.kill,
            can=CAN | ({"exact"} if dialect == "inflight-tokens" else frozenset()),
            unsupported=UNSUPPORTED,
            idle_s=1.0,
        )
        await backend.aclose()


@pytest.mark.parametrize("dialect", ["inflight-tokens", "inflight-ensemble", "llmapi"])
@pytest.mark.parametrize("one", CASES, ids=lambda one: one.__name__)
def test_contract(one: Case, dialect: Any, tokenizer: Path) -> None:
    asyncio.run(play(lambda: bench(dialect, tokenizer), one))


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.__name__)
def test_contract_on_uvloop(one: Case, tokenizer: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play(lambda: bench("inflight-tokens", tokenizer), one))
