"""Become another program that dies with its parent: `python -I -S tether.py PARENT_PID PROGRAM ARGS…`.

A separate program, because the same in a `preexec_fn` would run Python in a fork of a process full of threads (gRPC),
which can deadlock. Imports the standard library only: it runs without site-packages, to start in 10 ms.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"tether: cannot ask to die with the parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(sys.argv[1]):  # the parent died before the request
        sys.exit("tether: the parent is gone already")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
