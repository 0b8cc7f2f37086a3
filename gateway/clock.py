"""The one place that reads a clock: monotonic seconds for durations and deadlines, wall time for people."""

import time

now = time.monotonic
"""Monotonic seconds, of the clock that `loop.time()` also shows. (uvloop's own reading is a millisecond coarse.)"""


def wall() -> float:
    """Unix time in seconds: for people (logs, `created`), never for arithmetic on deadlines."""
    return time.time()
