"""The numbers of a run, checked by hand; prompts of a given length; and single requests against a scripted server."""

import random
import re
import time

import pytest

from bench import goodput, prompts
from bench.arrivals import Planned
from bench.asking import Asking, told_wait_s
from bench.goodput import NOT_YET, Outcome, Record
from bench.prompts import PromptError, Words, calibrated
from bench.report import carries, percentiles
from bench.target import Target, TargetError, words_for
from policies.types import Objective
from tests.support.upstream import Upstream
from tests.support.upstream_frames import Script

AIM = Objective(1000, 100)
AIMS = {"s": AIM}


def record(number: int, first_s: float = 0.5, tokens: int = 11, pace_s: float = 0.05, **more: object) -> Record:
    """An answer to a request that came at `number` seconds."""
    last = number + first_s + (tokens - 1) * pace_s
    given = {
        "asked_prompt_tokens": 100, "prompt_tokens": 100, "output_tokens": tokens, "outcome": Outcome.DONE,
        "status": 200, "first_s": number + first_s, "last_s": last, "end_s": last,
    }  # fmt: skip
    return Record(number, "s", number, more.pop("came_s", number), **(given | more))  # type: ignore[arg-type]


def refused(number: int, after_s: float, reason: str = "queue_full", **more: object) -> Record:
    given = {"outcome": Outcome.REFUSED, "reason": reason, "refused_s": number + after_s, "end_s": number + after_s}
    return Record(number, "s", number, number, **(given | {"asked_prompt_tokens": 50} | more))  # type: ignore[arg-type]


def test_objectives_are_written_as_in_other_tools() -> None:
    assert goodput.goals(["ttft:2000", "tpot:100.4", "e2el:60000"]) == Objective(2000, 100, 60_000)
    assert goodput.goals([]) == Objective()


