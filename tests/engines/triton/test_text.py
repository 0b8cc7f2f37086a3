"""What the engine says arrives as it was said, streamed and not, with exact counts where the dialect has them."""

from pathlib import Path

import pytest

from backends.protocol import Kind
from tests.contract.bench import Answer
from tests.contract.triton.asking import ask, prompt
from tests.engines.triton.asking import DIALECTS, connected, scripted
from tests.engines.triton.server import TritonServer
from tests.engines.triton_models.standin import text as words

SAID = [
    "of the time",
    "Grüße aus Übersee, naïve café",
    "日本語の文章です。Привет, мир! שלום",
    "🙂 and 👩‍👩‍👧 by the 🚂🚃🚃\n\n\tof the day  ",
]
WHOLE = ["inflight-tokens", "llmapi"]
"""The dialects that can tell every text. The ensemble's last step decodes each token by itself."""


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dialect", WHOLE)
async def test_text_is_what_was_said(dialect: str, stream: bool, triton: TritonServer, tokenizer: Path) -> None:
    async with connected(triton, tokenizer, dialect) as backend:
        for said in SAID:
            answer = await ask(backend, prompt(scripted(say=said), stream=stream, max_tokens=300))
            assert answer.text() == said
            assert answer.finish_reasons() == ["stop"]
            if dialect == "inflight-tokens":
                assert answer.usage.completion_tokens == len(words.encode(said))


async def test_deltas_of_the_llm_api(triton: TritonServer, tokenizer: Path) -> None:
    given = {"model": "llmapi_delta", "llmapi_text": "delta"}
    async with connected(triton, tokenizer, "llmapi", **given) as backend:
        for said in SAID:
            assert (await ask(backend, prompt(scripted(say=said), max_tokens=300))).text() == said


@pytest.mark.parametrize("stream", [True, False])
async def test_the_ensemble_says_what_its_last_step_made(stream: bool, triton: TritonServer, tokenizer: Path) -> None:
    """Characters that are one token are whole; of others each piece has become U+FFFD before it gets here."""
    async with connected(triton, tokenizer, "inflight-ensemble") as backend:
        for said in SAID:
            answer = await ask(backend, prompt(scripted(say=said), stream=stream, max_tokens=300))
            assert answer.text() == "".join(words.decode([token]) for token in words.encode(said))
            assert answer.usage.completion_tokens == len(words.encode(said))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_stop_strings(dialect: str, stream: bool, triton: TritonServer, tokenizer: Path) -> None:
    async with connected(triton, tokenizer, dialect) as backend:
        for stop, expected in (("the end", "this is "), ("xy", "this is the end of it"), (["zz", "is t"], "this ")):
            said = "this is the end of it" if stop != "xy" else expected
            asked = prompt(scripted(say=said), stream=stream, max_tokens=300, stop=stop)
            answer = await ask(backend, asked)
            assert answer.text() == expected
            assert answer.finish_reasons() == ["stop"]


@pytest.mark.parametrize("dialect", ["inflight-tokens", "inflight-ensemble"])
async def test_structured_output_reaches_the_engine(dialect: str, triton: TritonServer, tokenizer: Path) -> None:
    """The stand-in says the schema itself."""
    async with connected(triton, tokenizer, dialect) as backend:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        answer = await ask(backend, prompt(max_tokens=300, response_format=form))
        assert answer.text() == '{"type":"object","properties":{"n":{"type":"integer"}}}'


async def test_log_probabilities(triton: TritonServer, tokenizer: Path) -> None:
    async with connected(triton, tokenizer, "inflight-tokens", logprobs=True) as backend:
        answer = await ask(backend, prompt(scripted(say="of the time"), logprobs=True))
        assert _scored(answer) == [("of", -0.5), (" the", -0.5), (" time", -0.5)]


async def test_a_repeated_prompt_is_cached(triton: TritonServer, tokenizer: Path) -> None:
    async with connected(triton, tokenizer, "inflight-tokens") as backend:
        asked = prompt("river " * 64, kind=Kind.COMPLETION)
        await ask(backend, asked)
        usage = (await ask(backend, asked)).usage
        assert usage.cached_tokens == usage.prompt_tokens // 64 * 64 > 0


def _scored(answer: Answer) -> list[tuple[str, float]]:
    choices = [choice for frame in answer.frames for choice in frame["choices"]]
    return [
        (one["token"], one["logprob"])
        for choice in choices
        for one in (choice["logprobs"] or {"content": []})["content"]
    ]
