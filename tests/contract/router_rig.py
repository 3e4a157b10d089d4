"""The real router over the workers of a rig, in a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Self

from context_daemon.records import DrainTarget, InterruptionCause, Lease, RequestKey
from context_daemon.redis_store import RedisStore
from orchestrator.events import EventLog
from orchestrator.routing.router import Router, RouterOptions
from tests.contract.worker_rig import Rig, Worker

_TERMS = itertools.count(1)


class Gateway:
    """A WorkerGateway to workers in this process."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.buried: dict[str, InterruptionCause] = {}

    def admit(self, worker_id: str, leases: Sequence[Lease]) -> None:
        if worker_id in self.workers:
            self.workers[worker_id].runtime.admit(leases)

    def set_targets(self, worker_id: str, targets: Mapping[RequestKey, DrainTarget]) -> None:
        if worker_id in self.workers:
            self.workers[worker_id].runtime.set_targets(dict(targets))

    def dead(self) -> Mapping[str, InterruptionCause]:
        return self.buried

    def reachable(self) -> set[str]:
        return set(self.workers)

    def bury(self, rig: Rig, name: str) -> None:
        rig.retire(self.workers.pop(name))
        self.buried[name] = InterruptionCause.WORKER_DIED


class Routing:
    """A context manager: one leader's life, in a term after all before it. `kinds` and `texts` are of its events."""

    def __init__(self, rig: Rig, gateway: Gateway, lease_s: float = 20.0) -> None:
        self._url, self._gateway, self._options = rig.servers.durable.url, gateway, RouterOptions(lease_s=lease_s)
        self._term = next(_TERMS)
        self._events = EventLog(time.time)
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="router")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self._events.since(0)]

    def texts(self, kind: str) -> list[str]:
        return [event.text for event in self._events.since(0) if event.kind == kind]

    async def _run(self) -> None:
        store = RedisStore(self._url, writer=f"router:{secrets.token_hex(4)}")
        router = Router(store, self._gateway, self._events, self._options)
        task = asyncio.create_task(router.run(lambda: self._term))
        await asyncio.to_thread(self._over.wait)
        if task.done():
            self._failure = task.exception()
        await ended(task)
        await store.close()


async def ended(task: asyncio.Task[None]) -> None:
    """Cancelled for good: a connection that is just being answered may swallow one cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.5)
