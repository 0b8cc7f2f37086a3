"""The engine model: what a step holds, how long it takes, and that nothing is lost or kept."""

import random

import pytest

from backends.simengine import Engine, Sequence, Shape, StepTime

PLAIN = StepTime(
    a0_ms=10, a1_us_per_prefill_token=100, a2_us_per_running=0, a3_us_per_kv_token=0, a4_us_per_context_token=0
)


def drain(engine: Engine) -> float:
    """Steps until the engine is idle; the seconds that took."""
    seconds = 0.0
    while (step := engine.step()) is not None:
        seconds += step[0].seconds
    assert engine.idle
    assert engine.kv_used == 0
    return seconds


def test_the_step_time_is_the_sum_of_its_parts() -> None:
    step_time = StepTime(
        a0_ms=1, a1_us_per_prefill_token=10, a2_us_per_running=100, a3_us_per_kv_token=0.5, a4_us_per_context_token=2
    )
    assert step_time.seconds(0, 0, 0, 0) == pytest.approx(0.001)
    assert step_time.seconds(100, 3, 2_000, 50) == pytest.approx(0.001 + 0.001 + 0.0003 + 0.001 + 0.0001)


def test_a_prompt_is_prefilled_in_chunks_and_then_decodes() -> None:
    engine = Engine(Shape(chunk_tokens=100), PLAIN)
    sequence = Sequence(250, 3)
    engine.add(sequence)
    seen = []
    while (step := engine.step()) is not None:
        seen.append((step[0].prefill_tokens, step[0].running, sequence.produced))
    assert seen == [(100, 0, 0), (100, 0, 0), (50, 0, 1), (0, 1, 2), (0, 1, 3)]
    assert sequence.done


def test_decodes_go_first_and_prompts_share_what_is_left_of_the_chunk() -> None:
    engine = Engine(Shape(chunk_tokens=100), PLAIN)
    engine.add(Sequence(90, 50))
    engine.step()
    engine.add(Sequence(150, 1))
    engine.add(Sequence(150, 1))
    steps = [engine.step() for _ in range(3)]
    assert [(step[0].running, step[0].prefill_tokens) for step in steps if step] == [(1, 99), (1, 99), (1, 99)]
    assert [sum(tokens for _, tokens in step[0].work) for step in steps if step] == [100, 100, 100]


def test_no_more_run_than_allowed_and_first_come_first_served() -> None:
    engine = Engine(Shape(max_running=2, chunk_tokens=512), PLAIN)
    sequences = [Sequence(10, 4) for _ in range(5)]
    for sequence in sequences:
        engine.add(sequence)
    ended: list[Sequence] = []
    while (step := engine.step()) is not None:
        assert engine.running <= 2
        ended += [one for one in step[1] if one.done]
    assert ended == sequences


def test_the_newest_is_preempted_when_blocks_run_out_and_keeps_what_it_produced() -> None:
    engine = Engine(Shape(kv_tokens=320, kv_block=16), PLAIN)
    older, newer = Sequence(100, 150), Sequence(100, 150)
    engine.add(older)
    engine.add(newer)
    produced = 0
    while engine.step() is not None:
        assert newer.produced >= produced
        produced = newer.produced
        if newer.held is None and not newer.done:
            assert newer.computed == 0
    assert engine.preemptions >= 1
    assert older.done
    assert newer.done
    assert engine.kv_used == 0


def test_what_could_never_fit_is_refused() -> None:
    engine = Engine(Shape(kv_tokens=160), PLAIN)
    engine.add(Sequence(100, 60))
    with pytest.raises(ValueError, match="do not fit"):
        engine.add(Sequence(100, 61))


def test_a_chunk_must_hold_a_decode_of_each() -> None:
    with pytest.raises(ValueError, match="chunk_tokens"):
        Engine(Shape(chunk_tokens=8, max_running=9), PLAIN)


