"""The OpenAI Python SDK against the gateway: what an application sees."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.http.test_relay import ALICE, BOB, TENANTS
from tests.support.quiet import zero
from tests.support.site import Site, running

HELLO: Any = [{"role": "user", "content": "Hello there"}]


@asynccontextmanager
async def sdk(site: Site, key: str = ALICE, retries: int = 0) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=retries) as client:
        yield client


async def test_chat_streamed_and_not_and_the_models() -> None:
    async with running(TENANTS) as site, sdk(site) as client:
        answer = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=6, seed=1)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 6
        stream = await client.chat.completions.create(
            model="demo", messages=HELLO, max_tokens=6, seed=1, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content
        assert chunks[-1].usage == answer.usage
        assert [model.id async for model in client.models.list()] == ["demo", "gpt-4o-mini", "secret"]
        assert (await client.models.retrieve("demo")).id == "demo"
        vectors = await client.embeddings.create(model="demo", input=["a", "b"])
        assert len(vectors.data) == 2
        completion = await client.completions.create(model="demo", prompt="Once", max_tokens=2)
        assert completion.choices[0].finish_reason == "length"
        await zero(site)


async def test_errors_are_the_sdks_own() -> None:
    async with running(TENANTS) as site:
        async with sdk(site, "sk-nobody") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="demo", messages=HELLO)
        async with sdk(site, BOB) as client:
            with pytest.raises(openai.PermissionDeniedError):
                await client.chat.completions.create(model="secret", messages=HELLO)
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="nothing", messages=HELLO)
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="demo", messages=HELLO, logprobs=True)
            assert (caught.value.code, caught.value.param) == ("unsupported_feature", "logprobs")


async def test_an_error_in_mid_stream_is_raised_with_what_came_before_it() -> None:
    async with running(TENANTS) as site, sdk(site) as client:
        stream = await client.chat.completions.create(
            model="demo",
            messages=HELLO,
            max_tokens=5_000,
            extra_body={"min_tokens": 5_000},
            extra_headers={"x-deadline-ms": "250"},
            stream=True,
        )
        told = 0
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                told += 1
        assert told > 5
        assert caught.value.code == "expired"
        await zero(site)


async def test_the_sdk_comes_back_when_told_to() -> None:
    async with running(TENANTS) as site, sdk(site, retries=2) as client:
        site.trunk.draining = True
        calls = 0

        def put_back(response: Any) -> Any:
            nonlocal calls
            calls += 1
            site.trunk.draining = False
            return _nothing()

        client._client.event_hooks = {"response": [put_back]}
        answer = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=2)
        assert answer.choices
        assert calls == 2


async def _nothing() -> None:
    """A hook has to be awaited."""


async def test_the_sdks_time_out_is_a_deadline() -> None:
    async with running(TENANTS) as site, sdk(site) as client:
        with pytest.raises((openai.APITimeoutError, openai.InternalServerError)):
            await client.with_options(timeout=0.2).chat.completions.create(
                model="demo", messages=HELLO, max_tokens=5_000, extra_body={"min_tokens": 5_000}
            )
        await zero(site)
