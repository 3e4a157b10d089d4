"""AdminService: operators' view of the fleet, and faults on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version

from context_daemon.records import Notice, WorkerStatus
from orchestrator.api.errors import Context, answered
from orchestrator.api.fleet_view import FleetView
from orchestrator.context_view import ContextView
from protos import admin_pb2, admin_pb2_grpc


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, fleet: FleetView, kept: ContextView, clock: Callable[[], float] = time.time) -> None:
        self._fleet = fleet
        self._kept = kept
        self._clock = clock

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: Context
    ) -> admin_pb2.ListWorkersResponse:
        return await answered(context, self._list)

    async def _list(self) -> admin_pb2.ListWorkersResponse:
        notices = {notice.node_id: notice for notice in await self._fleet.notices()}
        workers = [self._worker(status, notices.get(status.node_id)) for status in await self._fleet.workers()]
        return admin_pb2.ListWorkersResponse(workers=workers)

    async def PreemptWorker(
        self, request: admin_pb2.PreemptWorkerRequest, context: Context
    ) -> admin_pb2.PreemptWorkerResponse:
        node_id = await answered(context, lambda: self._preempt(request))
        return admin_pb2.PreemptWorkerResponse(node_id=node_id)

    async def _preempt(self, request: admin_pb2.PreemptWorkerRequest) -> str:
        if not 0 <= request.deadline_s < 86_400:
            raise ValueError(f"deadline_s {request.deadline_s:g}: give seconds from now, 0 to 86400")
        return await self._fleet.preempt(request.worker_id, request.deadline_s)

    async def KillWorker(self, request: admin_pb2.KillWorkerRequest, context: Context) -> admin_pb2.KillWorkerResponse:
        node_id = await answered(context, lambda: self._fleet.kill(request.worker_id))
        return admin_pb2.KillWorkerResponse(node_id=node_id)

    async def GetCluster(self, request: admin_pb2.GetClusterRequest, context: Context) -> admin_pb2.GetClusterResponse:
        incarnation = await answered(context, self._fleet.incarnation)
        return admin_pb2.GetClusterResponse(
            version=version("tideover"),
            model=self._fleet.model,
            leader=self._fleet.leader,
            term=self._fleet.term,
            incarnation=incarnation,
        )

    async def ListContext(
        self, request: admin_pb2.ListContextRequest, context: Context
    ) -> admin_pb2.ListContextResponse:
        asked = (request.job_id, request.line, request.choice, request.limit)
        return await answered(context, lambda: self._kept.listed(*asked))

    async def CollectContext(
        self, request: admin_pb2.CollectContextRequest, context: Context
    ) -> admin_pb2.CollectContextResponse:
        return await answered(context, lambda: self._kept.collected(request.dry_run))

    def _worker(self, status: WorkerStatus, notice: Notice | None) -> admin_pb2.Worker:
        return admin_pb2.Worker(
            worker_id=status.worker_id,
            node_id=status.node_id,
            model=status.model,
            state=status.state,
            running=status.running,
            waiting=status.waiting,
            max_num_seqs=status.max_num_seqs,
            tokens_per_s=status.tokens_per_s,
            pages_used=status.pages_used,
            pages_total=status.pages_total,
            numerics_class=status.numerics_class,
            notice=self._notice_text(notice),
            pid=status.pid,
            metrics_address=status.metrics_address,
        )

    def _notice_text(self, notice: Notice | None) -> str:
        if notice is None:
            return ""
        return f"{notice.kind.value} in {notice.deadline - self._clock():.0f} s ({notice.source})"
