"""What the router needs of the fleet: to reach workers, and to learn which are dead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from context_daemon.records import DrainTarget, InterruptionCause, Lease, RequestKey


class WorkerGateway(Protocol):
    """Calls return at once; a call that is lost is made up for by the lease observer, which tells the worker again."""

    def admit(self, worker_id: str, leases: Sequence[Lease]) -> None: ...

    def set_targets(self, worker_id: str, targets: Mapping[RequestKey, DrainTarget]) -> None: ...

    def dead(self) -> Mapping[str, InterruptionCause]:
        """Workers known to be dead since the fleet was joined, with what their requests' interruption is called."""

    def reachable(self) -> set[str]:
        """Workers that can be called now."""
