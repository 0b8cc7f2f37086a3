"""Prompt tokens from bytes, and what a prefix cache saves."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.prompts import HITS_ENOUGH, PrefixHits, PromptRatio

TENANT = ("acme", "chat", "gpu-0")


def taught(tokens_per_byte: float, spread: float, count: int, rng: random.Random) -> PromptRatio:
    ratio = PromptRatio()
    for _ in range(count):
        size = rng.randint(200, 20_000)
        ratio.add(size, max(1, round(size * rng.gauss(tokens_per_byte, spread))))
    return ratio


@pytest.mark.parametrize(("tokens_per_byte", "spread"), [(0.22, 0.02), (0.33, 0.05), (0.5, 0.08)])
def test_it_learns_the_language_of_a_pool(tokens_per_byte: float, spread: float) -> None:
    rng = random.Random(1)
    ratio = taught(tokens_per_byte, spread, 400, rng)
    likely, within = [], 0
    for _ in range(500):
        size = rng.randint(200, 20_000)
        tokens = size * rng.gauss(tokens_per_byte, spread)
        guess = ratio.tokens(size)
        likely.append(guess.likely / (size * tokens_per_byte))
        within += guess.least <= tokens <= guess.most
    assert sum(likely) / 500 == pytest.approx(1.0, abs=0.08)
    assert within / 500 >= 0.85


def test_it_follows_a_pool_that_changes() -> None:
    rng = random.Random(2)
    ratio = taught(0.22, 0.02, 300, rng)
    for _ in range(80):
        ratio.add(8000, round(8000 * rng.gauss(0.45, 0.03)))
    assert ratio.tokens(1000).likely == pytest.approx(450, rel=0.1)


def test_short_prompts_hardly_count() -> None:
    """Twenty bytes of text and thirty tokens of template say nothing about the tokens of text."""
    ratio = taught(0.25, 0.0, 200, random.Random(3))
    for _ in range(100):
        ratio.add(20, 35)
    assert ratio.tokens(10_000).likely < 4500


def test_before_the_first_sample_it_is_cautious() -> None:
    ratio = PromptRatio()
    assert repr(ratio) == "<PromptRatio 0.250 ± 0.050 tokens per byte, 0 samples>"
    guess = ratio.tokens(4000)
    assert (guess.least, guess.likely, guess.most) == (600, 1000, 1400)
    assert ratio.tokens(0).most == 1
    ratio.add(0, 10)
    ratio.add(10, 0)
    assert ratio.samples == 0


@given(st.lists(st.tuples(st.integers(1, 100_000), st.integers(1, 100_000)), max_size=60), st.integers(0, 10**7))
def test_whatever_comes_the_bounds_hold(samples: list[tuple[int, int]], size: int) -> None:
    ratio = PromptRatio()
    for sample in samples:
        ratio.add(*sample)
    guess = ratio.tokens(size)
    assert 1 <= guess.least <= guess.likely <= guess.most <= max(1, size)
    assert guess.least >= size // 16
    assert ratio.tokens(size + 1000).most >= guess.most


def test_bad_input_names_its_field() -> None:
    with pytest.raises(ValueError, match="prompt_bytes"):
        PromptRatio().add(-1, 1)
    with pytest.raises(ValueError, match="prompt_tokens"):
        PromptRatio().add(1, -1)
    with pytest.raises(ValueError, match="prompt_bytes"):
        PromptRatio().tokens(-1)
    with pytest.raises(ValueError, match="cached_tokens"):
        PrefixHits().add(TENANT, 10, 11)
    with pytest.raises(ValueError, match="cached_tokens"):
        PrefixHits().add(TENANT, 10, -1)
    with pytest.raises(ValueError, match="max_keys"):
        PrefixHits(max_keys=0)


def test_unknown_prefixes_are_not_cached() -> None:
    hits = PrefixHits()
    for _ in range(HITS_ENOUGH - 1):
        hits.add(TENANT, 1000, 990)
        assert hits.uncached(TENANT, 1000) == 1000
    hits.add(TENANT, 1000, 990)
    assert hits.uncached(TENANT, 1000) < 1000
    assert hits.uncached(("other", "chat", "gpu-0"), 1000) == 1000
    assert hits.uncached(("other", "chat", "gpu-0"), 0) == 1
    hits.add(("other", "chat", "gpu-0"), 0, 0)
    assert len(hits) == 1


def test_steady_hits_are_believed_and_mixed_ones_less() -> None:
    hits, rng = PrefixHits(), random.Random(4)
    for _ in range(200):
        hits.add("steady", 1000, 800)
        hits.add("mixed", 1000, rng.choice((0, 1000)))
    assert hits.uncached("steady", 1000) == pytest.approx(200, abs=5)
    assert hits.uncached("mixed", 1000) > 700
    hits.forget("steady")
    hits.forget("never known")
    assert hits.uncached("steady", 1000) == 1000


@given(st.lists(st.integers(0, 500), max_size=60), st.integers(0, 5000))
def test_uncached_is_at_least_one_and_at_most_all(cached: list[int], prompt: int) -> None:
    hits = PrefixHits()
    for tokens in cached:
        hits.add(TENANT, 500, tokens)
    assert 1 <= hits.uncached(TENANT, prompt) <= max(1, prompt)


def test_keys_are_bounded() -> None:
    hits = PrefixHits(max_keys=10)
    for _ in range(HITS_ENOUGH):
        hits.add("kept", 100, 90)
    for key in range(100):
        hits.add(key, 100, 50)
        hits.uncached("kept", 100)
    assert repr(hits) == "<PrefixHits 10/10 keys>"
    assert hits.uncached("kept", 100) < 100
