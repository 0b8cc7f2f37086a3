"""Output lengths on distributions whose truth is known."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.lengths import ENOUGH, TARGET, Kind, Lengths, Outlook, Survival

CHAT = Kind("acme", "llama", "chat")
CAP = 100_000

# Output tokens of public traces at 0, 5, 10 ... 100 % (Azure 2023 code and chat, ShareGPT, BookCorpus translation).
TRACES = {
    "code": (6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 55, 90, 1899),
    "chat": (7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 1000),
    "sharegpt": (2, 44, 84, 130, 181, 228, 271, 312, 346, 381, 415, 453, 493, 534, 581, 628, 683, 754, 834, 920, 1024),
    "translation": (
        *(9, 1029, 1228, 1318, 1377, 1425, 1471, 1509, 1545, 1577),
        *(1608, 1636, 1665, 1696, 1729, 1768, 1828, 1950, 2138, 2341, 2798),
    ),
}


def from_table(table: tuple[int, ...], rng: random.Random) -> int:
    at = rng.random() * (len(table) - 1)
    low = int(at)
    return round(table[low] + (at - low) * (table[low + 1] - table[low]))


def lognormal(rng: random.Random) -> int:
    return max(1, round(rng.lognormvariate(5.0, 0.9)))


def bimodal(rng: random.Random) -> int:
    return max(1, round(rng.gauss(30, 8) if rng.random() < 0.6 else rng.gauss(800, 120)))


SOURCES = {
    "lognormal": lognormal,
    "bimodal": bimodal,
    **{name: (lambda rng, table=table: from_table(table, rng)) for name, table in TRACES.items()},
}


def learned(samples: list[tuple[int, bool]], kind: Kind = CHAT) -> Lengths:
    lengths = Lengths()
    for tokens, censored in samples:
        lengths.add(kind, tokens, censored)
    return lengths


@pytest.mark.parametrize("source", SOURCES)
def test_the_upper_quantile_covers_nine_in_ten(source: str) -> None:
    rng, draw = random.Random(source), SOURCES[source]
    lengths = learned([(draw(rng), False) for _ in range(512)])
    warm = lengths.coverage
    hits = 0
    for _ in range(2000):
        tokens = draw(rng)
        hits += tokens <= lengths.outlook(CHAT, 0, CAP).q90
        lengths.add(CHAT, tokens)
    assert 0.87 <= hits / 2000 <= 0.93
    judged = lengths.coverage.judged - warm.judged
    assert judged == 2000
    assert (lengths.coverage.covered - warm.covered) / judged == pytest.approx(hits / 2000, abs=0.01)


@pytest.mark.parametrize("source", SOURCES)
def test_mean_and_variance_are_those_of_the_longer_ones(source: str) -> None:
    rng, draw = random.Random(source), SOURCES[source]
    samples = [draw(rng) for _ in range(512)]
    lengths = learned([(tokens, False) for tokens in samples])
    lengths.outlook(CHAT, 0, CAP)
    for generated in (0, statistics.median_low(samples), sorted(samples)[450]):
        longer = [tokens for tokens in samples if tokens > generated]
        outlook = lengths.outlook(CHAT, generated, CAP)
        assert outlook.mean == pytest.approx(statistics.fmean(longer), rel=0.05)
        assert outlook.variance == pytest.approx(statistics.pvariance(longer), rel=0.25, abs=20)
        assert outlook.samples == 512


def test_cancelled_answers_are_not_short_ones() -> None:
    """A third leaves at a random moment: the estimate is of what would have come, not of what was seen."""
    rng = random.Random(7)
    lengths, seen, whole = Lengths(), [], []
    for _ in range(3000):
        tokens = lognormal(rng)
        left = round(rng.expovariate(1 / 300))
        lengths.add(CHAT, min(tokens, left), censored=left < tokens)
        seen.append(min(tokens, left))
        whole.append(tokens)
    outlook = lengths.outlook(CHAT, 0, CAP)
    assert sum(a < b for a, b in zip(seen, whole, strict=True)) > 0.3 * 3000
    assert outlook.mean == pytest.approx(statistics.fmean(whole), rel=0.15)
    assert statistics.fmean(seen) < 0.7 * outlook.mean
    assert lengths.coverage.ratio == pytest.approx(TARGET, abs=0.03)


def test_censoring_in_numbers() -> None:
    """10, 20+, 30, 40+: Kaplan-Meier says S = 3/4, 3/4, 3/8; the rest lies at 1.5 times the longest."""
    survival = Survival([20, 41, 60, 81])
    assert survival.exceeds(10, 0) == pytest.approx(3 / 4)
    assert survival.exceeds(29, 0) == pytest.approx(3 / 4)
    assert survival.exceeds(30, 0) == pytest.approx(3 / 8)
    assert survival.exceeds(60, 0) == 0.0
    assert survival.exceeds(99, 60) == 0.0
    assert survival.quantile(0, 0.25) == 10
    assert survival.quantile(0, 0.625) == 30
    assert survival.quantile(0, 0.63) == 60
    mean, variance = survival.moments(10, CAP)
    assert mean == pytest.approx(45.0)
    assert variance == pytest.approx(15.0**2)
    assert survival.moments(10, 40)[0] == pytest.approx(35.0)


def test_recovery_after_a_shift() -> None:
    """Answers become five times as long: 100 answers later nine in ten are covered again, and it falls back too."""
    rng = random.Random(3)
    lengths = learned([(lognormal(rng), False) for _ in range(600)])

    def hits(factor: int, count: int) -> float:
        covered = 0
        for _ in range(count):
            tokens = factor * lognormal(rng)
            covered += tokens <= lengths.outlook(CHAT, 0, CAP).q90
            lengths.add(CHAT, tokens)
        return covered / count

    assert hits(5, 100) < 0.9
    assert hits(5, 300) >= 0.87
    hits(5, 700)
    wide = lengths.outlook(CHAT, 0, CAP).q90
    hits(1, 800)
    assert lengths.outlook(CHAT, 0, CAP).q90 < wide / 3
    assert 0.85 <= hits(1, 500) <= 0.95


def test_back_off_goes_from_the_finest_kind_to_the_model_to_nothing() -> None:
    lengths = Lengths()
    for count in range(ENOUGH):
        assert lengths.outlook(CHAT, 0, CAP) == Outlook(512.0, 256.0**2, 1, 512, 0)
        lengths.add(CHAT, 100 + count)
    assert lengths.outlook(CHAT, 0, CAP).samples == ENOUGH
    assert lengths.outlook(Kind("acme", "llama", "tools"), 0, CAP).q90 == lengths.outlook(CHAT, 0, CAP).q90
    assert lengths.outlook(Kind("other", "llama"), 0, CAP).samples == ENOUGH
    assert lengths.outlook(Kind("acme", "mistral", "chat"), 0, CAP).samples == 0
    for _ in range(ENOUGH):
        lengths.add(Kind("other", "llama"), 9)
    assert lengths.outlook(Kind("other", "llama", "chat"), 0, CAP).q90 == 9
    assert lengths.outlook(CHAT, 0, CAP).q90 > 100


def test_without_history_the_guess_is_cautious_and_capped() -> None:
    lengths = Lengths()
    assert lengths.outlook(CHAT, 0, 50) == Outlook(50.0, 25.0**2, 1, 50, 0)
    assert lengths.outlook(CHAT, 1000, CAP) == Outlook(1500.0, 250.0**2, 1001, 1500, 0)


def test_beyond_all_history_it_grows_by_half() -> None:
    lengths = learned([(10, False)] * 40)
    assert lengths.outlook(CHAT, 10, CAP).mean == 15.0
    assert lengths.outlook(CHAT, 1000, CAP).q90 == 1500
    assert lengths.outlook(CHAT, 1000, 1200).q90 == 1200
    assert lengths.outlook(CHAT, 1, CAP).q90 == 10
    assert lengths.outlook(CHAT, 64, 64) == Outlook(64.0, 0.0, 64, 64, 40)


def test_empty_answers_and_cancellations_before_the_first_token() -> None:
    lengths = learned([(0, True)] * 100)
    assert len(lengths) == 0
    lengths = learned([(0, False)] * 40)
    assert lengths.outlook(CHAT, 0, CAP).q90 == 1
    lengths.add(CHAT, 3)
    assert lengths.coverage.ratio < 1.0


def test_windows_are_bounded_and_the_model_stays() -> None:
    lengths = Lengths(max_windows=8)
    for count in range(200):
        lengths.add(Kind(f"tenant-{count}", "llama"), 20)
    assert len(lengths) == 8
    assert lengths.outlook(Kind("tenant-0", "llama"), 0, CAP).samples == 200
    assert repr(lengths) == "<Lengths 8 windows, 170 judged, 100.0% covered>"


def test_bad_input_names_its_field() -> None:
    lengths = Lengths()
    assert lengths.coverage.ratio == 1.0
    with pytest.raises(ValueError, match="max_windows"):
        Lengths(max_windows=2)
    with pytest.raises(ValueError, match="tokens"):
        lengths.add(CHAT, -1)
    with pytest.raises(ValueError, match="generated"):
        lengths.outlook(CHAT, -1, 10)
    with pytest.raises(ValueError, match="cap"):
        lengths.outlook(CHAT, 0, 0)


samples_of_any_kind = st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=120)


@given(samples_of_any_kind, st.integers(1, 400))
def test_outlooks_stay_in_bounds_and_never_shrink_as_tokens_come(samples: list[tuple[int, bool]], cap: int) -> None:
    lengths = learned(samples)
    last = Outlook(0.0, 0.0, 0, 0, 0)
    for generated in range(0, cap, 7):
        outlook = lengths.outlook(CHAT, generated, cap)
        assert generated < outlook.q10 <= outlook.q90 <= cap
        assert generated < outlook.mean <= cap
        assert 0.0 <= outlook.variance <= (cap - generated) ** 2
        assert outlook.q90 >= last.q90
        assert outlook.mean >= last.mean - 1e-6
        last = outlook


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=80))
def test_survival_is_kaplan_and_meiers(samples: list[tuple[int, bool]]) -> None:
    survival = Survival(sorted(2 * tokens + censored for tokens, censored in samples))
    expected = 1.0
    for length in range(1, 61):
        at_risk = sum(tokens >= length for tokens, _ in samples)
        ended = sum(tokens == length and not censored for tokens, censored in samples)
        expected *= 1.0 - (ended / at_risk if at_risk else 0.0)
        if length <= max(tokens for tokens, _ in samples):
            assert math.isclose(survival.exceeds(length, 0), expected, abs_tol=1e-9)
