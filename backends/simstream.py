"""The streams of the simulated engine. What a slow reader has not taken is a number of tokens, not text."""

import asyncio
import time

from backends.frames import DONE, Frames, Said
from backends.protocol import BackendLost, Chunk, Prompt, Usage
from backends.simclock import Clockwork
from backends.simengine import Sequence
from backends.simplan import Choice, Job
from backends.simtext import Writer


class _Voice:
    """One choice while it is told: writes the text of the tokens that its sequence has produced."""

    __slots__ = ("_chars", "_writer", "choice", "finished", "sequence", "told")

    def __init__(self, choice: Choice, sequence: Sequence) -> None:
        self.choice, self.sequence = choice, sequence
        self.told = 0
        self.finished = False
        self._chars = 0
        self._writer = Writer(choice.key)

    @property
    def news(self) -> int:
        return self.sequence.produced - self.told

    def tell(self) -> str:
        """The text of all tokens since the last time."""
        text = self._writer.write(self.news)
        self.told = self.sequence.produced
        if self.choice.chars is not None:
            text = text[: max(0, self.choice.chars - self._chars)]
        self._chars += len(text)
        return text


class SimulatedStream:
    """A running request, in the engine from the start."""

    def __init__(self, clockwork: Clockwork, job: Job, prompt: Prompt, request_id: str, engine: str) -> None:
        self._clockwork, self._job, self._prompt = clockwork, job, prompt
        self._waiter: asyncio.Future[None] | None = None
        self._lost = ""
        self._over = False
        self._reported = 0  # tokens that chunks have counted
        outputs = [choice.output_tokens for choice in job.choices] or [0] * len(job.prompts)
        self._sequences = [Sequence(size, out, names) for (size, names), out in zip(job.prompts, outputs, strict=True)]
        self._voices = [_Voice(*pair) for pair in zip(job.choices, self._sequences, strict=False)]
        created = int(time.time())  # noqa: TID251 - for people to read, never for arithmetic
        self._frames = Frames(prompt, request_id, f"simulated-{engine}", created)
        for sequence in self._sequences:
            clockwork.add(sequence, self)

    async def next(self) -> Chunk | None:
        while not self._over:
            if self._lost:
                raise BackendLost(self._lost)
            if (chunk := self._take()) is not None:
                return chunk
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return None

    def _take(self) -> Chunk | None:
        """What there is to say now, or None."""
        produced = sum(sequence.produced for sequence in self._sequences)
        tokens, all_done = produced - self._reported, all(sequence.done for sequence in self._sequences)
        if not tokens and not all_done:
            return None
        if self._prompt.stream:
            data = self._events(all_done)
        elif all_done:
            data = self._body()
        elif self._reported:
            return None
        else:
            data = b""
        self._reported, self._over = produced, all_done
        return Chunk(data, tokens, self._usage() if all_done else None, last=all_done)

    def _events(self, all_done: bool) -> bytes:
        frames = self._frames
        parts = [] if self._reported else [frames.opening(index) for index in range(len(self._voices))]
        for index, voice in enumerate(self._voices):
            if voice.news and (text := voice.tell()):
                parts.append(frames.text(index, text))
            if voice.sequence.done and not voice.finished:
                voice.finished = True
                parts.append(frames.finish(index, voice.choice.finish_reason))
        if all_done:
            parts += [frames.usage(self._usage()), DONE]
        return b"".join(parts)

    def _body(self) -> bytes:
        if not self._voices:
            return self._job.body
        said = [Said(text=voice.tell(), reason=voice.choice.finish_reason) for voice in self._voices]
        return self._frames.whole(said, self._usage())

    def _usage(self) -> Usage:
        """The prompt counts once, however many choices it has."""
        prompts = self._sequences[:1] if self._voices else self._sequences
        return Usage(
            prompt_tokens=sum(sequence.prompt_tokens for sequence in prompts),
            completion_tokens=sum(sequence.produced for sequence in self._sequences),
            cached_tokens=sum(sequence.cached_tokens for sequence in prompts),
        )

    async def aclose(self) -> None:
        self._over = True
        for sequence in self._sequences:
            self._clockwork.cancel(sequence)
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def lose(self, why: str) -> None:
        self._lost = why
        self.wake()
