"""The simulated backend beyond the contract: its pace, its text, its faults, and every field of a request."""

import asyncio
import base64
import itertools
import struct
from typing import Any

import msgspec
import pytest

from backends import simtext
from backends.protocol import BackendBusy, BackendError, BackendLost, Kind
from backends.simulated import Simulated, SimulatedBackend
from tests.contract.bench import to_end
from tests.contract.sim import answer, ask, backend, body, only
from tests.support import virtual

PACE = {"a0_ms": 10.0, "a1_us_per_prefill_token": 100.0, "a2_us_per_running": 0.0, "a3_us_per_kv_token": 0.0}


def test_it_keeps_the_pace_of_its_numbers() -> None:
    async def test() -> None:
        engine = backend(**PACE)
        clock = asyncio.get_running_loop().time
        stream = await engine.open(await engine.plan(ask(max_tokens=4, ignore_eos=True)))
        times = []
        while await stream.next() is not None:
            times.append(clock())
        prompt_tokens = (await engine.gauge()).steps[0][0]
        assert times[0] == pytest.approx(0.010 + prompt_tokens * 1e-4)
        assert [later - earlier for earlier, later in itertools.pairwise(times)] == pytest.approx([0.010] * 3)

    virtual.run(test())


def test_speed_divides_the_steps() -> None:
    async def seconds(speed: float) -> float:
        await answer(backend(speed=speed), ask(max_tokens=50, ignore_eos=True))
        return asyncio.get_running_loop().time()

    assert virtual.run(seconds(4.0)) == pytest.approx(virtual.run(seconds(1.0)) / 4)


def test_an_idle_engine_has_no_timer() -> None:
    async def test() -> None:
        engine = backend()
        await answer(engine, ask(max_tokens=5))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1_000):
                await asyncio.Event().wait()
        assert engine.__repr__() == "<SimulatedBackend sim: <Engine 0 running, 0 waiting, KV 0%, 5 steps>>"

    virtual.run(test())


def test_the_gauge_tells_each_step_once() -> None:
    async def test() -> None:
        engine = backend(**PACE, chunk_tokens=64)
        await answer(engine, ask(max_tokens=3, ignore_eos=True))
        gauge = await engine.gauge()
        assert [(prefill > 0, running) for prefill, running, _, _ in gauge.steps] == [(True, 0), (False, 1), (False, 1)]
        assert [seconds for *_, seconds in gauge.steps[1:]] == pytest.approx([0.01, 0.01])
        assert (await engine.gauge()).steps == ()

    virtual.run(test())


def test_the_same_seed_and_prompt_give_the_same_answer_in_any_company() -> None:
    async def texts(company: int, **config: Any) -> str:
        engine = backend(**config)
        others = [asyncio.ensure_future(answer(engine, ask(max_tokens=90, user=str(n)))) for n in range(company)]
        told = await answer(engine, ask())
        await asyncio.gather(*others)
        return told.text()

    alone = virtual.run(texts(0))
    assert alone == virtual.run(texts(7))
    assert alone == virtual.run(texts(7, max_running=2, chunk_tokens=16))
    assert alone != virtual.run(texts(0, seed=1))


def test_a_request_seed_and_each_choice_change_the_text() -> None:
    async def test() -> None:
        engine = backend()
        plain = await answer(engine, ask(max_tokens=12, n=2, ignore_eos=True))
        seeded = await answer(engine, ask(max_tokens=12, seed=5, ignore_eos=True))
        again = await answer(engine, ask(max_tokens=12, seed=5, ignore_eos=True))
        assert seeded.text() == again.text()
        assert len({plain.text(0), plain.text(1), seeded.text()}) == 3

    virtual.run(test())


def test_output_lengths_follow_the_configured_mean() -> None:
    async def test() -> None:
        engine = backend(output_mean_tokens=40, output_sigma=0.6, speed=1000)
        prompts = [ask(messages=[{"role": "user", "content": f"Number {number}"}]) for number in range(400)]
        answers = [await answer(engine, prompt) for prompt in prompts]
        lengths = [one.usage.completion_tokens for one in answers]
        assert 36 < sum(lengths) / len(lengths) < 44
        assert min(lengths) < 20 < 80 < max(lengths)
        assert all(one.finish_reasons() == ["stop"] for one in answers)

    virtual.run(test())


def test_the_plan_does_not_know_how_long_the_answer_will_be() -> None:
    plan = virtual.run(backend(context_tokens=1_000).plan(ask()))
    assert plan.output_limit == 1_000 - plan.prompt_tokens


def test_usage_agrees_with_the_tokenizer() -> None:
    async def test() -> None:
        told = await answer(backend(), ask(max_tokens=200, ignore_eos=True))
        assert simtext.count(told.text()) == told.usage.completion_tokens == 200

    virtual.run(test())


