"""ContextStore in memory: the contract without a server, for unit tests and simulation.

One event loop, no awaits inside a transition, so each is atomic. Durable as long as the object lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from context_daemon.memory_jobs import MemoryJobs
from context_daemon.memory_requests import MemoryRequests
from context_daemon.records import Notice, WorkerStatus
from context_daemon.store import ContextStore

NOTICE_KEPT_S = 3600.0


class MemoryStore(MemoryJobs, MemoryRequests):
    """`clock` gives seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time, server_id: str = "memory") -> None:
        super().__init__(clock)
        self._server_id = server_id
        self._workers: dict[str, tuple[float, WorkerStatus]] = {}
        self._notices: dict[str, tuple[float, Notice]] = {}
        self._holder, self._term, self._until = "", 0, 0.0
        self._noted_server = ""

    async def put_worker(self, status: WorkerStatus, ttl_s: float) -> None:
        self._workers[status.worker_id] = (self._clock() + ttl_s, status)

    async def workers(self) -> list[WorkerStatus]:
        now = self._clock()
        return [status for _, (expiry, status) in sorted(self._workers.items()) if expiry > now]

    async def remove_worker(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    async def put_notice(self, notice: Notice) -> bool:
        now = self._clock()
        held = self._notices.get(notice.id)
        if held is not None and held[0] > now:
            return False
        self._notices[notice.id] = (max(now, notice.deadline) + NOTICE_KEPT_S, notice)
        return True

    async def withdraw_notice(self, notice_id: str) -> None:
        self._notices.pop(notice_id, None)

    async def notices(self) -> list[Notice]:
        now = self._clock()
        live = [notice for expiry, notice in self._notices.values() if expiry > now]
        return sorted(live, key=lambda notice: (notice.deadline, notice.id))

    async def acquire_leadership(self, holder: str, ttl_s: float) -> int | None:
        now = self._clock()
        if holder != self._holder:
            if self._holder and self._until > now:
                return None
            self._holder, self._term = holder, self._term + 1
        self._until = now + ttl_s
        return self._term

    async def incarnation(self) -> int:
        return self._incarnation

    async def bump_incarnation(self, seen: int) -> int:
        self._incarnation = max(self._incarnation, seen + 1)
        for job in self._active():
            job.incarnation = max(job.incarnation, self._incarnation)
        return self._incarnation

    async def server_id(self) -> str:
        return self._server_id

    async def noted_server(self) -> str:
        return self._noted_server

    async def note_server(self, server_id: str) -> None:
        self._noted_server = server_id

    async def close(self) -> None:
        """Nothing to release."""


def _conforms(store: MemoryStore) -> ContextStore:
    return store
