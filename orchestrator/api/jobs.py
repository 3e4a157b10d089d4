"""JobsService: what clients call. Each method translates, calls the service, and maps errors."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Callable

from context_daemon.records import JobRecord
from orchestrator.api import messages
from orchestrator.api.errors import Context, abort, answered
from orchestrator.api.fleet_view import FleetView
from orchestrator.client import OPEN_KEY
from orchestrator.jobs.progress import Progress
from orchestrator.jobs.service import TERMINAL, JobHeader, JobService
from protos import jobs_pb2, jobs_pb2_grpc

_PAGE = 500  # result lines read at once
_MAX_JOBS = 1000
_FOLLOW_S = 0.2


class JobsServicer(jobs_pb2_grpc.JobsServiceServicer):
    def __init__(self, jobs: JobService, fleet: FleetView, clock: Callable[[], float]) -> None:
        self._jobs = jobs
        self._fleet = fleet
        self._clock = clock

    async def CreateJob(
        self, requests: AsyncIterator[jobs_pb2.CreateJobRequest], context: Context
    ) -> jobs_pb2.CreateJobResponse:
        record: JobRecord = await answered(context, lambda: self._create(requests))
        return jobs_pb2.CreateJobResponse(job=messages.job(record))

    async def _create(self, requests: AsyncIterator[jobs_pb2.CreateJobRequest]) -> JobRecord:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("part") != "header":
            raise ValueError("the first message of CreateJob must be the header")
        header = JobHeader(first.header.request_id, first.header.model, dict(first.header.metadata))
        return await self._jobs.create_job(header, _chunks(requests))

    async def GetJob(self, request: jobs_pb2.GetJobRequest, context: Context) -> jobs_pb2.GetJobResponse:
        record = await answered(context, lambda: self._jobs.get_job(request.job_id))
        return jobs_pb2.GetJobResponse(job=messages.job(record))

    async def ListJobs(self, request: jobs_pb2.ListJobsRequest, context: Context) -> jobs_pb2.ListJobsResponse:
        return await answered(context, lambda: self._list(request))

    async def _list(self, request: jobs_pb2.ListJobsRequest) -> jobs_pb2.ListJobsResponse:
        if request.page_size < 0:
            raise ValueError(f"page_size {request.page_size}: it must be 0 (the default) or more")
        size = min(request.page_size or 100, _MAX_JOBS)
        offset = _offset(request.page_token)
        found = await self._jobs.list_jobs(offset, size + 1)
        token = _token(offset + size) if len(found) > size else ""
        return jobs_pb2.ListJobsResponse(jobs=[messages.job(item) for item in found[:size]], next_page_token=token)

    async def CancelJob(self, request: jobs_pb2.CancelJobRequest, context: Context) -> jobs_pb2.CancelJobResponse:
        record = await answered(context, lambda: self._jobs.cancel_job(request.job_id))
        return jobs_pb2.CancelJobResponse(job=messages.job(record))

    async def ListInterruptions(
        self, request: jobs_pb2.ListInterruptionsRequest, context: Context
    ) -> jobs_pb2.ListInterruptionsResponse:
        rows = await answered(context, lambda: self._jobs.interruptions(request.job_id))
        return jobs_pb2.ListInterruptionsResponse(interruptions=[messages.interruption(row) for row in rows])

    async def StreamResults(
        self, request: jobs_pb2.StreamResultsRequest, context: Context
    ) -> AsyncIterator[jobs_pb2.StreamResultsResponse]:
        try:
            if request.start < 0:
                raise ValueError(f"start {request.start}: it must be 0 or more")
            await self._jobs.get_job(request.job_id)
            await context.send_initial_metadata(((OPEN_KEY, "1"),))
            async for line in self._results(request):
                yield line
        except Exception as error:  # noqa: BLE001 - every failure must become a status
            await abort(context, error)

    async def _results(self, request: jobs_pb2.StreamResultsRequest) -> AsyncIterator[jobs_pb2.StreamResultsResponse]:
        index = request.start
        while True:
            # The state is read before the lines: a job seen terminal has all of them.
            job = await self._jobs.get_job(request.job_id)
            lines = await self._jobs.results(request.job_id, index, _PAGE)
            for line in lines:
                yield messages.result(line)
            index += len(lines)
            if len(lines) < _PAGE:
                if job.state in TERMINAL or not request.follow:
                    return
                await asyncio.sleep(_FOLLOW_S)

    async def WatchJob(
        self, request: jobs_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[jobs_pb2.WatchJobResponse]:
        try:
            async for update in self._watch(request):
                yield update
        except Exception as error:  # noqa: BLE001 - every failure must become a status
            await abort(context, error)

    async def _watch(self, request: jobs_pb2.WatchJobRequest) -> AsyncIterator[jobs_pb2.WatchJobResponse]:
        progress = Progress()
        cursor = self._fleet.event_cursor
        interval = min(60.0, max(0.1, request.interval_s or 0.5))
        while True:
            job = await self._jobs.get_job(request.job_id)
            update, cursor = await self._update(job, progress, cursor)
            yield update
            if job.state in TERMINAL:
                return
            await asyncio.sleep(interval)

    async def _update(self, job: JobRecord, progress: Progress, cursor: int) -> tuple[jobs_pb2.WatchJobResponse, int]:
        now = self._clock()
        progress.look(job, now)
        events = self._fleet.events_since(cursor)
        workers = await self._fleet.workers()
        running = sum(held[0] == job.job_id for worker in workers for held in worker.held)
        update = jobs_pb2.WatchJobResponse(
            job=messages.job(job),
            workers=messages.workers(workers),
            events=messages.events(events),
            tokens_per_s=progress.tokens_per_s(),
            elapsed_s=max(0.0, (job.finished_at or now) - job.started_at) if job.started_at else 0.0,
            eta_s=progress.eta_s(job, running),
            waiting_for=self._jobs.waiting_for(job.job_id),
        )
        return update, events[-1].cursor if events else cursor


async def _chunks(requests: AsyncIterator[jobs_pb2.CreateJobRequest]) -> AsyncIterator[bytes]:
    async for request in requests:
        if request.WhichOneof("part") != "data":
            raise ValueError("after the header every message of CreateJob must carry data")
        yield request.data


def _token(offset: int) -> str:
    return base64.urlsafe_b64encode(f"o{offset}".encode()).decode()


def _offset(token: str) -> int:
    if not token:
        return 0
    try:
        text = base64.urlsafe_b64decode(token.encode()).decode()
        if text[:1] == "o":
            return max(0, int(text[1:]))
    except (binascii.Error, UnicodeError, ValueError) as error:
        raise ValueError(f"page_token {token!r} was not made by this service") from error
    raise ValueError(f"page_token {token!r} was not made by this service")
