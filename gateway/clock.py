"""The one place that reads a clock: monotonic seconds for durations and deadlines, wall time for people."""

import time


def now() -> float:
    """Monotonic seconds, of the clock that `loop.time()` also shows. (uvloop's own reading is a millisecond coarse.)"""
    return time.monotonic()


def wall() -> float:
    """Unix time in seconds: for people (logs, `created`), never for arithmetic on deadlines."""
    return time.time()
