"""A model of one LLM engine, step by step: chunked prefill, continuous batching, KV blocks, preemption.

Pure: no clock, no I/O. A caller plans a step, lets its seconds pass, and applies it; `step` does both
for those who keep time themselves.
"""

from collections import deque
from typing import Annotated

from msgspec import Meta, Struct

from backends.simblocks import Blocks, Held

NotNegative = Annotated[float, Meta(ge=0)]


class StepTime(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long one model step takes. The defaults are those of an 8B model on an A100, rounded.

    `running` counts decoding sequences, `kv_tokens` the sum of their contexts, `context_tokens` what the prompts in
    prefill had computed before this step.
    """

    a0_ms: NotNegative = 15.0
    a1_us_per_prefill_token: NotNegative = 81.0
    a2_us_per_running: NotNegative = 95.0
    a3_us_per_kv_token: NotNegative = 0.11
    a4_us_per_context_token: NotNegative = 0.76

    def seconds(self, prefill_tokens: int, running: int, kv_tokens: int, context_tokens: int) -> float:
        micros = (
            self.a1_us_per_prefill_token * prefill_tokens
            + self.a2_us_per_running * running
            + self.a3_us_per_kv_token * kv_tokens
            + self.a4_us_per_context_token * context_tokens
        )
        return self.a0_ms * 1e-3 + micros * 1e-6


class Shape(Struct, frozen=True, kw_only=True):
    """The limits of an engine. `chunk_tokens` bounds one step: decodes first, prompts with what is left."""

    chunk_tokens: int = 512
    max_running: int = 64
    kv_tokens: int = 200_000
    kv_block: int = 16
    prefix_cache: bool = False


class Sequence:
    """One prompt and the tokens that follow it.

    `output_tokens` is when it ends by itself; 0 ends with the prefill and produces nothing. `prefix` names the prompt's
    full blocks, each together with all before it, where prompts may share them.
    """

    __slots__ = (
        "cached_tokens",
        "cancelled",
        "computed",
        "held",
        "output_tokens",
        "prefix",
        "produced",
        "prompt_tokens",
    )

    def __init__(self, prompt_tokens: int, output_tokens: int, prefix: tuple[int, ...] = ()) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.prefix = prefix
        self.computed = 0  # tokens whose keys and values are in the cache
        self.produced = 0
        self.cached_tokens = 0  # of the prompt, found in the prefix cache when it was first scheduled
        self.cancelled = False
        self.held: Held | None = None

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled else "running" if self.held else "waiting"
        return (
            f"<Sequence {state}, {self.computed}/{self.known} computed, {self.produced}/{self.output_tokens} produced>"
        )

    @property
    def known(self) -> int:
        """Tokens there are: the prompt and what has been produced."""
        return self.prompt_tokens + self.produced

    @property
    def decoding(self) -> bool:
        """Everything but the newest token is computed, so that the next step produces one."""
        return self.produced > 0 and self.computed >= self.known - 1

    @property
    def done(self) -> bool:
        return self.produced >= self.output_tokens and self.computed >= self.prompt_tokens


class Step(Struct, frozen=True):
    """What one step does. `work` are the sequences in it, each with how many of its tokens are computed.

    `kv_tokens` and `running` are of the decoding sequences, as in StepTime.
    """

    seconds: float
    prefill_tokens: int
    running: int
    kv_tokens: int
    work: tuple[tuple[Sequence, int], ...]


class Engine:
    """The waiting queue and the running set of one engine. First come, first served."""

    def __init__(self, shape: Shape, step_time: StepTime) -> None:
        if shape.chunk_tokens < shape.max_running:
            raise ValueError(
                "chunk_tokens must be at least max_running: each running sequence decodes one token a step"
            )
        self.shape, self.step_time = shape, step_time
        self.steps = 0
        self.preemptions = 0
        self._leaving = False  # whether a running sequence may have been cancelled
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._blocks = Blocks(shape.kv_tokens // shape.kv_block, shape.kv_block)

    def __repr__(self) -> str:
        return f"<Engine {self.running} running, {self.waiting} waiting, KV {self.kv_used:.0%}, {self.steps} steps>"

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_used(self) -> float:
        """The used part of the KV cache, 0 to 1. Blocks kept only in case their prefix comes again count as free."""
        return self._blocks.used / self._blocks.total

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def add(self, sequence: Sequence) -> None:
        """Queue it. Raises ValueError for one that the whole KV cache could not hold."""
        longest = sequence.prompt_tokens + sequence.output_tokens
        if self._blocks.needed(longest) > self._blocks.total:
            raise ValueError(f"{longest} tokens do not fit into a KV cache of {self.shape.kv_tokens}")
        self._waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End it: at once while it waits, else when the step it is in has ended. Harmless for one that has ended."""
        if sequence.cancelled:
            return
        sequence.cancelled = self._leaving = True
        if sequence.held is None and sequence in self._waiting:
            self._waiting.remove(sequence)

    def step(self) -> tuple[Step, list[Sequence]] | None:
        """Plan and apply one step: what it did, and who has a new token or an end once its seconds have passed."""
        planned = self.plan()
        return None if planned is None else (planned, self.apply(planned))

    def plan(self) -> Step | None:
        """The next step, or None when there is nothing to do. Moves waiting sequences in and preempted ones out."""
        self._drop_cancelled()
        decodes, kv_tokens, short = self._decodes()
        preempted = not all(map(self._grow, short)) and self._make_room()
        if preempted:
            decodes, kv_tokens, _ = self._decodes()
        work = [(one, 1) for one in decodes]
        prefills = self._prefills(self.shape.chunk_tokens - len(work), admit=not preempted)
        if not work and not prefills:
            return None
        prefill_tokens = sum(tokens for _, tokens in prefills)
        context_tokens = sum(one.computed for one, _ in prefills)
        seconds = self.step_time.seconds(prefill_tokens, len(decodes), kv_tokens, context_tokens)
        return Step(seconds, prefill_tokens, len(decodes), kv_tokens, (*work, *prefills))

    def apply(self, step: Step) -> list[Sequence]:
        """Book a step that has passed. The answer: sequences with a new token or an end, cancelled ones left out."""
        news = []
        for at, (sequence, tokens) in enumerate(step.work):
            if sequence.cancelled:
                continue
            sequence.computed += tokens
            if at >= step.running:
                if sequence.computed < sequence.known:
                    continue
                if sequence.held is not None:
                    self._blocks.share(sequence.held, sequence.prefix)
            if sequence.produced < sequence.output_tokens:
                sequence.produced += 1
            news.append(sequence)
        self.steps += 1
        self._drop_cancelled()
        for sequence in news:
            if sequence.produced >= sequence.output_tokens:
                self._running.remove(sequence)
                self._release(sequence)
        return news

    def _decodes(self) -> tuple[list[Sequence], int, list[Sequence]]:
        """The decoding sequences, the sum of their contexts, and those that need another block."""
        decodes, kv_tokens, short = [], 0, []
        for one in self._running:
            known = one.prompt_tokens + one.produced
            if one.produced and one.computed >= known - 1:
                decodes.append(one)
                kv_tokens += known
                if one.held is not None and one.held.room < known:
                    short.append(one)
        return decodes, kv_tokens, short

    def _grow(self, sequence: Sequence) -> bool:
        return sequence.held is not None and self._blocks.grow(sequence.held, sequence.known)

    def _make_room(self) -> bool:
        """A block for each decode that needs one; the newest sequences go back to the queue when there is none."""
        preempted = False
        for sequence in list(self._running):
            if not sequence.decoding:
                continue
            while sequence.held is not None and not self._blocks.grow(sequence.held, sequence.known):
                self._preempt()
                preempted = True
        return preempted

    def _preempt(self) -> None:
        """The newest running sequence starts again later, with what it has produced kept as part of its prompt."""
        victim = self._running.pop()
        self._release(victim)
        victim.computed = 0
        self._waiting.appendleft(victim)
        self.preemptions += 1

    def _prefills(self, budget: int, admit: bool) -> list[tuple[Sequence, int]]:
        """Prompt chunks for the step: running prompts first, then new ones while there is room."""
        chunks = []
        for sequence in self._running:
            if budget and not sequence.decoding:
                tokens = min(budget, sequence.known - sequence.computed)
                budget -= tokens
                chunks.append((sequence, tokens))
        while admit and budget and self._waiting and len(self._running) < self.shape.max_running:
            sequence = self._waiting[0]
            held = self._blocks.take(sequence.known, sequence.prefix)
            if held is None:
                break
            self._waiting.popleft()
            self._running.append(sequence)
            self._enter(sequence, held)
            tokens = min(budget, sequence.known - sequence.computed)
            budget -= tokens
            chunks.append((sequence, tokens))
        return chunks

    def _enter(self, sequence: Sequence, held: Held) -> None:
        sequence.held = held
        sequence.computed = min(held.found * self.shape.kv_block, sequence.known - 1)
        if sequence.produced == 0:
            sequence.cached_tokens = sequence.computed

    def _drop_cancelled(self) -> None:
        if self._leaving:
            self._leaving = False
            for sequence in self._running:
                if sequence.cancelled:
                    self._release(sequence)
            self._running = [one for one in self._running if not one.cancelled]

    def _release(self, sequence: Sequence) -> None:
        held, sequence.held = sequence.held, None
        if held is not None:
            self._blocks.give_back(held)
