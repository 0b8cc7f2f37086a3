"""The virtual loop: time passes without waiting, in order, and a deadlock is seen."""

import asyncio
import time

import pytest

from tests.support import virtual


def test_hours_pass_at_once_and_in_order() -> None:
    woken: list[float] = []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append(asyncio.get_running_loop().time())

    async def main() -> None:
        await asyncio.gather(*(sleeper(seconds) for seconds in (7_200, 1, 100_000, 0.25)))

    started = time.perf_counter()
    virtual.run(main())
    assert woken == pytest.approx([0.25, 1, 7_200, 100_000])
    assert time.perf_counter() - started < 5


def test_a_timeout_fires_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3_600):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert virtual.run(main()) == pytest.approx(3_600)


def test_a_deadlock_is_an_error_that_names_who_waits() -> None:
    async def main() -> None:
        waits = asyncio.get_running_loop().create_task(asyncio.Event().wait(), name="the one who waits")
        await waits

    with pytest.raises(virtual.Deadlock, match="the one who waits"):
        virtual.run(main())
