"""Cancellations that a library lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard() -> Iterator[None]:
    """Whoever was cancelled in here ends, also when the call went on as if nothing was.

    redis-py writes under `asyncio.wait_for`, which before Python 3.12 returns what it waited for when that is
    done at the moment of the cancellation (python/cpython#86296): a loop over store calls would then run for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    except asyncio.CancelledError:
        raise
    except Exception as error:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
