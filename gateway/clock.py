"""The one place that reads a clock: seconds of the event loop's monotonic time, and wall time for logs and ids."""

import asyncio
import time


def now() -> float:
    """Monotonic seconds of the running loop. On a virtual loop this is virtual time."""
    return asyncio.get_running_loop().time()


def wall() -> float:
    """Unix time in seconds: for people (logs, `created`), never for arithmetic on deadlines."""
    return time.time()
