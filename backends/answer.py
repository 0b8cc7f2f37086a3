"""A request's answer on the wire, made of what an engine says piece by piece: token ids or text, for each choice."""

from collections.abc import Callable, Sequence

from backends.ask import Ask
from backends.detokenize import Detokenizer
from backends.frames import DONE, Frames, Said, Scored
from backends.protocol import Chunk, Plan, Usage
from backends.stops import Stops
from backends.toolcalls import Calls, finder
from backends.words import Words

QUIET_TOKENS = 16  # that may come without any text before the gateway hears of them


class _Voice:
    """One choice while it is told. `reason` is empty until it is over."""

    __slots__ = (
        "_detokenizer",
        "_end_ids",
        "_include",
        "_least",
        "_limit",
        "_stops",
        "calls",
        "finished",
        "pending",
        "reason",
        "scores",
        "tokens",
    )

    def __init__(self, ask: Ask, detokenizer: Detokenizer | None) -> None:
        self._detokenizer = detokenizer
        self._end_ids, self._include = frozenset(ask.end_ids), ask.include_stop
        self._least, self._limit = ask.sampling.min_tokens or 0, ask.max_tokens
        self._stops = Stops(ask.stops, ask.include_stop)
        self.calls: Calls | None = finder(ask.calling) if ask.calling is not None else None
        self.pending = ""  # settled, and not on the wire
        self.scores: list[Scored] = []
        self.tokens = 0
        self.reason = ""
        self.finished = False  # its last frame is on the wire

    def token(self, token: int) -> None:
        self.tokens += 1
        last = token in self._end_ids and self.tokens > self._least
        if last and not self._include:
            self.end("stop")
            return
        assert self._detokenizer is not None
        if text := self._detokenizer.push(token):
            self.text(text)
        if last:
            self.end("stop")

    def text(self, text: str) -> None:
        """New text, whose tokens are counted."""
        self._say(self._stops.push(text, self.tokens > self._least))
        if self._stops.stopped:
            self._finish("stop")

    def end(self, reason: str) -> None:
        """Nothing follows. An empty reason is derived."""
        if not self.reason:
            self._say(self._stops.rest())
            self._finish(reason or ("length" if self.tokens >= self._limit else "stop"))

    def _say(self, text: str) -> None:
        self.pending += self.calls.push(text) if self.calls is not None else text

    def _finish(self, reason: str) -> None:
        self.reason = reason
        if self.calls is not None:
            self.pending += self.calls.end()
            if reason == "stop" and self.calls.made:
                self.reason = self.calls.reason

    def told(self) -> tuple[str, list[Scored]]:
        """What is new."""
        text, scores, self.pending, self.scores = self.pending, self.scores, "", []
        return text, scores


class Answer:
    """What one request gets. Feed it what the engine says, then `take`; it holds nothing that needs closing.

    `words` turn ids into text; without them only `text` may be fed. `learn` hears the engine's own count of the prompt.
    """

    def __init__(self, plan: Plan, frames: Frames, words: Words | None, learn: Callable[[int], None]) -> None:
        ask: Ask = plan.work
        self._streamed = plan.prompt.stream
        self._frames, self._words, self._learn = frames, words, learn
        self._voices = [_Voice(ask, words.detokenizer(ask.ids) if words is not None else None) for _ in range(ask.n)]
        self._prompt_tokens = plan.prompt_tokens
        self._completion_tokens = 0  # by the engine's count
        self._cached_tokens = 0
        self._reported = 0  # tokens that chunks have counted
        self._opened = self._over = False

    def ids(self, index: int, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """New tokens of a choice, with their log probabilities where they were asked for."""
        voice = self._voices[index]
        for nth, token in enumerate(ids):
            if voice.reason:
                return
            if logprobs is not None and nth < len(logprobs):
                voice.scores.append(self._scored(token, logprobs[nth]))
            voice.token(token)

    def text(self, index: int, text: str, tokens: int = 1) -> None:
        """New text of a choice. `tokens` is how many it stands for, 0 where that is not known."""
        voice = self._voices[index]
        if voice.reason or not (text or tokens):
            return
        voice.tokens += tokens or self._size(text)
        voice.text(text)

    def count(self, prompt_tokens: int = 0, completion_tokens: int = 0, cached_tokens: int = 0) -> None:
        """What the engine itself counted, over all choices; wins over what was counted here where it is not 0."""
        if prompt_tokens:
            self._prompt_tokens = prompt_tokens
            self._learn(prompt_tokens)
        self._completion_tokens = completion_tokens or self._completion_tokens
        self._cached_tokens = cached_tokens or self._cached_tokens

    def end(self, index: int, reason: str = "") -> None:
        """The engine said that a choice is over, and perhaps why (`stop`, `length`)."""
        self._voices[index].end(reason)

    def over(self, index: int) -> bool:
        """Whether a choice is over, so that what the engine still says of it means nothing."""
        return bool(self._voices[index].reason)

    @property
    def choices(self) -> int:
        return len(self._voices)

    @property
    def done(self) -> bool:
        """Whether every choice is over. The engine may not know: a stop string was found here."""
        return all(voice.reason for voice in self._voices)

    def take(self) -> Chunk | None:
        """What may be sent now, None where there is nothing yet or nothing more."""
        if self._over:
            return None
        done, tokens = self.done, sum(voice.tokens for voice in self._voices)
        new = tokens - self._reported
        if not done and not new:
            return None
        if self._streamed:
            data = self._events(done)
            if not data and not done and new < QUIET_TOKENS:
                return None
        elif done:
            data = self._whole()
        elif self._reported:
            return None
        else:
            data = b""
        self._reported, self._over = tokens, done
        return Chunk(data, new, self._usage() if done else None, last=done)

    def _events(self, done: bool) -> bytes:
        frames = self._frames
        parts: list[bytes] = []
        if not self._opened:
            self._opened = True
            parts = [frames.opening(index) for index in range(len(self._voices))]
        for index, voice in enumerate(self._voices):
            if voice.finished:
                continue
            text, scores = voice.told() if voice.pending or voice.reason else ("", [])
            if text:
                parts.append(frames.text(index, text, scores))
                scores = []
            if voice.calls is not None and (deltas := voice.calls.deltas()):
                parts.append(frames.calls(index, deltas))
            if voice.reason:
                voice.finished = True
                parts.append(frames.finish(index, voice.reason, scores))
        if done:
            parts += (frames.usage(self._usage()), DONE)
        return b"".join(parts)

    def _whole(self) -> bytes:
        said = []
        for voice in self._voices:
            text, scores = voice.told()
            calls = voice.calls.made if voice.calls is not None else ()
            said.append(Said(text=text, reason=voice.reason, logprobs=scores, calls=calls))
        return self._frames.whole(said, self._usage())

    def _usage(self) -> Usage:
        completion = self._completion_tokens or sum(voice.tokens for voice in self._voices)
        return Usage(self._prompt_tokens, completion, self._cached_tokens)

    def _scored(self, token: int, logprob: float) -> Scored:
        text, data = self._words.spelled(token) if self._words is not None else ("", b"")
        return Scored(text, data, logprob)

    def _size(self, text: str) -> int:
        if self._words is not None:
            return max(1, len(self._words.encode(text, special=False)))
        return max(1, len(text) // 4)
