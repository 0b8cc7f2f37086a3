"""One running request of an in-process TensorRT-LLM."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from backends.answer import Answer
from backends.protocol import BackendError, BackendLost, Chunk

log = logging.getLogger(__name__)


class TrtLlmStream:
    """Reads one `RequestOutput` in a task of its own, which ends with it: nothing else can wait for it and be woken.

    What a slow reader has not taken waits as text, bounded by the answer's own limit. `heard` is called for each
    message of the engine, `fault` turns an exception of it into ours, `ended` is called once.
    """

    def __init__(self, output: Any, answer: Answer, engine: "Engine") -> None:
        self._output, self._answer, self._engine = output, answer, engine
        self._seen = [0] * answer.choices  # tokens, by choice
        self._waiter: asyncio.Future[None] | None = None
        self._fault: BackendError | BackendLost | None = None
        self._closed = False
        self.task = asyncio.get_running_loop().create_task(self._read())
        self.task.add_done_callback(self._done)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ended" if self.task.done() else "running"
        return f"<TrtLlmStream {self._output.request_id} {state}>"

    async def next(self) -> Chunk | None:
        """See `backends.protocol.Stream`."""
        while not self._closed:
            if (chunk := self._answer.take()) is not None:
                self._closed = chunk.last
                return chunk
            if self._fault is not None:
                raise self._fault
            if self.task.done():
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return None

    async def aclose(self) -> None:
        """See `backends.protocol.Stream`. The engine ends it with its next step."""
        self._closed = True
        self.task.cancel()
        self._wake()

    def lose(self, why: str) -> None:
        """The engine is gone."""
        self._fault = BackendLost(why)
        self.task.cancel()
        self._wake()

    async def _read(self) -> None:
        try:
            async for output in self._output:
                self._engine.heard()
                self._hear(output)
                self._wake()
                if self._answer.done:
                    return
            for index in range(self._answer.choices):
                self._answer.end(index)
        except Exception as error:  # noqa: BLE001 - the engine raises anything here, and all of it has an answer
            self._fault = self._fault or self._engine.fault(error)

    def _hear(self, output: Any) -> None:
        """Whatever is new in any choice. Its own differences are of the choice that was heard of last, not of all."""
        if cached := getattr(output, "cached_tokens", 0):  # not in all releases
            self._answer.count(cached_tokens=cached)
        for index, said in enumerate(output.outputs):
            seen = self._seen[index]
            new = said.token_ids[seen:]
            if new:
                self._seen[index] = seen + len(new)
                self._answer.ids(index, new, _logprobs(said.logprobs, seen, new))
            if (reason := said.finish_reason) is None or self._answer.over(index):
                continue
            if reason in ("stop", "length"):
                self._answer.end(index, reason)
            else:
                raise BackendError(f"TensorRT-LLM ended the request: {reason}")

    def _abort(self) -> None:
        if not self._output.finished:
            try:
                self._output.abort()
            except Exception as error:  # noqa: BLE001 - of a dead engine, mostly
                log.warning("a request could not be aborted: %s", error)

    def _done(self, _: asyncio.Task[None]) -> None:
        """However it ended, also before its first step: the engine hears of it."""
        self._abort()
        self._engine.ended(self)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Engine:
    """What a stream needs of the engine it runs on."""

    def __init__(
        self,
        heard: Callable[[], None],
        fault: Callable[[Exception], BackendError | BackendLost],
        ended: Callable[[TrtLlmStream], None],
    ) -> None:
        self.heard, self.fault, self.ended = heard, fault, ended


def _logprobs(told: Any, seen: int, new: list[int]) -> list[float] | None:
    """Of the new tokens. Told as a number per token, or as a table of tokens with a number and a rank."""
    if not told or len(told) < seen + len(new):
        return None
    found = []
    for token, one in zip(new, told[seen:], strict=False):
        value: Any = one.get(token) if isinstance(one, dict) else one
        if value is None:
            return None
        found.append(float(getattr(value, "logprob", value)))
    return found
