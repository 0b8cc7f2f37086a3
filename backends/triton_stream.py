"""One running request at a Triton server, and the rule by which it is ended early."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from msgspec import Struct

from backends.answer import Answer
from backends.protocol import BackendError, BackendLost, Chunk
from backends.triton_dialect import Listener
from backends.triton_faults import of_status, of_text
from backends.triton_link import Link
from backends.triton_tensors import Outputs

STOP_S = 2.0
"""How long a stop request may take."""

AGAIN_S = (0.03, 0.12, 0.4)
"""When a stop is sent again where it may have overtaken its request, which was still in a step before the engine."""


class Patience(Struct, frozen=True):
    """How long an engine may take, in seconds: to the first token, between two, for all of it (0 is no bound)."""

    first_token_s: float
    token_s: float
    total_s: float


class Stops:
    """Sends stop requests, which `stop` makes, and owns the tasks and timers for it.

    `behind`: the engine stands behind other steps of an ensemble, where a request may still be when its stop arrives.
    """

    def __init__(self, link: Link, stop: Callable[[str], Any] | None, behind: bool) -> None:
        self._link, self._stop, self._behind = link, stop, behind
        self._tasks: set[asyncio.Task[None]] = set()
        self._again: dict[asyncio.TimerHandle, str] = {}

    def stop(self, request_id: str, heard: bool) -> asyncio.Task[None] | None:
        """Tell the engine to end a request. `heard`: the engine has it for sure, as it has answered."""
        if self._stop is None or self._link.closed:
            return None
        if self._behind and not heard:
            for wait_s in AGAIN_S:
                self._later(request_id, wait_s)
        return self._send(request_id)

    async def aclose(self) -> None:
        """Let what is on its way arrive, send at once what was to follow, then keep nothing."""
        again = set(self._again.values())
        for timer in self._again:
            timer.cancel()
        self._again.clear()
        if again:
            await asyncio.sleep(AGAIN_S[0])
            for request_id in again:
                self._send(request_id)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_S)
        for task in self._tasks:
            task.cancel()

    def _send(self, request_id: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._tell(request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _later(self, request_id: str, wait_s: float) -> None:
        def fire() -> None:
            del self._again[timer]
            self._send(request_id)

        timer = asyncio.get_running_loop().call_later(wait_s, fire)
        self._again[timer] = request_id

    async def _tell(self, request_id: str) -> None:
        """The answer says nothing: an empty final response, or in some releases that the request was cancelled."""
        assert self._stop is not None
        try:
            call = self._link.stream(self._stop(request_id))
            async with asyncio.timeout(STOP_S):
                while await call.read() is not grpc.aio.EOF:
                    pass
        except (grpc.RpcError, BackendLost, TimeoutError):
            return  # a server that is gone has nothing left to stop


class TritonStream:
    """A request from the moment it is sent. One timer watches over it; reading starts no task.

    `heard` is called for every response.
    """

    __slots__ = (
        "_answer",
        "_call",
        "_closed",
        "_due",
        "_end_by",
        "_ended",
        "_heard",
        "_late",
        "_listener",
        "_loop",
        "_on_end",
        "_on_word",
        "_patience",
        "_stops",
        "_timer",
        "request_id",
    )

    def __init__(self, request_id: str, call: Any, answer: Answer, listener: Listener, engine: "Engine") -> None:
        self.request_id = request_id
        self._call, self._answer, self._listener = call, answer, listener
        self._stops, self._patience = engine.stops, engine.patience
        self._on_word, self._on_end = engine.heard, engine.ended
        self._loop = asyncio.get_running_loop()
        self._end_by = self._loop.time() + self._patience.total_s if self._patience.total_s else math.inf
        self._due = math.inf  # when the response that is being waited for is too late
        self._timer: asyncio.TimerHandle | None = None
        self._late = ""
        self._heard = False  # a response has come
        self._ended = False  # the engine is through with it
        self._closed = False  # its owner is

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ended" if self._ended else "running" if self._heard else "waiting"
        return f"<TritonStream {self.request_id} {state}>"

    async def next(self) -> Chunk | None:
        """See `backends.protocol.Stream`."""
        while not (self._closed or self._ended):
            if self._late:
                raise BackendLost(self._late)
            message = await self._read()
            if message is None:
                break
            self._hear(message)
            chunk = self._answer.take()
            if chunk is not None:
                if chunk.last:  # the engine need not know: stop strings are found here
                    self._leave()
                return chunk
        if self._late and not self._closed:
            raise BackendLost(self._late)
        return None

    async def aclose(self) -> None:
        """See `backends.protocol.Stream`. Closing the call is not enough for an ensemble, hence the stop."""
        if not self._closed and (stopping := self._leave()) is not None:
            await asyncio.wait((stopping,), timeout=STOP_S)

    def abandon(self, why: str) -> asyncio.Task[None] | None:
        """The backend goes: the engine is told, and the reader that the stream is lost. The task that tells it."""
        self._late = why
        if self._ended:
            return None
        self._ended = True
        self._call.cancel()
        return self._stops.stop(self.request_id, self._heard)

    def _leave(self) -> asyncio.Task[None] | None:
        """No more of it. An engine that does not know yet is told; the task that tells it."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._on_end(self)
        if self._ended:
            return None
        self._ended = True
        self._call.cancel()
        return self._stops.stop(self.request_id, self._heard)

    async def _read(self) -> Any:
        """The next message, None when the stream was closed meanwhile. Raises BackendLost, BackendError and others."""
        self._watch()
        try:
            message = await self._call.read()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if self._closed:
                return None
            raise BackendLost(self._late or "the connection to Triton was closed") from None
        except grpc.RpcError as error:
            if self._given_up():
                return None
            self._ended = True
            raise of_status(error) from error
        finally:
            self._due = math.inf
        if message is grpc.aio.EOF:
            if self._given_up():
                return None
            self._ended = True
            raise BackendLost("Triton ended the stream before the answer's end")
        return message

    def _hear(self, message: Any) -> None:
        if message.error_message:
            self._ended = True  # whatever follows an error is no answer
            raise of_text(message.error_message)
        self._heard = True
        self._on_word()
        response = message.infer_response
        last = response.parameters["triton_final_response"].bool_param
        try:
            self._listener.hear(Outputs.of(response), last)
        except ValueError as error:
            raise BackendError(f"a response that can't be read: {error}") from error
        if last:
            self._ended = True

    def _given_up(self) -> bool:
        return self._closed

    def _watch(self) -> None:
        """From now on somebody waits for a response."""
        at = self._loop.time()
        wait_s = self._patience.token_s if self._heard else self._patience.first_token_s
        self._due = min(at + wait_s, self._end_by)
        if self._timer is None or self._timer.when() > self._due:
            self._set_timer(self._due)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        """Too late, or to be looked at again. A reader that is not there makes no engine late."""
        at = self._loop.time()
        self._timer = None
        if at < self._due:
            self._set_timer(min(self._due, at + self._patience.token_s))
            return
        if self._due == self._end_by:
            self._late = f"no end of the answer within {self._patience.total_s:g} s"
        else:
            silent_s = self._patience.token_s if self._heard else self._patience.first_token_s
            what = "no further token" if self._heard else "no first token"
            self._late = f"{what} within {silent_s:g} s"
        self._call.cancel()


class Engine(Struct, frozen=True):
    """What all streams of one engine share: patience, stops, and whom they tell of responses and ends."""

    patience: Patience
    stops: Stops
    heard: Callable[[], None]
    ended: Callable[[TritonStream], None]
