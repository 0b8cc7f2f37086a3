"""An engine that is alive and silent: vLLM itself would wait for ever."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from backends.protocol import BackendLost, Kind
from tests.engines.asking import CHAT, LONG, read, start
from tests.engines.conftest import PATIENCE_S
from tests.engines.test_cancel import idle
from tests.engines.test_kill import RUNNING, lost_at

if TYPE_CHECKING:
    from backends.vllm_engine import InProcess

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]


async def test_a_short_pause_is_no_hang(plain: InProcess) -> None:
    _, stream = await start(plain, Kind.CHAT, LONG | {"stream": True})
    await stream.next()
    os.kill(plain.process_ids[0], signal.SIGSTOP)
    await asyncio.sleep(1.0)
    os.kill(plain.process_ids[0], signal.SIGCONT)
    for _ in range(20):
        assert await stream.next() is not None
    await stream.aclose()
    await idle(plain)


async def test_an_idle_engine_may_be_silent(plain: InProcess) -> None:
    await asyncio.sleep(PATIENCE_S + 0.5)
    await plain.gauge()
    await read((await start(plain, Kind.CHAT, CHAT))[1])


async def test_a_stopped_engine_is_noticed_and_ended(plain: InProcess) -> None:
    loop = asyncio.get_running_loop()
    plan = await plain.plan((await start(plain, Kind.CHAT, CHAT | {"max_tokens": 1}))[0].prompt)
    await idle(plain)
    streams = [(await start(plain, kind, body))[1] for kind, body in RUNNING[2:5]]  # four in the engine: all it takes
    for stream in streams:
        await stream.next()
    (pid,) = plain.process_ids
    os.kill(pid, signal.SIGSTOP)
    stopped_at = loop.time()
    readers = [asyncio.ensure_future(lost_at(stream)) for stream in streams]
    noticed = await asyncio.gather(*readers)
    assert PATIENCE_S - 1 < min(noticed) - stopped_at < PATIENCE_S + 2
    assert max(noticed) - min(noticed) < 0.2
    with pytest.raises(BackendLost, match="no sign"):
        await plain.gauge()
    with pytest.raises(BackendLost, match="no sign"):
        await plain.open(plan)
    closing_at = loop.time()
    stall = asyncio.ensure_future(worst_stall())
    await plain.aclose()
    assert loop.time() - closing_at < 2.0
    stall.cancel()
    assert await stall < 0.2
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def worst_stall() -> float:
    """The longest time that the loop did not come round, in seconds, until cancelled."""
    loop = asyncio.get_running_loop()
    worst = 0.0
    try:
        while True:
            at = loop.time()
            await asyncio.sleep(0.01)
            worst = max(worst, loop.time() - at - 0.01)
    except asyncio.CancelledError:
        return worst
