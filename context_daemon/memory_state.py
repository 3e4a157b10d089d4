"""What the memory store keeps, and the moves that several transitions share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from context_daemon.records import (
    FencingToken,
    InterruptionCause,
    JobRecord,
    JobState,
    RequestKey,
    RequestSpec,
    RequestState,
    ResultLine,
)
from context_daemon.recovery_table import InterruptionRow
from context_daemon.states import ACTIVE_JOB_STATES, job_may, request_may
from context_daemon.store import StaleLeader, UnknownJob
from context_daemon.watermark import PageIndex


@dataclass
class MemoryRequest:
    key: RequestKey
    spec: RequestSpec
    state: RequestState = RequestState.READY
    token: FencingToken = field(default_factory=lambda: FencingToken(0, 0))
    worker_id: str = ""
    avoid_worker: str = ""
    tokens: list[int] = field(default_factory=list)
    pages: PageIndex = field(default_factory=PageIndex)
    owner_class: str = ""
    numerics_class: str = ""
    kv_at: str = ""
    exact: bool = True
    attempts: int = 0
    interruptions: int = 0
    commit_epoch: int = 0
    ready_since: int = 0
    leased_at: int = 0
    last_at: int | None = None
    result: ResultLine | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.spec.prompt_token_ids)

    def move(self, state: RequestState) -> None:
        if not request_may(self.state, state):
            raise ValueError(f"request {self.key} is {self.state}: it cannot become {state}")
        self.state = state


@dataclass
class MemoryJob:
    record: JobRecord
    incarnation: int
    term: int = 0
    output_tokens: int = 0
    requests: dict[RequestKey, MemoryRequest] = field(default_factory=dict)
    results: list[ResultLine] = field(default_factory=list)
    rows: dict[tuple[RequestKey, int], InterruptionRow] = field(default_factory=dict)

    def in_state(self, state: RequestState) -> list[MemoryRequest]:
        """In line order; nothing before the job has started."""
        if self.record.state not in ACTIVE_JOB_STATES:
            return []
        return [r for _, r in sorted(self.requests.items()) if r.state is state]

    def check_move(self, state: JobState) -> None:
        if not job_may(self.record.state, state):
            raise ValueError(f"the job is {self.record.state}: it cannot become {state}")


class MemoryState:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._jobs: dict[str, MemoryJob] = {}
        self._request_ids: dict[str, str] = {}
        self._incarnation = 1
        self.ahead_commits = 0

    def _now_us(self) -> int:
        return round(self._clock() * 1e6)

    def _job(self, job_id: str) -> MemoryJob:
        job = self._jobs.get(job_id)
        if job is None:
            raise UnknownJob("no such job")
        return job

    def _led(self, job_id: str, term: int) -> MemoryJob:
        """The job, once the term is known not to be an older leader's."""
        job = self._job(job_id)
        if term < job.term:
            raise StaleLeader(f"term {term} is older than {job.term}")
        job.term = term
        return job

    def _active(self) -> list[MemoryJob]:
        return [job for job in self._jobs.values() if job.record.state in ACTIVE_JOB_STATES]

    def _request(self, key: RequestKey) -> MemoryRequest | None:
        job = self._jobs.get(key.job_id)
        return None if job is None else job.requests.get(key)

    def _terminate(self, job: MemoryJob, r: MemoryRequest, state: RequestState, ok: bool, payload: bytes) -> None:
        r.move(state)
        r.result = ResultLine(len(job.results), r.key.line, ok, payload)
        job.results.append(r.result)

    def _interrupt(
        self, job: MemoryJob, r: MemoryRequest, taker: int, cause: InterruptionCause, target: str, now: int
    ) -> None:
        job.rows[(r.key, taker)] = InterruptionRow(
            line=r.key.line,
            custom_id=r.spec.custom_id,
            epoch=taker,
            cause=str(cause),
            source=r.worker_id,
            tokens=len(r.tokens),
            watermark=r.pages.watermark,
            prompt_tokens=r.prompt_tokens,
            last_at=r.leased_at if r.last_at is None else r.last_at,
            moved_at=now,
            choice=r.key.choice,
            target=target,
            leased_at=now if target else None,
        )
        if cause.blames_request:
            r.attempts += 1
        else:
            r.interruptions += 1
