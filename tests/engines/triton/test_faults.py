"""What goes wrong at a real server, and how a pool comes back from it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from backends.protocol import BackendBusy, BackendError, BackendLost, Refused
from tests.contract.bench import to_end
from tests.contract.triton.asking import ask, prompt
from tests.engines.triton.asking import DIALECTS, INFLIGHT, connected, scripted
from tests.engines.triton.conftest import Own
from tests.engines.triton.server import TritonServer
from tests.support.site import Site, running

DEAD_S = 15.0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_errors_in_band(dialect: str, stream: bool, triton: TritonServer, tokenizer: Path) -> None:
    async with connected(triton, tokenizer, dialect) as backend:
        for after in (0, 3):
            with pytest.raises(BackendError, match="injected failure"):
                await ask(backend, prompt(scripted(fail_after=after), stream=stream, max_tokens=20))
        assert (await ask(backend, prompt())).usage.completion_tokens == 8


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_unknown_and_unloaded_models(dialect: str, triton: TritonServer, tokenizer: Path) -> None:
    with pytest.raises(BackendError, match=r"this Triton has no model 'nope'; it has .*tensorrt_llm"):
        async with connected(triton, tokenizer, dialect, model="nope"):
            pass
    with pytest.raises(BackendError, match=r"preprocessing.* does not have"):
        async with connected(triton, tokenizer, dialect, model="preprocessing"):
            pass


async def test_a_model_that_is_unloaded_while_it_serves(own: Own, tokenizer: Path) -> None:
    server = await own.start("llmapi")
    async with connected(server, tokenizer, "llmapi") as backend, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.http}/v2/repository/models/llmapi/unload"
        async with session.post(url) as answer:
            assert answer.status == 200
        async with asyncio.timeout(10):
            while True:
                try:
                    await backend.gauge()
                except BackendLost:
                    break
                await asyncio.sleep(0.05)
        with pytest.raises(BackendLost, match=r"unknown model|not ready|available"):
            await ask(backend, prompt())


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_more_than_the_engine_holds(dialect: str, triton: TritonServer, tokenizer: Path) -> None:
    async with connected(triton, tokenizer, dialect, context_tokens=1_000_000) as backend:
        with pytest.raises(Refused) as caught:
            await ask(backend, prompt(max_tokens=60_000))
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


async def test_a_full_queue_is_busy(own: Own, tokenizer: Path) -> None:
    server = await own.start(*INFLIGHT, "llmapi", standin_slots=1, standin_max_queue_size=2)
    for dialect in DIALECTS:
        async with connected(server, tokenizer, dialect) as backend:
            streams = [await backend.open(await backend.plan(prompt(f"{n}", max_tokens=400))) for n in range(6)]
            ends = [asyncio.ensure_future(stream.next()) for stream in streams]
            busy, waiting = 0, set(ends)
            async with asyncio.timeout(20):
                while busy < 3:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    busy += sum(isinstance(end.exception(), BackendBusy) for end in done)
            for stream in streams:
                await stream.aclose()
            await asyncio.wait(ends)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_stalled_engine_is_too_late(dialect: str, triton: TritonServer, tokenizer: Path) -> None:
    limits = {"first_token_s": 1.0, "token_s": 0.5}
    async with connected(triton, tokenizer, dialect, **limits) as backend:
        for after, said in ((0, "no first token within 1 s"), (2, r"no further token within 0\.5 s")):
            with pytest.raises(BackendLost, match=said):
                await ask(backend, prompt(scripted(stall_after=after)))
        assert (await ask(backend, prompt())).usage.completion_tokens == 8


POOL = """
[[pool]]
model = "demo"
[[pool.backend]]
kind = "triton"
name = "triton"
url = "grpc://127.0.0.1:{grpc}"
metrics_url = "http://127.0.0.1:{metrics}/metrics"
dialect = "{dialect}"
tokenizer = "{tokenizer}"
token_s = 1.0
first_token_s = 3.0
canary_s = {canary_s}
"""


@asynccontextmanager
async def dead(server: TritonServer, tokenizer: Path, dialect: str, canary_s: float) -> AsyncIterator[Site]:
    """A gateway whose only engine has just died under six requests, one of which has killed it."""
    pool = POOL.format(
        grpc=server.grpc, metrics=server.metrics, dialect=dialect, tokenizer=tokenizer, canary_s=canary_s
    )
    async with running(pool) as site:
        async with site.chat(max_tokens=4) as answer:
            assert answer.status == 200
        texts = ["Go on for ever."] * 5 + [scripted(crash_after=20)]
        streams = [site.chat(text, max_tokens=1_000, stream=True) for text in texts]
        for ended in await asyncio.gather(*(_read(stream) for stream in streams)):
            assert b'"error"' in ended  # they hung until they were too late
        yield site


async def _read(stream: Any) -> bytes:
    async with stream as answer:
        assert answer.status == 200
        return bytes(await answer.read())


async def test_a_canary_finds_a_dead_model_process(own: Own, tokenizer: Path) -> None:
    """Triton goes on to say that the model is ready."""
    server = await own.start(*INFLIGHT)
    async with dead(server, tokenizer, "inflight-ensemble", 1.0) as site, aiohttp.ClientSession() as session:
        member = site.trunk.pools["demo"].members[0]
        await site.until(lambda: member.backend is None, DEAD_S)
        async with site.chat(max_tokens=4) as answer:
            assert answer.status == 503
        await server.reload("tensorrt_llm", session)
        await site.until(lambda: member.backend is not None and member.fine, DEAD_S)
        async with site.chat(max_tokens=4) as answer:
            assert answer.status == 200


async def test_a_dead_model_process_opens_the_breaker_and_a_reload_closes_it(own: Own, tokenizer: Path) -> None:
    server = await own.start(*INFLIGHT)
    async with dead(server, tokenizer, "inflight-tokens", 0.0) as site, aiohttp.ClientSession() as session:
        member = site.trunk.pools["demo"].members[0]
        assert member.backend is not None
        assert not member.breaker.closed
        async with site.chat(max_tokens=4) as answer:
            assert answer.status == 503
        await server.reload("tensorrt_llm", session)
        async with asyncio.timeout(60):
            while not member.breaker.closed:
                async with site.chat(max_tokens=4) as answer:
                    assert answer.status in (200, 503)
                await asyncio.sleep(0.1)
        async with site.chat(max_tokens=4) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_killed_server_is_unavailable(dialect: str, own: Own, tokenizer: Path) -> None:
    server = await own.start(*(INFLIGHT if dialect.startswith("inflight") else ("llmapi",)))
    async with connected(server, tokenizer, dialect) as backend:
        stream = await backend.open(await backend.plan(prompt(max_tokens=1_000)))
        assert await stream.next() is not None
        server.kill()
        with pytest.raises(BackendLost, match="UNAVAILABLE"):
            await asyncio.wait_for(to_end(stream), 5)
        await stream.aclose()
        with pytest.raises(BackendLost, match="UNAVAILABLE"):
            await ask(backend, prompt())
        with pytest.raises(BackendLost, match="UNAVAILABLE"):
            await backend.gauge()
