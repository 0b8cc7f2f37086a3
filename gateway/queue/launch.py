"""Becomes the store's server, tied to the process that started it. A plain script: nothing heavy is imported.

    launch.py PARENT_PID NICE BINARY ARGUMENT...

The kernel kills a process with PR_SET_PDEATHSIG when the *thread* that forked it ends, however that happens; the
setting survives exec. The parent may have died before it was set, hence the look at who it is.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, nice: int, command: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    os.execv(command[0], command)  # noqa: S606 the server's path comes from our own parent


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
