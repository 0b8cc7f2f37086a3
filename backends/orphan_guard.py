"""A vLLM general plugin: the engine process ends when the gateway that started it is gone, however that died.

vLLM calls `arm` in every process it starts. Its engine core does not watch its parent: without this, a gateway killed
with SIGKILL leaves the engine running for ever, memory and all. vLLM's own workers watch the engine core.
"""

import multiprocessing
import os
import signal
import threading
import time

ARMED = "SIGNALBOX_ORPHAN_GUARD"
"""Set to 1 by the gateway for its children: vLLM used without Signalbox in the same installation is left alone."""

LOOK_S = 1.0


def arm() -> None:
    """Watch the parent from a thread of this process. Does nothing outside a child of the gateway."""
    parent = multiprocessing.parent_process()
    if parent is None or os.environ.get(ARMED) != "1":
        return
    threading.Thread(target=_watch, args=(parent,), name="orphan-guard", daemon=True).start()


def _watch(parent: multiprocessing.process.BaseProcess) -> None:
    """Returns never: `join` wakes at once when the parent ends, its id is the truth if the pipe was closed early."""
    while os.getppid() == parent.pid:
        parent.join(LOOK_S)
        if os.getppid() == parent.pid and not parent.is_alive():
            time.sleep(LOOK_S)  # the pipe is gone and the parent is not
    os.kill(os.getpid(), signal.SIGKILL)
