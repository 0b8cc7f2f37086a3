"""A pool of two kinds of engine: what only one of them can do goes there, and what it leaves undone to the other."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends import words
from tests.contract.bench import events
from tests.support import fake_trtllm
from tests.support.fake_trtllm import LLM
from tests.support.site import Site, running
from tests.support.tokenizers import byte_level, save

TOOLS = [{"type": "function", "function": {"name": "dial", "parameters": {"type": "object"}}}]


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    """A model's folder, and the stand-in for TensorRT-LLM's package, which says its text over and over."""
    save(byte_level(), tmp_path)
    known = words.load(str(tmp_path))
    with fake_trtllm.install(known.encode(fake_trtllm.TEXT, special=False)):
        yield tmp_path


@pytest.fixture
async def site(package: Path) -> AsyncIterator[Site]:
    pool = (
        '[[pool]]\nmodel = "demo"\n'
        '[[pool.backend]]\nkind = "simulated"\nname = "sim"\na0_ms = 1.0\n'
        f'[[pool.backend]]\nkind = "trtllm"\nname = "trt"\nmodel = "{package}"\ntools = "hermes"\n'
        'args = { guided_decoding_backend = "xgrammar" }\n'
    )
    async with running(pool) as one:
        await one.until(lambda: all(member.backend for member in one.trunk.pools["demo"].members))
        yield one


async def who(site: Site, **fields: Any) -> str:
    """Which engine answered."""
    async with site.chat(max_tokens=5, **fields) as answer:
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["system_fingerprint"])


async def test_what_only_one_can_do_goes_there(site: Site) -> None:
    for fields in (
        {"logprobs": True},
        {"tools": TOOLS},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True, "n": 2},
    ):
        for _ in range(4):
            assert await who(site, **fields) == "tensorrt-llm-1.2.1"
    body = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 3}
    for _ in range(4):
        async with site.client.post(f"{site.url}/v1/completions", json=body) as answer:
            told = await answer.json()
            assert told["system_fingerprint"] == "tensorrt-llm-1.2.1"
            assert told["usage"] == {
                "prompt_tokens": 3,
                "completion_tokens": 3,
                "total_tokens": 6,
                "prompt_tokens_details": {"cached_tokens": 0},
            }


async def test_what_neither_can_do_is_refused_by_name(site: Site) -> None:
    async with site.chat(reasoning_effort="high") as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
        assert (error["code"], error["param"]) == ("unsupported_feature", "reasoning_effort")


async def test_a_stream_over_the_wire(site: Site) -> None:
    async with site.chat(max_tokens=60, logprobs=True, stream=True, stream_options={"include_usage": True}) as answer:
        assert answer.status == 200
        frames = events(await answer.read())
    assert frames[-1] == "[DONE]"
    usage = frames[-2]["usage"]
    assert usage["completion_tokens"] == 60
    text = "".join(frame["choices"][0]["delta"].get("content") or "" for frame in frames[:-2])
    assert text in fake_trtllm.TEXT * 9


async def test_a_client_that_leaves_frees_the_engine(site: Site) -> None:
    (llm,) = LLM.built
    answer = await site.chat(max_tokens=300, logprobs=True, stream=True)
    await answer.content.readany()
    assert llm.held == 1
    answer.close()
    await site.until(lambda: llm.held == 0)


async def test_the_other_takes_over_when_one_has_died(site: Site) -> None:
    (llm,) = LLM.built
    llm.crash()
    answers = [await who(site, messages=[{"role": "user", "content": f"{number}"}]) for number in range(8)]
    assert set(answers) == {"simulated-sim"}


async def test_a_prompt_too_long_says_so(site: Site) -> None:
    async with site.chat("token " * 600, logprobs=True) as answer:
        assert answer.status == 400
        assert msgspec.json.decode(await answer.read())["error"]["code"] == "context_length_exceeded"
