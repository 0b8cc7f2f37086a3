"""What the engine is sent, in each dialect, and what is made of its answers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from backends.protocol import Kind, Prompt, Refused
from tests.contract.bench import to_end, until
from tests.contract.triton.asking import ask, connected, ids, prompt, saying, text
from tests.contract.triton.fake import FakeModel, FakeTriton, inflight, llmapi, value
from tests.engines.triton_models.standin import text as words

SAID = "né 中😀 👩‍👩‍👧 of the time"


async def sent(fake: FakeTriton, backend: Any, **fields: Any) -> Any:
    """The request that the engine got for these body fields."""
    await ask(backend, prompt(**fields))
    return fake.seen[-1]


async def test_token_ids(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer) as backend:
        request = await sent(fake, backend, text="of the", kind=Kind.COMPLETION, add_special_tokens=False)
        assert request.model_name == "tensorrt_llm"
        assert value(request, "input_ids") == words.encode("of the")
        assert value(request, "input_lengths") == [2]
        assert value(request, "request_output_len") == [8]
        assert value(request, "end_id") == [words.EOS]
        assert value(request, "streaming") == [True]
        assert value(request, "exclude_input_in_output") == [True]
        assert [list(one.shape) for one in request.inputs if one.name == "input_ids"] == [[1, 2]]
        assert value(request, "stop") is None
        assert request.parameters["triton_enable_empty_final_response"].bool_param


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"runtime_top_k": [1], "temperature": None, "runtime_top_p": None, "seed": None}),
        ({"temperature": ...}, {"temperature": [1.0], "runtime_top_p": [1.0], "runtime_top_k": None}),
        ({"temperature": 0.5, "top_p": 0.25}, {"temperature": [0.5], "runtime_top_p": [0.25]}),
        ({"temperature": 0.5, "top_k": 40, "seed": 7}, {"runtime_top_k": [40], "seed": [7]}),
        ({"min_tokens": 3, "presence_penalty": 0.5}, {"min_tokens": [3], "presence_penalty": [0.5]}),
        ({"frequency_penalty": 0.25, "repetition_penalty": 1.5}, {"frequency_penalty": [0.25]}),
        ({"ignore_eos": True}, {"end_id": [-1], "stop_words_list": None}),
        ({"stop_token_ids": [300, 301]}, {"end_id": [2], "stop_words_list": [300, 301, 1, 2]}),
        ({"response_format": {"type": "json_object"}}, {"guided_decoding_guide_type": ["json"]}),
        ({"structured_outputs": {"regex": "a+"}}, {"guided_decoding_guide": ["a+"]}),
        ({"stop": ["of the"]}, {"stop_words_list": None}),
    ],
)
async def test_sampling(fields: dict[str, Any], expected: dict[str, Any], tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer) as backend:
        request = await sent(fake, backend, **fields)
        assert {name: value(request, name) for name in expected} == expected


async def test_samples_without_a_seed_differ(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer) as backend:
        seeds = [value(await sent(fake, backend, temperature=1.0), "seed") for _ in range(3)]
        assert len({seed[0] for seed in seeds if seed}) == 3


async def test_text_to_the_ensemble(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer, dialect="inflight-ensemble") as backend:
        request = await sent(fake, backend, text="of the", ignore_eos=True, top_k=4, temperature=1)
        assert request.model_name == "ensemble"
        assert "of the" in (value(request, "text_input") or [""])[0]
        assert value(request, "max_tokens") == [8]
        assert value(request, "stream") == [True]
        assert value(request, "end_id") == [-1]
        assert value(request, "top_k") == [4]
        assert value(request, "input_ids") is None


async def test_text_to_the_llm_api(tokenizer: Path) -> None:
    async with FakeTriton(*llmapi()) as fake, connected(fake, tokenizer) as backend:
        request = await sent(fake, backend, text="of the", temperature=0.5, top_p=0.5)
        assert value(request, "sampling_param_max_tokens") == [8]
        assert value(request, "sampling_param_temperature") == [0.5]
        assert value(request, "return_finish_reason") == [True]
        assert [list(one.shape) for one in request.inputs if one.name == "text_input"] == [[1]]


@pytest.mark.parametrize("models", [inflight, llmapi])
async def test_only_inputs_that_the_model_has_are_sent(models: Any, tokenizer: Path) -> None:
    """An older release: none of the optional ones but the stream."""
    keep = {
        *("input_ids", "input_lengths", "request_output_len", "streaming", "stream", "text_input", "max_tokens"),
        "sampling_param_max_tokens",
    }
    few: list[FakeModel] = models()
    for model in few:
        model.inputs = "\n".join(line for line in model.inputs.splitlines() if line and line.split()[0] in keep)
    async with FakeTriton(*few) as fake, connected(fake, tokenizer) as backend:
        request = await sent(fake, backend, temperature=...)
        assert {one.name for one in request.inputs} <= keep
        for name, asked in (("top_p", 0.5), ("seed", 3), ("presence_penalty", 0.5), ("min_tokens", 2)):
            with pytest.raises(Refused) as caught:
                await backend.plan(prompt(temperature=..., **{name: asked}))
            assert (caught.value.code, caught.value.param) == ("unsupported_feature", name)


async def test_older_names_of_inputs(tokenizer: Path) -> None:
    models = inflight()
    models[0].inputs = models[0].inputs.replace("min_tokens", "min_length").replace("\nseed ", "\nrandom_seed ")
    async with FakeTriton(*models) as fake, connected(fake, tokenizer) as backend:
        request = await sent(fake, backend, temperature=1, seed=5, min_tokens=2)
        assert value(request, "random_seed") == [5]
        assert value(request, "min_length") == [2]


@pytest.mark.parametrize("stream", [True, False])
async def test_characters_in_pieces_come_whole(stream: bool, tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer) as backend:
        said = words.encode(SAID)
        fake.behave = saying(*map(ids, said), ids(words.EOS, final=True))
        answer = await ask(backend, prompt(stream=stream, max_tokens=200))
        assert answer.text() == SAID
        assert "\ufffd" not in answer.data.decode()
        assert answer.usage.completion_tokens == len(said) + 1
        assert answer.finish_reasons() == ["stop"]


@pytest.mark.parametrize("said", ["cumulative", "delta"])
async def test_the_llm_api_tells_all_or_what_is_new(said: Any, tokenizer: Path) -> None:
    async with FakeTriton(*llmapi()) as fake, connected(fake, tokenizer, llmapi_text=said) as backend:
        parts = ["né", " 中", "😀", ""]
        whole = ["".join(parts[: nth + 1]) for nth in range(len(parts))]
        stop = {"finish_reason": ("BYTES", ["stop"])}
        *before, last = whole if said == "cumulative" else parts
        fake.behave = saying(*(text(one) for one in before), text(last, final=True, **stop))
        answer = await ask(backend, prompt(max_tokens=50))
        assert answer.text() == "né 中😀"
        assert answer.finish_reasons() == ["stop"]
        assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_an_llm_api_that_does_not_stream(stream: bool, tokenizer: Path) -> None:
    """`decoupled` is false by default in its model.yaml: one response then, in a stream of one."""
    models = llmapi()
    models[0].decoupled = False
    async with FakeTriton(*models) as fake, connected(fake, tokenizer, first_token_s=0.1) as backend:

        async def behave(request: Any, _: Any) -> AsyncIterator[Any]:
            await asyncio.sleep(0.3)
            yield text("of the time", final=True, finish_reason=("BYTES", ["stop"]))(request)

        fake.behave = behave
        answer = await ask(backend, prompt(stream=stream, max_tokens=50))
        assert answer.text() == "of the time"
        assert answer.usage.completion_tokens == 3
        assert value(fake.seen[-1], "streaming") is None


async def test_the_engines_own_counts_win(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer, dialect="inflight-ensemble") as backend:
        counted = {"num_input_tokens": ("INT32", [17]), "num_output_tokens": ("INT32", [4])}
        fake.behave = saying(text("one two", **counted), text(" three", final=True, **counted))
        answer = await ask(backend, prompt(max_tokens=50))
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (17, 8)


@pytest.mark.parametrize("dialect", ["inflight-tokens", "inflight-ensemble", "llmapi"])
async def test_a_stop_string_stops_the_engine(dialect: Any, tokenizer: Path) -> None:
    models = llmapi() if dialect == "llmapi" else inflight()
    async with FakeTriton(*models) as fake, connected(fake, tokenizer, dialect=dialect) as backend:
        plan = await backend.plan(prompt(max_tokens=400, stop=["e"]))
        stream = await backend.open(plan)
        chunks = await to_end(stream)
        assert chunks[-1].last

        async def free() -> bool:
            return not fake.jobs and fake.stopped == [stream.request_id]

        await until(free, 5.0)
        await stream.aclose()
        assert fake.stopped == [stream.request_id]


async def test_ids_are_unique_and_name_the_request(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer) as backend:
        asked = prompt()
        asked.request_id = "client-7"
        for _ in range(3):
            await ask(backend, asked)
        seen = {request.id for request in fake.seen[-3:]}
        assert len(seen) == 3
        assert all(one.startswith("client-7.") for one in seen)


async def test_trace_context_and_key_go_as_metadata(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_KEY", "secret")
    given = {"api_key_env": "TRITON_KEY", "metadata": {"x-team": "signals"}}
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer, **given) as backend:
        asked = prompt()
        asked.trace = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
        await ask(backend, asked)
        said = fake.metadata[-1]
        assert said["authorization"] == "Bearer secret"
        assert said["x-team"] == "signals"
        assert said["traceparent"].startswith("00-0af7651916cd43dd")


async def test_logprobs_of_the_chosen_tokens(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer, logprobs=True) as backend:
        fake.behave = saying(ids(300, 301, final=True, output_log_probs=("FP32", [-0.5, -0.25])))
        answer = await ask(backend, prompt(logprobs=True))
        scored = [
            one
            for frame in answer.frames
            for c in frame["choices"]
            for one in (c.get("logprobs") or {}).get("content") or []
        ]
        assert [one["logprob"] for one in scored] == [-0.5, -0.25]
        assert value(fake.seen[-1], "return_log_probs") == [True]


async def test_tokenize_needs_no_engine(tokenizer: Path) -> None:
    async with FakeTriton(*inflight()) as fake, connected(fake, tokenizer) as backend:
        before = len(fake.seen)
        asked = Prompt(kind=Kind.TOKENIZE, model="demo", body=b'{"model":"demo","prompt":"of the"}')
        chunks = await to_end(await backend.open(await backend.plan(asked)))
        assert b'"count":' in chunks[0].data
        assert len(fake.seen) == before