@pytest.mark.parametrize("text", ["", "a", "  \n\t x", "don't", "naïve 日本語 🙂🙂", "x" * 100, " " * 100])
def test_the_tokenizer_loses_nothing(text: str) -> None:
    assert "".join(simtext.pieces(text)) == text
    assert simtext.least_tokens(text) <= simtext.count(text)


def test_ignore_eos_without_a_limit_goes_to_the_end_of_the_context() -> None:
    async def test() -> None:
        told = await answer(backend(context_tokens=300), ask(ignore_eos=True))
        assert told.usage.prompt_tokens + told.usage.completion_tokens == 300
        assert told.finish_reasons() == ["length"]

    virtual.run(test())


def test_min_tokens_keeps_short_answers_going_and_stop_strings_quiet() -> None:
    async def test() -> None:
        engine = backend(output_mean_tokens=2, output_sigma=0)
        short = await answer(engine, ask())
        long = await answer(engine, ask(min_tokens=30))
        assert (short.usage.completion_tokens, long.usage.completion_tokens) == (2, 30)
        for stop in (" ", [" ", "a much longer one that never comes"]):
            stopped = await answer(engine, ask(min_tokens=30, max_tokens=200, ignore_eos=True, stop=stop))
            assert stopped.usage.completion_tokens > 30
            assert simtext.count(stopped.text()) >= 30
            assert stopped.finish_reasons() == ["stop"]

    virtual.run(test())


def test_a_completion_has_sixteen_tokens_unless_told_otherwise() -> None:
    plan = virtual.run(backend().plan(ask(Kind.COMPLETION)))
    assert plan.output_limit == 16


def test_it_says_that_it_is_simulated_in_every_frame() -> None:
    async def test() -> None:
        for stream in (True, False):
            told = await answer(backend(), ask(max_tokens=3, stream=stream))
            assert {frame["system_fingerprint"] for frame in told.frames} == {"simulated-sim"}

    virtual.run(test())


def test_with_usage_asked_for_every_frame_has_the_field() -> None:
    async def test() -> None:
        told = await answer(
            backend(), ask(max_tokens=3, usage=True, stream_options={"include_usage": True}, stream=True)
        )
        *others, last = told.frames
        assert [frame["usage"] for frame in others] == [None] * len(others)
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]

    virtual.run(test())


def test_a_prefix_that_comes_again_is_reported_as_cached() -> None:
    async def test() -> None:
        engine = backend(prefix_cache=True)
        prompt = ask(messages=[{"role": "user", "content": "word " * 200}], max_tokens=2)
        cold, warm = await answer(engine, prompt), await answer(engine, prompt)
        assert cold.usage.cached_tokens == 0
        assert warm.usage.cached_tokens >= 192
        assert (await answer(backend(), prompt)).usage.cached_tokens == 0

    virtual.run(test())


def test_preemption_under_kv_pressure_changes_no_answer() -> None:
    async def texts(**config: Any) -> tuple[list[str], int]:
        engine = backend(context_tokens=400, speed=100, **config)
        prompts = [ask(user=f"{n}", seed=n, max_tokens=300, ignore_eos=True) for n in range(8)]
        answers = await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))
        return [one.text() for one in answers], (await engine.gauge()).preemptions or 0

    roomy, none = virtual.run(texts())
    tight, some = virtual.run(texts(kv_tokens=800))
    assert (none, some > 0) == (0, True)
    assert roomy == tight


def test_embeddings_are_unit_vectors_that_follow_from_the_text() -> None:
    async def test() -> None:
        engine = backend(embedding_dims=32)
        told = await body(engine, ask(Kind.EMBEDDINGS, stream=False, input=["one", "two", "one"]))
        vectors = [row["embedding"] for row in told["data"]]
        assert [len(vector) for vector in vectors] == [32] * 3
        assert [sum(x * x for x in vector) for vector in vectors] == pytest.approx([1.0] * 3)
        assert vectors[0] == vectors[2] != vectors[1]
        assert told["usage"]["prompt_tokens"] == 3
        packed = await body(
            engine, ask(Kind.EMBEDDINGS, stream=False, input="one", encoding_format="base64", dimensions=8)
        )
        floats = struct.unpack("<8f", base64.b64decode(packed["data"][0]["embedding"]))
        assert sum(x * x for x in floats) == pytest.approx(1.0)

    virtual.run(test())


def test_embeddings_wait_for_their_prefill() -> None:
    async def test() -> None:
        engine = backend(**PACE)
        chunk = await only(engine, ask(Kind.EMBEDDINGS, stream=False, input="word " * 1_000))
        assert chunk.usage is not None
        assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (1_001, 0)
        assert asyncio.get_running_loop().time() > 0.1

    virtual.run(test())