def test_a_cancelled_one_leaves_at_the_end_of_its_step() -> None:
    engine = Engine(Shape(), PLAIN)
    running, waiting = Sequence(10, 50), Sequence(10, 50)
    engine.add(running)
    step = engine.plan()
    engine.add(waiting)
    engine.cancel(waiting)
    assert engine.waiting == 0
    engine.cancel(running)
    assert engine.running == 1
    assert step is not None
    assert engine.apply(step) == []
    assert engine.idle
    assert engine.kv_used == 0
    engine.cancel(running)
    assert engine.plan() is None


def test_a_prompt_alone_ends_with_its_prefill() -> None:
    engine = Engine(Shape(chunk_tokens=64), PLAIN)
    sequence = Sequence(100, 0)
    engine.add(sequence)
    ended = [step[1] for _ in range(2) if (step := engine.step())]
    assert ended == [[], [sequence]]
    assert sequence.produced == 0
    assert engine.idle


def test_a_known_prefix_is_not_computed_again() -> None:
    engine = Engine(Shape(prefix_cache=True, kv_block=16, kv_tokens=1_600), PLAIN)
    names = tuple(range(6))  # of 96 of the 100 tokens
    first = Sequence(100, 5, names)
    engine.add(first)
    cold_s = drain(engine)
    again, other, whole = Sequence(100, 5, names), Sequence(100, 5, (0, 1, 99)), Sequence(96, 5, names)
    engine.add(again)
    warm_s = drain(engine)
    assert (first.cached_tokens, again.cached_tokens) == (0, 96)
    assert warm_s == pytest.approx(cold_s - 0.0096)
    engine.add(other)
    engine.add(whole)
    drain(engine)
    assert other.cached_tokens == 32
    assert whole.cached_tokens == 95  # one token must be computed to go on


def test_kept_blocks_make_room_when_it_is_needed() -> None:
    engine = Engine(Shape(prefix_cache=True, kv_block=16, kv_tokens=160), PLAIN)
    for prompt in range(5):
        engine.add(Sequence(100, 10, tuple(100 * prompt + block for block in range(6))))
        drain(engine)
    again = Sequence(100, 10, tuple(400 + block for block in range(6)))
    engine.add(again)
    drain(engine)
    assert again.cached_tokens == 96


@pytest.mark.parametrize("seed", range(20))
def test_random_work_ends_and_leaves_nothing(seed: int) -> None:
    dice = random.Random(seed)
    shape = Shape(
        chunk_tokens=dice.choice((16, 64, 512)),
        max_running=dice.choice((1, 4, 16)),
        kv_tokens=dice.choice((320, 1_000, 4_000)),
        kv_block=dice.choice((1, 16)),
        prefix_cache=True,
    )
    engine = Engine(shape, StepTime())
    todo = [_random_sequence(dice, shape) for _ in range(60)]
    alive, counted = [], {sequence: 0 for sequence in todo}
    for _ in range(20_000):
        if todo and dice.random() < 0.3:
            alive.append(todo.pop())
            engine.add(alive[-1])
        if alive and dice.random() < 0.02:
            engine.cancel(dice.choice(alive))
        step = engine.step()
        if step is None and not todo:
            break
        assert 0 <= engine.kv_used <= 1
        assert engine.running <= shape.max_running
        for sequence, tokens in step[0].work if step else ():
            assert tokens >= 1
            assert sequence.computed <= sequence.known
        for sequence in step[1] if step else ():
            counted[sequence] += 1
    assert engine.idle
    assert engine.kv_used == 0
    for sequence in alive:
        assert sequence.cancelled or sequence.done
        assert sequence.produced == counted[sequence]


def _random_sequence(dice: random.Random, shape: Shape) -> Sequence:
    prompt = dice.randrange(1, 200)
    prefix = tuple(dice.randrange(3) * 1_000 + block for block in range(prompt // shape.kv_block))
    return Sequence(prompt, dice.randrange(1, 100), prefix)
