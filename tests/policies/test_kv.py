"""KV arithmetic: bytes, budgets, peaks, sums and their margin."""

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.kv import (
    FEW,
    Deviations,
    KvMismatch,
    KvShape,
    KvSums,
    Memory,
    check_reported,
    floored,
    kv_budget,
    peak_tokens,
    rounded,
    shape_from_config,
    usable_tokens,
)

LLAMA_8B: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
GIB = 2**30


def test_bytes_of_known_models() -> None:
    assert shape_from_config(LLAMA_8B).bytes_per_token == 131_072
    assert shape_from_config(LLAMA_8B, kv_dtype="fp8").bytes_per_token == 65_536
    assert shape_from_config(LLAMA_8B, ranks=4).bytes_per_token == 32_768
    assert shape_from_config(LLAMA_8B, ranks=16).bytes_per_token == 16_384  # 8 heads on 16 ranks: one each
    opt_125m = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768, "torch_dtype": "float16"}
    assert shape_from_config(opt_125m).bytes_per_token == 36_864
    gemma = {**LLAMA_8B, "head_dim": 256, "dtype": "bfloat16"}
    assert shape_from_config(gemma).bytes_per_token == 262_144


def test_latent_attention_keeps_one_vector_per_layer() -> None:
    deepseek_v3 = {
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    }
    shape = shape_from_config(deepseek_v3, ranks=8)
    assert shape.latent_dim == 576
    assert shape.bytes_per_token == 61 * 576 * 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": "32"}, "num_attention_heads"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"torch_dtype": "float1"}, "dtype.*float1"),
        ({"torch_dtype": None}, "dtype"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
    ],
)
def test_a_config_that_lacks_something_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        shape_from_config({**LLAMA_8B, **change})


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "dtype_bytes", "ranks"])
def test_a_shape_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        KvShape(**{"layers": 2, "kv_heads": 2, "head_dim": 64, field: 0})


def test_the_budget_is_what_the_rest_leaves() -> None:
    memory = Memory(
        memory_bytes=80 * GIB, weights_bytes=16 * GIB, activations_bytes=3 * GIB, overhead_bytes=GIB, headroom=0.05
    )
    budget = kv_budget(memory, shape_from_config(LLAMA_8B), block_tokens=16)
    assert budget.capacity_tokens == 60 * GIB // 131_072
    assert budget.budget_tokens == floored(int(0.95 * budget.capacity_tokens), 16)
    with pytest.raises(ValueError, match=r"weights_bytes 17179869184.*leaves -1073741824 bytes"):
        kv_budget(Memory(memory_bytes=15 * GIB, weights_bytes=16 * GIB), shape_from_config(LLAMA_8B), block_tokens=16)
    with pytest.raises(ValueError, match="headroom"):
        Memory(memory_bytes=GIB, weights_bytes=0, headroom=1.0)
    with pytest.raises(ValueError, match="block_tokens"):
        kv_budget(memory, shape_from_config(LLAMA_8B), block_tokens=0)


def test_what_the_engine_reports_is_held_against_it() -> None:
    check_reported(100_000, 100_000)
    check_reported(100_000, 90_001)
    check_reported(100_000, 109_999)
    for reported in (80_000, 120_000, 0):
        with pytest.raises(KvMismatch, match=f"{reported}.*100000"):
            check_reported(100_000, reported)


def brute_peak(running: list[tuple[int, int]]) -> int:
    """Token by token: each holds what it has, grows by one a step, and leaves after its last."""
    steps = range(max(remaining for _, remaining in running) + 1)
    return max(sum(held + step for held, remaining in running if remaining >= step) for step in steps)


requests = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40)), min_size=1, max_size=12)


@given(requests)
def test_the_peak_is_that_of_the_steps(running: list[tuple[int, int]]) -> None:
    peak = peak_tokens(running)
    assert peak == brute_peak(running)
    assert peak <= sum(held + remaining for held, remaining in running)
    assert peak >= sum(held for held, _ in running)


@given(requests, st.integers(1, 32))
def test_blocks_only_add(running: list[tuple[int, int]], block: int) -> None:
    blocked = peak_tokens(running, block)
    assert peak_tokens(running) <= blocked <= peak_tokens(running) + 2 * (block - 1) * len(running)
    assert blocked % block == 0
    assert rounded(running[0][0], block) - floored(running[0][0], block) in (0, block)


def test_nothing_running_needs_nothing() -> None:
    assert peak_tokens([]) == 0
    assert KvSums().need(2.0) == 0.0


def test_sums_cover_what_comes() -> None:
    """64 answers of a known distribution: mean and two deviations hold in 19 of 20, the sum of q90 costs more."""
    rng = random.Random(5)
    draws = [rng.expovariate(1 / 200) for _ in range(20_000)]
    sums = KvSums()
    for _ in range(64):
        sums = sums.plus(500 + 200.0, 200.0**2, 500 + 200 * math.log(10))
    totals = [64 * 500 + sum(rng.choices(draws, k=64)) for _ in range(500)]
    held = sum(total <= sums.need(2.0) for total in totals) / 500
    assert held >= 0.94
    assert sums.need(2.0) < sums.q90_tokens
    assert sums.need(3.0) > sums.need(2.0)


def test_a_few_requests_are_summed_by_quantiles() -> None:
    sums = KvSums()
    for count in range(1, FEW):
        sums = sums.plus(100, 10, 300)
        assert sums.need(2.0) == 300 * count
    assert sums.plus(100, 10, 300).need(2.0) == pytest.approx(100 * FEW + 2 * math.sqrt(10 * FEW))


def test_what_the_ledger_does_not_know_is_taken_off() -> None:
    assert usable_tokens(1000, ledger_tokens=300, reported_tokens=300) == 1000
    assert usable_tokens(1000, ledger_tokens=300, reported_tokens=100) == 1000
    assert usable_tokens(1000, ledger_tokens=300, reported_tokens=450) == 850
    assert usable_tokens(1000, ledger_tokens=0, reported_tokens=5000) == 0
    assert usable_tokens(1000, ledger_tokens=300, reported_tokens=None) == 800


def test_deviations_rise_on_preemptions_and_fall_in_quiet() -> None:
    deviations = Deviations(now=0.0)
    assert deviations.observe(1, 1.0) == 2.0  # one alone is an accident
    assert deviations.observe(1, 50.0) == 2.5
    assert deviations.observe(1, 60.0) == 2.5
    assert deviations.observe(1, 130.0) == 2.5  # more than a minute later
    assert deviations.observe(5, 131.0) == 3.0
    assert deviations.observe(0, 730.0) == 3.0
    assert deviations.observe(0, 731.0) == pytest.approx(2.9)
    assert deviations.observe(0, 732.0) == pytest.approx(2.9)
    for minute in range(1000):
        deviations.observe(0, 800.0 + 600 * minute)
    assert deviations.z == 0.0
    for second in range(100):
        deviations.observe(2, 1e6 + second)
    assert deviations.z == 6.0
    assert repr(deviations) == "<Deviations 6.0>"