def test_tokenize_counts_without_the_engine() -> None:
    async def test() -> None:
        engine = backend()
        told = await body(
            engine, ask(Kind.TOKENIZE, stream=False, prompt="Hello there, wonderful!", return_token_strs=True)
        )
        assert told["token_strs"] == ["Hello", " there", ",", " wonder", "ful", "!"]
        assert told["count"] == len(told["tokens"]) == 6
        assert told["max_model_len"] == 8_192
        chat = await body(
            engine, ask(Kind.TOKENIZE, stream=False, prompt=..., messages=[{"role": "user", "content": "Hello"}])
        )
        assert chat["token_strs"] is None
        assert chat["count"] == (await engine.plan(ask())).prompt_tokens
        assert (await engine.gauge()).steps == ()

    virtual.run(test())


def test_a_crashed_engine_serves_again_after_resume() -> None:
    async def test() -> None:
        engine = backend()
        stream = await engine.open(await engine.plan(ask(max_tokens=50)))
        assert await stream.next() is not None
        engine.crash()
        with pytest.raises(BackendLost, match="crashed"):
            await stream.next()
        with pytest.raises(BackendLost, match="crashed"):
            await engine.open(await engine.plan(ask()))
        engine.resume()
        assert (await engine.gauge()).running == 0
        told = await answer(engine, ask(max_tokens=5, ignore_eos=True))
        assert told.usage.completion_tokens == 5
        with pytest.raises(BackendLost):
            await stream.next()

    virtual.run(test())


def test_a_hung_engine_is_silent_until_the_watchdog_and_goes_on_after_resume() -> None:
    async def test() -> None:
        engine = backend(watchdog_s=3.0)
        stream = await engine.open(await engine.plan(ask(max_tokens=50, ignore_eos=True)))
        assert await stream.next() is not None
        engine.hang()
        left = await engine.open(await engine.plan(ask(user="left")))
        await left.aclose()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await stream.next()
        assert (await engine.gauge()).running == 1
        await asyncio.sleep(1)
        with pytest.raises(BackendLost, match="hangs"):
            await engine.gauge()
        engine.resume()
        chunks = await to_end(stream)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 50
        assert (await engine.gauge()).running == 0

    virtual.run(test())


def test_a_hang_before_the_first_step_is_seen_too() -> None:
    async def test() -> None:
        engine = backend(watchdog_s=3.0)
        engine.hang()
        await asyncio.sleep(10)
        assert (await engine.gauge()).waiting == 0
        stream = await engine.open(await engine.plan(ask(max_tokens=5, ignore_eos=True)))
        await asyncio.sleep(2.9)
        assert (await engine.gauge()).waiting == 1
        await asyncio.sleep(0.2)
        with pytest.raises(BackendLost, match="hangs"):
            await engine.gauge()
        engine.resume()
        assert len(await to_end(stream)) == 5

    virtual.run(test())


def test_a_closed_backend_stays_closed() -> None:
    async def test() -> None:
        engine = backend()
        plan = await engine.plan(ask())
        await engine.aclose()
        engine.resume()
        with pytest.raises(BackendLost, match="closed"):
            await engine.open(plan)
        with pytest.raises(BackendLost, match="closed"):
            await engine.gauge()

    virtual.run(test())


def test_a_bound_on_waiting_requests_makes_it_busy() -> None:
    async def test() -> None:
        engine = backend(max_running=1, max_waiting=2)
        plans = [await engine.plan(ask(user=f"{n}")) for n in range(4)]
        streams = [await engine.open(plans[0])]
        await streams[0].next()
        streams += [await engine.open(plan) for plan in plans[1:3]]
        with pytest.raises(BackendBusy):
            await engine.open(plans[3])
        for stream in streams:
            await to_end(stream)
        assert len(await to_end(await engine.open(plans[3]))) > 1

    virtual.run(test())


def test_only_its_own_open_plans_are_opened() -> None:
    async def test() -> None:
        engine = backend()
        closed = await engine.plan(ask())
        closed.close()
        other = await SimulatedBackend(Simulated(name="other"), "m").plan(ask())
        for plan in (closed, other):
            with pytest.raises(BackendError):
                await engine.open(plan)

    virtual.run(test())


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("name = ''", "name"),
        ("name = 'a'\nkv_tokens = 100", "kv_tokens must hold"),
        ("name = 'a'\nchunk_tokens = 8", "chunk_tokens must be at least"),
        ("name = 'a'\nspeed = 0", "speed"),
        ("name = 'a'\na0_ms = -1.0", "a0_ms"),
        ("name = 'a'\nmax_runing = 5", "max_runing"),
        ("name = 'a'\n[limits]\nmax_running = -5", "limits.max_running"),
    ],
)
def test_a_wrong_configuration_is_an_error_that_names_the_field(toml: str, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.toml.decode(f"kind = 'simulated'\n{toml}", type=Simulated)
