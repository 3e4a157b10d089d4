"""KV on its way into the engine: offered page by page by whoever fetches it, taken in by the step loop between two steps.

Others decode on meanwhile, so a turn takes in no more than a share of a step; with nobody to wait for it takes all there is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from context_daemon.records import FencingToken, RequestKey
from context_daemon.restore_stream import IncomingPage
from worker.engine.protocol import Engine

_SHARE = 0.25  # of a step's time, before each, while others wait for it


def turn_s(step_s: float) -> float:
    """For how long to take KV in before the next step, while sequences decode whose steps take `step_s`."""
    return _SHARE * step_s


class Import:
    """One sequence's KV of positions from `start` on. One thread offers, the loop's takes."""

    def __init__(self, key: RequestKey, token: FencingToken, start: int, started: float) -> None:
        self.key, self.token, self.started = key, token, started
        self.start = self.reached = start
        self.sources: tuple[str, ...] = ()
        self._pages: deque[IncomingPage] = deque()
        self._ended = False
        self._lock = threading.Lock()
        self._settled = threading.Event()

    @property
    def count(self) -> int:
        return self.reached - self.start

    # -- who fetches ------------------------------------------------------------------------------------------------
    def offer(self, page: IncomingPage) -> bool:
        """False when nothing more is wanted."""
        with self._lock:
            if not self._ended:
                self._pages.append(page)
            return not self._ended

    def end(self) -> None:
        """That was all."""
        with self._lock:
            self._ended = True

    def wait(self, timeout: float) -> bool:
        """Until no page that was offered is needed any more."""
        return self._settled.wait(timeout)

    def keep_copies(self) -> None:
        """What is not taken in yet must outlive the stream that it came by."""
        with self._lock:
            todo = len(self._pages)
        for back in range(1, todo + 1):  # from the last on; the loop takes the first
            with self._lock:
                if back > len(self._pages):
                    return
                self._pages[-back] = self._pages[-back].copied()

    # -- the loop ---------------------------------------------------------------------------------------------------
    def take_into(self, engine: Engine, until: float) -> bool:
        """Import what is there, at least a page, until the clock says so. True when it is over."""
        while self._take_one(engine):
            if time.monotonic() >= until:
                break
        with self._lock:
            over = self._ended and not self._pages
        if over:
            engine.end_import(self.key, self.reached)
            self.settle()
        return over

    def _take_one(self, engine: Engine) -> bool:
        """False: there is none, or no room for it yet."""
        with self._lock:
            if not self._pages:
                return False
            page = self._pages[0]
            if not engine.import_slots(self.key, page.start, page.stop, page.rows):
                return False
            self._pages.popleft()
            good = page.good()  # as it lies there after it was taken
            self.reached = page.start + good
            if good:
                self.sources = tuple(dict.fromkeys((*self.sources, page.source)))
            if self.reached < page.stop:
                self._ended = True
                self._pages.clear()
            return True

    def settle(self) -> None:
        """Nothing of it is needed any more."""
        with self._lock:
            self._ended = True
            self._pages.clear()
        self._settled.set()


class Imports:
    """All that are under way, oldest first. For the loop's thread."""

    def __init__(self, engine: Engine, on_end: Callable[[Import], None]) -> None:
        self._engine, self._on_end = engine, on_end
        self._under_way: dict[RequestKey, Import] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, item: Import) -> None:
        self._under_way[item.key] = item

    def drop(self, key: RequestKey) -> None:
        """Its sequence is gone, or computes it all."""
        item = self._under_way.pop(key, None)
        if item is not None:
            item.settle()

    def turn(self, seconds: float) -> None:
        """Take in for so long; every turn at least one page, if there is one."""
        until = time.monotonic() + seconds
        for item in list(self._under_way.values()):
            if item.take_into(self._engine, until):
                del self._under_way[item.key]
                self._on_end(item)
            if time.monotonic() >= until:
                return