@pytest.mark.parametrize(
    ("word", "says"),
    [("itl:5", "'itl:5' is not one of ttft:MS, tpot:MS"), ("ttft:x", "needs a number"), ("ttft:0", "must be above 0"),
     ("tpot", "needs a number")],
)  # fmt: skip
def test_objectives_that_make_no_sense_are_named(word: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        goodput.goals([word])


def test_an_answer_is_good_within_all_objectives() -> None:
    assert record(0).good(AIM)
    assert record(0).tpot_ms == pytest.approx(50)
    assert record(0, first_s=1.5).misses(AIM) == ["ttft"]
    assert record(0, pace_s=0.2).misses(AIM) == ["tpot"]
    assert record(0).misses(Objective(0, 0, 900)) == ["e2el"]
    assert not record(0, outcome=Outcome.FAILED).good(AIM)
    assert record(0, tokens=1).tpot_ms == 0


def test_the_numbers_of_a_run() -> None:
    good, late, slow = record(0), record(1, first_s=2.0), record(2, pace_s=0.2)
    gone = record(3, outcome=Outcome.LEFT)
    no, failed = refused(4, 0.1), record(5, outcome=Outcome.FAILED, reason="engine_lost")
    found = goodput.measure([good, late, slow, gone, no, failed], AIMS, 10.0)
    numbers = found["all"]
    assert numbers["requests"] == 5
    assert numbers["goodput_rps"] == pytest.approx(0.1)
    assert numbers["goodput_tps"] == pytest.approx(12.2)
    assert numbers["attained"] == pytest.approx(0.2)
    assert numbers["attained_accepted"] == pytest.approx(0.25)
    assert numbers["refused"] == numbers["failed"] == pytest.approx(0.2)
    assert numbers["ttft_attained"] == numbers["tpot_attained"] == pytest.approx(2 / 3)
    assert numbers["missed_ttft_only"] == pytest.approx(1 / 3)
    assert numbers["wasted"] == pytest.approx(3 / 5)
    assert numbers["left"] == pytest.approx(1 / 6)
    assert numbers["spent_on_left"] == pytest.approx(1 / 5)
    assert numbers["refuse_ms"] == pytest.approx(100)
    assert numbers["refuse_of_deadline"] == pytest.approx(0.1)
    assert numbers["prompt_tps"] == pytest.approx(40)
    assert numbers["ttft_p50_ms"] == pytest.approx(500)
    assert set(found["reasons"]) == {"queue_full", "engine_lost"}
    assert found["reasons"]["queue_full"]["after_p50_ms"] == pytest.approx(100)
    assert list(found["quartiles"]) == ["q1", "q2", "q3", "q4"]
    assert found["quartiles"]["q1"]["refused"] == 1.0
    assert "tenants" not in found


def test_who_came_again_counts_from_the_last_attempt_and_from_the_first() -> None:
    soon = record(5, attempts=2, came_s=4.8, refused_s=4.9)
    late = record(5, attempts=2, came_s=1.0, refused_s=1.1)
    never = refused(6, 0.1, attempts=3)
    numbers = goodput.measure([soon, late, never], AIMS, 10.0)["all"]
    assert numbers["retried"] == 3
    assert numbers["retried_done"] == numbers["retried_good"] == pytest.approx(2 / 3)
    assert numbers["retried_good_from_first"] == pytest.approx(1 / 3)


def test_nothing_divides_by_nothing() -> None:
    assert goodput.measure([], AIMS, 1.0)["all"]["attained"] == 0.0
    assert goodput.measure([refused(0, 0.1)], AIMS, 1.0)["all"]["attained_accepted"] == 0.0


def test_capacity_lies_between_two_loads() -> None:
    curve = [(1.0, 1.0), (2.0, 0.96), (3.0, 0.76)]
    assert carries(curve, 0.9) == pytest.approx(2.3)
    assert carries(curve, 0.99) == pytest.approx(1.25)
    assert carries(curve, 0.5) is None
    assert percentiles([3.0, 1.0, 2.0])[::50] == (1.0, 2.0, 3.0)


# Prompts


async def by_words(text: str) -> int:
    """A tokenizer of whole words, and a template of seven tokens."""
    return len(text.split()) + 7


async def by_letters(text: str) -> int:
    """One that knows single letters only: a word is as many tokens as it has letters."""
    return sum(map(len, text.split())) + 7


async def by_bytes(text: str) -> int:
    return len(text)


async def test_prompts_have_the_tokens_asked_for() -> None:
    for count in (by_words, by_letters):
        words = await calibrated(count)
        for wanted in (20, 77, 1000):
            assert await count(words.prompt(wanted, random.Random(wanted))) == wanted
    assert words.prompt(1, random.Random(1)) == prompts.FIRST


async def test_a_tokenizer_without_words_is_refused() -> None:
    with pytest.raises(PromptError, match="too few short words of one token"):
        await calibrated(by_bytes)


async def test_equal_blocks_are_equal_text() -> None:
    words = await calibrated(by_words)
    one = words.shared(70, [1, 2, 3], 32, random.Random(1)).split()
    two = words.shared(70, [1, 2, 9], 32, random.Random(2)).split()
    assert len(one) + 7 == len(two) + 7 == 70
    same = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    assert same + 7 >= 64


def test_a_folder_without_a_tokenizer_is_named() -> None:
    with pytest.raises(PromptError, match="--tokenizer"):
        prompts.local("/nowhere")


async def test_the_server_counts_by_usage_where_it_has_no_tokenizer() -> None:
    async with Upstream() as site:
        site.apis = tuple(path for path in site.apis if path != "/tokenize")
        target = Target(url=site.url, model="mock")
        pool = target.pool()
        words, by = await words_for(target, pool)
        assert (by, words.overhead) == ("usage", 1)
        assert await target.used(pool, words.prompt(50, random.Random(1))) == 50
        assert await target.models(pool) == {"mock": 4096}
        site.script = Script(status=500)
        with pytest.raises(TargetError, match="answered 500 without usage: scripted"):
            await target.used(pool, "x")
        pool.close()


# Single requests


async def ask(site: Upstream, planned: Planned | None = None, **more: object) -> Record:
    target = Target(url=site.url, model="mock", **more)  # type: ignore[arg-type]
    pool = target.pool()
    try:
        one = planned or Planned(0, 0.0, "s", "", "", 10, 5, float("inf"))
        return await Asking(target, pool, AIMS, time.perf_counter()).run(
            one, target.body("Signal", one.output_tokens, exact=True)
        )
    finally:
        pool.close()


async def test_a_streamed_answer_is_timed_and_counted() -> None:
    async with Upstream(ttft_s=0.02, itl_s=0.01) as site:
        found = await ask(site)
        assert (found.outcome, found.output_tokens, found.prompt_tokens, found.counted) == (Outcome.DONE, 5, 1, True)
        assert found.ttft_ms >= 20
        assert found.tpot_ms >= 10
        assert found.end_s >= found.last_s > found.first_s > found.at_s
        assert 0.01 <= found.stall_s < found.last_s
        sent = site.generations[0].json()
        assert (sent["max_tokens"], sent["ignore_eos"], sent["stream"]) == (5, True, True)


async def test_tokens_are_chunks_where_nobody_counts() -> None:
    async with Upstream() as site:
        site.script = Script(usage=False)
        found = await ask(site, endpoint="completions")
        assert (found.output_tokens, found.counted, found.outcome) == (5, False, Outcome.DONE)


async def test_objectives_key_and_class_go_along() -> None:
    async with Upstream(key="sk-a") as site:
        planned = Planned(0, 0.0, "s", "a", "batch", 10, 5, float("inf"))
        found = await ask(site, planned, keys={"a": "sk-a", "": "sk-b"}, tell=True, deadline_ms=7000)
        assert found.outcome is Outcome.DONE
        headers = site.seen[0].headers
        told = {name: headers[name] for name in ("x-priority-class", "x-slo-ttft-ms", "x-slo-tpot-ms", "x-deadline-ms")}
        assert list(told.values()) == ["batch", "1000", "100", "7000"]


REFUSAL = Script(status=429, headers={"retry-after-ms": "30", "retry-after": "9"})


async def test_a_refused_client_comes_again_as_told_and_no_oftener() -> None:
    async with Upstream() as site:
        site.scripts.extend([REFUSAL, REFUSAL])
        found = await ask(site, retries=2)
        assert (found.outcome, found.attempts) == (Outcome.DONE, 3)
        assert found.at_s >= found.came_s + 0.06
        assert found.refused_s < found.at_s
        assert len({one.headers["idempotency-key"] for one in site.generations}) == 1
        site.scripts.extend([REFUSAL, REFUSAL])
        found = await ask(site, retries=1)
        assert (found.outcome, found.attempts, found.reason) == (Outcome.REFUSED, 2, "scripted")
        assert found.first_s == NOT_YET


def test_how_long_a_client_is_told_to_wait() -> None:
    assert told_wait_s({b"retry-after": b"3"}) == 3.0
    assert told_wait_s({b"retry-after": b"3", b"x-should-retry": b"false"}) is None
    assert told_wait_s({b"retry-after": b"Wed, 21 Oct 2026 07:28:00 GMT"}) is None
    assert told_wait_s({}) is None


@pytest.mark.parametrize(
    ("script", "outcome", "reason"),
    [
        (Script(status=503, body="{}"), Outcome.REFUSED, "http_503"),
        (Script(status=400), Outcome.FAILED, "scripted"),
        (Script(close_at=2), Outcome.FAILED, "Broken"),
        (Script(error_at=2, done=False), Outcome.FAILED, "server_error"),
        (Script(tokens=0, done=False), Outcome.DONE, ""),
    ],
)
async def test_how_requests_end(script: Script, outcome: Outcome, reason: str) -> None:
    async with Upstream() as site:
        site.script = script
        found = await ask(site)
        assert (found.outcome, found.reason) == (outcome, reason)


async def test_a_client_that_leaves_is_off_the_server() -> None:
    async with Upstream() as site:
        site.script = Script(hold_at=2)
        found = await ask(site, Planned(0, 0.0, "s", "", "", 10, 5, 0.2))
        assert (found.outcome, found.started) == (Outcome.LEFT, True)
        await site.until(lambda: site.aborted == 1)


async def test_nobody_there_is_a_failure_not_a_crash() -> None:
    async with Upstream() as site:
        gone = site.url
    target = Target(url=gone, model="mock")
    pool = target.pool()
    one = Planned(0, 0.0, "s", "", "", 10, 5, float("inf"))
    found = await Asking(target, pool, AIMS, time.perf_counter()).run(one, b"{}")
    assert (found.outcome, found.reason) == (Outcome.FAILED, "NotConnected")
    pool.close()


def test_words_are_immutable_and_short() -> None:
    assert Words((" a",), 3).prompt(5, random.Random(1)) == "Signal a a"
