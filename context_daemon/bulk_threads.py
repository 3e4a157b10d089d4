"""Threads that move pages. They step back behind the engines of their machine: who decodes must not feel a restore."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

_NICE = 10  # about a tenth of a core that others want, all of one that nobody does


def bulk_pool(most: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(most, thread_name_prefix=name, initializer=_step_back)


def _step_back() -> None:
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own + _NICE)
