"""Jobs in memory. The same transitions as lua/, in Python."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from context_daemon.lines import cancelled_line
from context_daemon.memory_state import MemoryJob, MemoryRequest, MemoryState
from context_daemon.records import (
    FencingToken,
    Interruption,
    JobRecord,
    JobState,
    RequestKey,
    RequestSpec,
    RequestState,
    ResultLine,
)
from context_daemon.recovery_table import report
from context_daemon.states import TERMINAL_JOB_STATES, finished_state
from context_daemon.store import Conflict


class MemoryJobs(MemoryState):
    async def create_job(self, job: JobRecord) -> JobRecord:
        if not job.request_id:
            raise ValueError(f"job {job.job_id}: request_id is empty; the caller draws one if the client gave none")
        job_id = self._request_ids.setdefault(job.request_id, job.job_id)
        if job_id not in self._jobs:
            fresh = JobRecord(
                job_id=job_id, request_id=job.request_id, state=JobState.VALIDATING, model=job.model,
                endpoint=job.endpoint, created_at=self._clock(), input_digest=job.input_digest, metadata=job.metadata,
            )  # fmt: skip
            self._jobs[job_id] = MemoryJob(fresh, self._incarnation)
        there = self._record(self._jobs[job_id])
        if there.input_digest != job.input_digest:
            raise Conflict(f"request_id {job.request_id!r} was used for job {job_id} with another payload")
        return there

    async def add_requests(self, job_id: str, specs: Sequence[RequestSpec]) -> None:
        job = self._job(job_id)
        for spec in specs:
            key = RequestKey(job_id, spec.line)
            if job.record.state is JobState.VALIDATING:
                job.requests[key] = MemoryRequest(key, spec)
            elif key not in job.requests or job.requests[key].spec != spec:
                raise ValueError(f"the job is {job.record.state}: it takes no more requests")

    async def start_job(self, job_id: str, total: int) -> JobRecord:
        job = self._job(job_id)
        if job.record.state is JobState.FAILED:
            raise ValueError("the job has failed: it cannot start")
        if job.record.state is JobState.VALIDATING:
            if len(job.requests) != total:
                raise ValueError(f"{len(job.requests)} requests are there, not {total}")
            self._move(job, JobState.IN_PROGRESS, total=total, started_at=self._clock())
            for r in job.requests.values():
                r.ready_since = self._now_us()
        return self._record(job)

    async def fail_job(self, job_id: str, error: str) -> JobRecord:
        job = self._job(job_id)
        if job.record.state is not JobState.FAILED:
            self._move(job, JobState.FAILED, error=error, finished_at=self._clock())
            job.requests.clear()
        return self._record(job)

    async def get_job(self, job_id: str) -> JobRecord | None:
        return self._record(self._jobs[job_id]) if job_id in self._jobs else None

    async def find_job(self, request_id: str) -> JobRecord | None:
        job_id = self._request_ids.get(request_id)
        return None if job_id is None else await self.get_job(job_id)

    async def list_jobs(self, *, offset: int = 0, limit: int = 100) -> list[JobRecord]:
        newest_first = [self._record(job) for job in reversed(self._jobs.values())]
        return newest_first[offset : offset + max(limit, 0)]

    async def active_jobs(self) -> list[JobRecord]:
        return [self._record(job) for job in self._active()]

    async def cancel_job(self, job_id: str) -> JobRecord:
        job = self._job(job_id)
        if job.record.state not in TERMINAL_JOB_STATES and job.record.state is not JobState.CANCELLING:
            self._move(job, JobState.CANCELLING)
        return self._record(job)

    async def cancel_requests(self, job_id: str, term: int, limit: int = 500) -> int:
        job = self._led(job_id, term)
        if job.record.state in (JobState.VALIDATING, JobState.IN_PROGRESS, JobState.FINALIZING):
            raise ValueError(f"the job is {job.record.state}: cancel it first")
        open_ = job.in_state(RequestState.READY) + job.in_state(RequestState.LEASED)
        for r in open_[:limit]:
            r.token = FencingToken(r.token.incarnation, r.token.epoch + 1)
            self._terminate(job, r, RequestState.CANCELLED, False, cancelled_line(r.key, r.spec.custom_id))
        return len(open_[limit:])

    async def finish_job(self, job_id: str, term: int) -> JobRecord:
        job = self._led(job_id, term)
        after = finished_state(job.record.state)
        if after is not None and len(job.results) == job.record.total:
            self._move(job, after, finished_at=self._clock())
        return self._record(job)

    async def results(self, job_id: str, start: int, limit: int) -> list[ResultLine]:
        return self._jobs[job_id].results[start : start + max(limit, 0)] if job_id in self._jobs else []

    async def interruptions(self, job_id: str) -> list[Interruption]:
        return report(list(self._jobs[job_id].rows.values())) if job_id in self._jobs else []

    def _move(self, job: MemoryJob, state: JobState, *, total: int | None = None, started_at: float | None = None,
              finished_at: float | None = None, error: str | None = None) -> None:  # fmt: skip
        job.check_move(state)
        changes = {"total": total, "started_at": started_at, "finished_at": finished_at, "error": error}
        known = {name: value for name, value in changes.items() if value is not None}
        job.record = msgspec.structs.replace(job.record, state=state, **known)

    def _record(self, job: MemoryJob) -> JobRecord:
        completed = sum(line.ok for line in job.results)
        counts = {"completed": completed, "failed": len(job.results) - completed, "output_tokens": job.output_tokens}
        return msgspec.structs.replace(job.record, **counts)
