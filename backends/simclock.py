"""Runs the simulated engine on the event loop's time: one timer while it works, none while it is idle."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from backends.protocol import BackendBusy, BackendLost, Gauge
from backends.simengine import Engine, Sequence, Step

_MOST_STEPS = 4_096
_MOST_LAG_S = 0.25


class Listener(Protocol):
    """Whoever waits for the tokens of sequences."""

    def wake(self) -> None:
        """Some of its sequences have a new token or an end."""
        ...

    def lose(self, why: str) -> None:
        """The engine is gone and its sequences with it."""
        ...


class Clockwork:
    """An engine in time. A step ends exactly its seconds after the one before it, also where the loop is a bit late."""

    def __init__(self, new_engine: Callable[[], Engine], speed: float, watchdog_s: float, max_waiting: int) -> None:
        self._new_engine = new_engine
        self._speed = speed
        self._watchdog_s = watchdog_s
        self._max_waiting = max_waiting
        self._engine = new_engine()
        self._listeners: dict[Sequence, Listener] = {}
        self._steps: deque[tuple[int, int, int, float]] = deque(maxlen=_MOST_STEPS)
        self._step: Step | None = None
        self._timer: asyncio.Handle | None = None  # the end of `_step`, or the beginning of the next one
        self._dead = ""
        self._for_good = False
        self._hung = False
        self._stuck_since_s: float | None = None

    def __repr__(self) -> str:
        return f"{self._dead or ('hangs, ' if self._hung else '') + repr(self._engine)}"

    def check(self) -> None:
        """Raises BackendLost for an engine that is gone, BackendBusy for one that takes no more."""
        if self._dead:
            raise BackendLost(self._dead)
        if self._max_waiting and self._engine.waiting >= self._max_waiting:
            raise BackendBusy(f"{self._engine.waiting} requests wait in the engine already")

    def add(self, sequence: Sequence, listener: Listener) -> None:
        self._engine.add(sequence)
        self._listeners[sequence] = listener
        self._poke()

    def cancel(self, sequence: Sequence) -> None:
        """The engine drops it when the running step has ended. Harmless for one that has ended."""
        if self._listeners.pop(sequence, None) is not None:
            self._engine.cancel(sequence)

    def gauge(self) -> Gauge:
        """Takes the steps since the last one along. Raises BackendLost for a dead engine, or one that hangs at work."""
        if self._dead:
            raise BackendLost(self._dead)
        if self._stuck_since_s is not None:
            stuck_s = asyncio.get_running_loop().time() - self._stuck_since_s
            if stuck_s >= self._watchdog_s:
                raise BackendLost(f"the simulated engine hangs: no step for {stuck_s:.1f} s")
        steps = tuple(self._steps)
        self._steps.clear()
        engine = self._engine
        return Gauge(
            running=engine.running,
            waiting=engine.waiting,
            kv_used=engine.kv_used,
            preemptions=engine.preemptions,
            steps=steps,
        )

    def stop(self, why: str, for_good: bool = False) -> None:
        """End the engine and lose its streams. Idempotent."""
        self._for_good = self._for_good or for_good
        self._dead = self._dead or why
        self._halt()
        self._step, self._stuck_since_s = None, None
        listeners, self._listeners = self._listeners, {}
        for listener in set(listeners.values()):
            listener.lose(self._dead)
        self._steps.clear()
        self._engine = self._new_engine()

    def hang(self) -> None:
        self._hung = True
        self._halt()
        if not self._engine.idle:
            self._stuck_since_s = asyncio.get_running_loop().time()

    def resume(self) -> None:
        """Undo `hang` and a `stop` that was not for good. The step that hung takes its whole time from now."""
        self._hung, self._stuck_since_s = False, None
        if self._for_good:
            return
        self._dead = ""
        now = asyncio.get_running_loop().time()
        if self._step is not None:
            self._run(self._step, now)
        else:
            self._poke()

    def _poke(self) -> None:
        """Start stepping once the caller is done, or note since when the engine should but hangs."""
        if self._step is not None or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if not self._hung:
            self._timer = loop.call_soon(self._begin, loop.time())
        elif self._stuck_since_s is None and not self._engine.idle:
            self._stuck_since_s = loop.time()

    def _begin(self, at_s: float) -> None:
        self._timer, self._step = None, self._engine.plan()
        if self._step is not None:
            self._run(self._step, at_s)

    def _run(self, step: Step, at_s: float) -> None:
        due_s = at_s + step.seconds / self._speed
        self._timer = asyncio.get_running_loop().call_at(due_s, self._end, step, due_s)

    def _end(self, step: Step, due_s: float) -> None:
        self._steps.append((step.prefill_tokens, step.running, step.kv_tokens, step.seconds / self._speed))
        woken: set[Listener] = set()
        for sequence in self._engine.apply(step):
            listener = self._listeners.get(sequence)
            if listener is None:
                continue
            woken.add(listener)
            if sequence.done:
                del self._listeners[sequence]
        now = asyncio.get_running_loop().time()
        self._begin(due_s if now - due_s < _MOST_LAG_S else now)
        for listener in woken:
            listener.wake()

    def _halt(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
