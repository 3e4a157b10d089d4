"""The fleet as the API shows it: heartbeats and notices from the store, events from memory, faults through the cloud."""

from __future__ import annotations

from collections.abc import Sequence

from context_daemon.records import Notice, WorkerStatus
from context_daemon.store import ContextStore
from orchestrator.api.fleet_view import UnknownWorker
from orchestrator.events import Event, EventLog
from orchestrator.fleet.cloud import LocalCloud
from orchestrator.fleet.ray_fleet import RayFleet
from orchestrator.leadership import Leadership


class ClusterView:
    """A FleetView over the running cluster."""

    def __init__(
        self,
        store: ContextStore,
        fleet: RayFleet,
        leadership: Leadership,
        events: EventLog,
        cloud: LocalCloud,
        model: str,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._leadership = leadership
        self._events = events
        self._cloud = cloud
        self._model = model

    @property
    def model(self) -> str:
        return self._model

    @property
    def leader(self) -> str:
        return self._leadership.holder

    @property
    def term(self) -> int:
        return self._leadership.term

    async def incarnation(self) -> int:
        return await self._store.incarnation()

    async def workers(self) -> Sequence[WorkerStatus]:
        dead = self._fleet.dead()
        found = [worker for worker in await self._store.workers() if worker.worker_id not in dead]
        return sorted(found, key=lambda worker: worker.worker_id)

    async def notices(self) -> Sequence[Notice]:
        return await self._store.notices()

    async def preempt(self, worker_id: str, deadline_s: float) -> str:
        node_id = await self._node_of(worker_id)
        await self._cloud.notice(node_id, deadline_s)
        self._events.add("fault", f"{node_id}: a notice of {deadline_s:g} s was ordered")
        return node_id

    async def kill(self, worker_id: str) -> str:
        node_id = await self._node_of(worker_id)
        await self._cloud.kill(node_id)
        self._events.add("fault", f"{node_id}: a kill without notice was ordered")
        return node_id

    def events_since(self, cursor: int) -> Sequence[Event]:
        return self._events.since(cursor)

    @property
    def event_cursor(self) -> int:
        return self._events.cursor

    async def _node_of(self, worker_id: str) -> str:
        for worker in await self.workers():
            if worker.worker_id == worker_id:
                return worker.node_id
        raise UnknownWorker(f"no worker {worker_id!r}; `tideover workers` lists them")
