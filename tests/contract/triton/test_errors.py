"""Every form in which Triton says no, and every way in which it falls silent."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from backends.protocol import BackendBusy, BackendError, BackendLost, Refused
from tests.contract.bench import to_end, until
from tests.contract.triton.asking import ask, connected, ids, prompt, saying
from tests.contract.triton.fake import FakeTriton, error, inflight, reply

IN_BAND: list[tuple[str, type[Exception]]] = [
    ("Request for unknown model: 'tensorrt_llm' is not found", BackendLost),
    ("Request for unknown model: 'tensorrt_llm' has no available versions", BackendLost),
    ("Stub process 'tensorrt_llm_0_0' is not healthy.", BackendLost),
    ("Server is shutting down", BackendLost),
    ("Executor failed process requestId 1 due to the following error: Maximum queue size exceeded", BackendBusy),
    ("in ensemble 'ensemble', Exceeds maximum queue size", BackendBusy),
    ("Prompt length (5000) exceeds maximum input length (4096). Set log level to info", Refused),
    ("in ensemble 'ensemble', Executor failed process requestId 7: prompt exceeds max_seq_len", Refused),
    ("expected 5 inputs but got 4 inputs for model 'tensorrt_llm'", BackendError),
    ("stand-in: injected failure", BackendError),
]
STATUS: list[tuple[grpc.StatusCode, str, type[Exception]]] = [
    (grpc.StatusCode.UNAVAILABLE, "gone", BackendLost),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "late", BackendLost),
    (grpc.StatusCode.NOT_FOUND, "no such model", BackendLost),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many", BackendBusy),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 4)", Refused),
    (grpc.StatusCode.UNAUTHENTICATED, "who are you", BackendError),
    (grpc.StatusCode.UNIMPLEMENTED, "what", BackendError),
    (grpc.StatusCode.INTERNAL, "Stub process 'x' is not healthy.", BackendLost),
    (grpc.StatusCode.INTERNAL, "boom", BackendError),
    (grpc.StatusCode.CANCELLED, "by the server", BackendError),
]


@pytest.mark.parametrize(("text", "expected"), IN_BAND)
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("final", [True, False])
async def test_errors_in_band(text: str, expected: type[Exception], after: int, final: bool, tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer) as backend:
        fake.behave = saying(*[ids(300)] * after, error(text, final), ids(301))
        stream = await backend.open(await backend.plan(prompt()))
        for _ in range(after):
            assert (await stream.next()).tokens == 1
        with pytest.raises(expected) as caught:
            await stream.next()
        assert text.rsplit(":", maxsplit=1)[-1].strip()[:20] in str(caught.value)
        assert type(caught.value) is expected
        await stream.aclose()
        assert fake.stopped == []  # what failed has nothing left to stop


@pytest.mark.parametrize("after", [0, 2])
async def test_errors_by_status(after: int, tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer) as backend:
        for code, details, expected in STATUS:
            fake.behave = partial(aborting, code, details, after)
            stream = await backend.open(await backend.plan(prompt()))
            with pytest.raises(expected) as caught:
                await to_end(stream)
            assert type(caught.value) is expected, code
            assert details in str(caught.value)
            await stream.aclose()


async def aborting(code: grpc.StatusCode, details: str, after: int, request: Any, context: Any) -> AsyncIterator[Any]:
    for _ in range(after):
        yield ids(300)(request)
    await context.abort(code, details)


async def test_an_end_without_the_final_mark_is_a_lost_engine(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer) as backend:
        for messages in ((), (ids(300),)):
            fake.behave = saying(*messages)
            with pytest.raises(BackendLost, match="before the answer's end"):
                await ask(backend, prompt())


@pytest.mark.parametrize(
    "outputs",
    [
        {"output_ids": ("BYTES", ["x"])},
        {"output_ids": ("FP32", [1.0])},
        {"output_ids": ("INT32", [300]), "sequence_length": ("BOOL", [True])},
    ],
)
async def test_nonsense_is_an_error_of_the_engine(outputs: dict[str, Any], tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer) as backend:
        fake.behave = saying(lambda request: reply(request, outputs))
        with pytest.raises(BackendError, match="can't be read"):
            await ask(backend, prompt())


async def test_torn_tensors_are_an_error_of_the_engine(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer) as backend:

        def torn(request: Any) -> Any:
            said = ids(300)(request)
            said.infer_response.raw_output_contents[0] = b"\x01\x02\x03"
            return said

        def missing(request: Any) -> Any:
            said = ids(300)(request)
            del said.infer_response.raw_output_contents[1]
            return said

        for broken in (torn, missing):
            fake.behave = saying(broken)
            with pytest.raises(BackendError, match="can't be read"):
                await ask(backend, prompt())


async def silent(request: Any, context: Any) -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


async def stalling(request: Any, context: Any) -> AsyncIterator[Any]:
    yield ids(300)(request)
    await asyncio.Event().wait()


async def endless(request: Any, context: Any) -> AsyncIterator[Any]:
    while True:
        yield ids(300)(request)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("behave", "limits", "said"),
    [
        (silent, {"first_token_s": 0.2}, "no first token within 0.2 s"),
        (stalling, {"token_s": 0.2}, "no further token within 0.2 s"),
        (endless, {"total_s": 0.3, "token_s": 60}, "no end of the answer within 0.3 s"),
    ],
)
async def test_time_outs(behave: Any, limits: dict[str, float], said: str, stream: bool, tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer, **limits) as backend:
        fake.behave = behave
        with pytest.raises(BackendLost, match=said):
            await ask(backend, prompt(stream=stream, max_tokens=1_000))

        async def stopped() -> bool:
            return len(fake.stopped) >= 1 and not fake.jobs

        await until(stopped, 5.0)


async def test_a_reader_that_takes_its_time_makes_no_engine_late(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer, token_s=1.0) as backend:
        stream = await backend.open(await backend.plan(prompt(max_tokens=3)))
        chunks = [await stream.next()]
        await asyncio.sleep(1.5)
        chunks += await to_end(stream)
        assert chunks[-1].usage.completion_tokens == 3


async def test_values_that_fit_no_tensor_are_refused(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer) as backend:
        plan = await backend.plan(prompt())
        plan.work.max_tokens = 1 << 40
        with pytest.raises(Refused, match="INT32"):
            await backend.open(plan)


async def test_a_plan_of_another_or_a_closed_one_is_not_opened(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer) as backend:
        plan = await backend.plan(prompt())
        plan.close()
        with pytest.raises(TypeError):
            await backend.open(plan)
        await backend.aclose()
        with pytest.raises(BackendLost):
            await backend.open(await backend.plan(prompt()))
