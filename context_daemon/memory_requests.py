"""Requests in memory: leases, token logs, watermarks, cut-overs. The same transitions as lua/, in Python."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from context_daemon.memory_state import MemoryJob, MemoryRequest, MemoryState
from context_daemon.records import (
    CommitResult,
    CommitStatus,
    FencingToken,
    InterruptionCause,
    JobState,
    KVWatermark,
    Lease,
    RequestKey,
    RequestRecord,
    RequestState,
    TokenCommit,
)
from context_daemon.store import LeasedRequest, LeaseRequest, ReadyRequest
from context_daemon.watermark import advance

_TERMINAL_OK = {True: RequestState.COMPLETED, False: RequestState.FAILED}


class MemoryRequests(MemoryState):
    async def ready_requests(self, job_id: str, limit: int) -> list[ReadyRequest]:
        ready = self._job(job_id).in_state(RequestState.READY) if job_id in self._jobs else []
        return [_ready(r) for r in ready[: max(limit, 0)]]

    async def leased_requests(self, job_id: str) -> list[LeasedRequest]:
        leased = self._job(job_id).in_state(RequestState.LEASED) if job_id in self._jobs else []
        return [_leased(r) for r in leased]

    async def lease(self, job_id: str, term: int, requests: Sequence[LeaseRequest]) -> list[Lease]:
        if not requests:
            return []
        for wanted in requests:
            _of_job(job_id, wanted.key)
        job = self._led(job_id, term)
        job.incarnation = max(job.incarnation, self._incarnation)
        leases = [self._lease(job, wanted) for wanted in requests]
        return [lease for lease in leases if lease is not None]

    def _lease(self, job: MemoryJob, wanted: LeaseRequest) -> Lease | None:
        r = job.requests.get(wanted.key)
        if r is None:
            return None
        token = FencingToken(job.incarnation, wanted.epoch + 1)
        free = r.state is RequestState.READY and r.token.epoch == wanted.epoch
        if free and job.record.state is JobState.IN_PROGRESS:
            r.move(RequestState.LEASED)
            r.token, r.worker_id, r.owner_class = token, wanted.worker_id, wanted.numerics_class
            r.leased_at, r.last_at = self._now_us(), None
            r.exact = r.exact and wanted.exact and r.numerics_class in ("", wanted.numerics_class)
            row = job.rows.get((r.key, token.epoch))
            if row is not None:
                row.target, row.leased_at = wanted.worker_id, r.leased_at
            return Lease(r.key, token, r.worker_id)
        repeat = r.state is RequestState.LEASED and r.token == token and r.worker_id == wanted.worker_id
        return Lease(r.key, token, r.worker_id) if repeat and r.commit_epoch != token.epoch else None

    async def requeue(
        self, job_id: str, term: int, keys: Sequence[tuple[RequestKey, FencingToken]], cause: InterruptionCause
    ) -> int:
        for key, _ in keys:
            _of_job(job_id, key)
        job = self._led(job_id, term)
        return sum(self._requeue(job, key, token, cause) for key, token in keys)

    def _requeue(self, job: MemoryJob, key: RequestKey, token: FencingToken, cause: InterruptionCause) -> bool:
        r = job.requests.get(key)
        if r is None:
            return False
        if r.state is RequestState.LEASED and r.token == token:
            self._to_ready(job, r, cause)
            return True
        return r.state is RequestState.READY and r.token == FencingToken(token.incarnation, token.epoch + 1)

    def _to_ready(self, job: MemoryJob, r: MemoryRequest, cause: InterruptionCause) -> None:
        now = self._now_us()
        self._interrupt(job, r, r.token.epoch + 2, cause, "", now)
        r.move(RequestState.READY)
        r.token = FencingToken(r.token.incarnation, r.token.epoch + 1)
        r.avoid_worker, r.worker_id, r.ready_since = r.worker_id, "", now

    async def fail_request(self, key: RequestKey, term: int, epoch: int, payload: bytes) -> bool:
        job = self._led(key.job_id, term)
        r = job.requests.get(key)
        if r is None or r.token.epoch != epoch:
            return False
        if r in job.in_state(RequestState.READY):
            self._terminate(job, r, RequestState.FAILED, False, payload)
        return r.state is RequestState.FAILED

    async def get_request(self, key: RequestKey) -> RequestRecord | None:
        r = self._request(key)
        return None if r is None else _record(r)

    async def commit(self, commits: Sequence[TokenCommit]) -> list[CommitResult]:
        for commit in commits:
            if commit.position < 0:
                raise ValueError(f"commit of {commit.key}: position {commit.position} is negative")
        results = []
        for commit in commits:
            before = self.ahead_commits
            status, length = self._commit(commit)
            results.append(CommitResult(commit.key, status, length, ahead=self.ahead_commits > before))
        return results

    def _commit(self, commit: TokenCommit) -> tuple[CommitStatus, int]:
        r = self._request(commit.key)
        if r is None:
            self.ahead_commits += 1
            return CommitStatus.FENCED, 0
        job, length, end = self._jobs[commit.key.job_id], len(r.tokens), commit.position + len(commit.tokens)
        if commit.token != r.token or r.token.incarnation != job.incarnation or r.state is RequestState.READY:
            self.ahead_commits += commit.token > r.token
            return CommitStatus.FENCED, length
        if commit.position > length:
            return CommitStatus.GAP, length
        known = commit.tokens[: length - commit.position]
        if tuple(r.tokens[commit.position : commit.position + len(known)]) != known:
            return CommitStatus.DIVERGED, length
        if commit.finish is not None and end < length:
            return CommitStatus.DIVERGED, length
        if r.state is not RequestState.LEASED:
            return self._repeat_after_finish(r, commit, new=end > length), length
        self._append(job, r, commit, commit.tokens[len(known) :])
        return CommitStatus.OK, len(r.tokens)

    def _repeat_after_finish(self, r: MemoryRequest, commit: TokenCommit, new: bool) -> CommitStatus:
        if new:
            return CommitStatus.FENCED
        if commit.finish is None or r.result is None:
            return CommitStatus.OK
        same = (commit.finish.ok, commit.finish.payload) == (r.result.ok, r.result.payload)
        return CommitStatus.OK if same else CommitStatus.DIVERGED

    def _append(self, job: MemoryJob, r: MemoryRequest, commit: TokenCommit, new: tuple[int, ...]) -> None:
        now, epoch, row = self._now_us(), r.token.epoch, job.rows.get((r.key, r.token.epoch))
        if new:
            r.tokens.extend(new)
            job.output_tokens += len(new)
            r.numerics_class = r.owner_class
        r.kv_at = commit.kv_at or r.kv_at
        if new or commit.finish is not None:
            r.last_at = now
            if r.commit_epoch != epoch and row is not None:
                row.first_at = now
            r.commit_epoch = epoch
        if commit.resume is not None and row is not None:
            for name, value in msgspec.structs.asdict(commit.resume).items():
                setattr(row, name, value)
        if commit.watermark is not None:
            r.pages = advance(r.pages, epoch, r.prompt_tokens + len(r.tokens), commit.watermark)
        if commit.finish is not None:
            self._terminate(job, r, _TERMINAL_OK[commit.finish.ok], commit.finish.ok, commit.finish.payload)

    async def handover(
        self,
        key: RequestKey,
        token: FencingToken,
        length: int,
        watermark: KVWatermark | None,
        target: str,
        cause: InterruptionCause,
    ) -> Lease | None:
        r = self._request(key)
        if r is None:
            return None
        job, after = self._jobs[key.job_id], FencingToken(token.incarnation, token.epoch + 1)
        if r.token == after and r.worker_id == target and (target or r.state is RequestState.READY):
            return None if r.state is RequestState.CANCELLED else Lease(key, after, target)
        owned = r.state is RequestState.LEASED and r.token == token and token.incarnation == job.incarnation
        if not owned or len(r.tokens) != length or (target and job.record.state is not JobState.IN_PROGRESS):
            return None
        if watermark is not None:
            r.pages = advance(r.pages, token.epoch, r.prompt_tokens + length, watermark)
        if not target:
            self._to_ready(job, r, cause)
            return Lease(key, after, "")
        now = self._now_us()
        self._interrupt(job, r, after.epoch, cause, target, now)
        r.move(RequestState.LEASED)
        r.token, r.worker_id, r.leased_at, r.last_at = after, target, now, None
        return Lease(key, after, target)


def _of_job(job_id: str, key: RequestKey) -> None:
    if key.job_id != job_id:
        raise ValueError(f"request {key} is not of job {job_id}: one call holds one job's requests")


def _ready(r: MemoryRequest) -> ReadyRequest:
    return ReadyRequest(
        key=r.key, epoch=r.token.epoch, prompt_tokens=r.prompt_tokens, tokens=len(r.tokens),
        max_tokens=r.spec.params.max_tokens, numerics_class=r.numerics_class, attempts=r.attempts,
        interruptions=r.interruptions, ready_since=r.ready_since / 1e6, avoid_worker=r.avoid_worker,
    )  # fmt: skip


def _leased(r: MemoryRequest) -> LeasedRequest:
    return LeasedRequest(
        key=r.key, token=r.token, worker_id=r.worker_id, tokens=len(r.tokens), prompt_tokens=r.prompt_tokens,
        max_tokens=r.spec.params.max_tokens, numerics_class=r.owner_class, leased_at=r.leased_at / 1e6,
        attempts=r.attempts,
    )  # fmt: skip


def _record(r: MemoryRequest) -> RequestRecord:
    return RequestRecord(
        key=r.key, spec=r.spec, state=r.state, token=r.token, worker_id=r.worker_id, tokens=tuple(r.tokens),
        watermark=r.pages.watermark, layout=r.pages.layout, segments=r.pages.segments,
        numerics_class=r.numerics_class, exact=r.exact, attempts=r.attempts, interruptions=r.interruptions,
        kv_at=r.kv_at,
    )  # fmt: skip
