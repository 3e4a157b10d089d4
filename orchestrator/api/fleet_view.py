"""What the servicers need to know of the fleet, and the faults they can have injected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from context_daemon.records import Notice, WorkerStatus
from orchestrator.events import Event


class UnknownWorker(Exception):
    """No worker of that id has a heartbeat."""


class FleetView(Protocol):
    @property
    def model(self) -> str: ...

    @property
    def leader(self) -> str: ...

    @property
    def term(self) -> int: ...

    async def incarnation(self) -> int: ...

    async def workers(self) -> Sequence[WorkerStatus]:
        """Every worker with a heartbeat, by id."""

    async def notices(self) -> Sequence[Notice]: ...

    async def preempt(self, worker_id: str, deadline_s: float) -> str:
        """Give the worker's machine a notice; returns its node id. Raises UnknownWorker or FaultsUnsupported."""

    async def kill(self, worker_id: str) -> str:
        """Kill the worker's machine; returns its node id. Raises UnknownWorker or FaultsUnsupported."""

    def events_since(self, cursor: int) -> Sequence[Event]: ...

    @property
    def event_cursor(self) -> int:
        """Of the newest event."""
