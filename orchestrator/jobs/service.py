"""JobService: what the API does with jobs, over the durable store. Knows nothing of gRPC."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from context_daemon.observability import get_logger
from context_daemon.records import Interruption, JobRecord, JobState, RequestSpec, ResultLine
from context_daemon.store import ContextStore
from orchestrator.jobs.batchfile import Line, LineError, LineSplitter
from orchestrator.jobs.validation import ModelLimits, Validator
from worker.text import Tokenizer

log = get_logger()

TERMINAL = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)
MAX_ERRORS = 100
_WRITE_AT_ONCE = 500  # requests


class InvalidBatch(Exception):
    """The file is refused as a whole; `errors` says why, line by line."""

    def __init__(self, errors: Sequence[LineError]) -> None:
        self.errors = tuple(errors)
        first = errors[0]
        where = f"line {first.line}: " if first.line else ""
        more = f" (and {len(errors) - 1} more errors)" if len(errors) > 1 else ""
        super().__init__(f"{where}{first.message}{more}")


class UnknownJob(Exception):
    """No job has this id."""


class UnknownModel(Exception):
    """The cluster does not serve this model."""


@dataclass(frozen=True, slots=True)
class JobHeader:
    request_id: str
    model: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


class JobService:
    """`waiting_for` says per job why nothing of it can be placed; the router keeps it."""

    def __init__(
        self,
        store: ContextStore,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        waiting_for: Mapping[str, str],
        clock: Callable[[], float],
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
        new_id: Callable[[], str] = lambda: f"batch_{secrets.token_hex(12)}",
    ) -> None:
        self._store = store
        self._tokenizer = tokenizer
        self._limits = limits
        self._waiting_for = waiting_for
        self._clock = clock
        self._draw_seed = draw_seed
        self._new_id = new_id

    async def create_job(self, header: JobHeader, chunks: AsyncIterator[bytes]) -> JobRecord:
        """Accept a whole file or nothing. Raises InvalidBatch, UnknownModel, or Conflict for another payload."""
        if header.model not in ("", self._limits.name):
            raise UnknownModel(f"model {header.model!r} is not served here: this cluster runs {self._limits.name!r}")
        if not header.request_id:
            raise ValueError("request_id is empty: choose one, so that a repeated call makes no second job")
        specs, endpoint, digest = await self._read(chunks)
        job = JobRecord(
            job_id=self._new_id(),
            request_id=header.request_id,
            state=JobState.VALIDATING,
            model=self._limits.name,
            endpoint=endpoint,
            created_at=self._clock(),
            input_digest=digest,
            metadata=dict(header.metadata),
        )
        job = await self._store.create_job(job)
        if job.state is not JobState.VALIDATING:
            return job  # a repeat: accepted before
        return await self._start(job, specs)

    async def _start(self, job: JobRecord, specs: list[RequestSpec]) -> JobRecord:
        for at in range(0, len(specs), _WRITE_AT_ONCE):
            await self._store.add_requests(job.job_id, specs[at : at + _WRITE_AT_ONCE])
        started = await self._store.start_job(job.job_id, len(specs))
        log.info("job_accepted", job=job.job_id, requests=len(specs), request_id=job.request_id)
        return started

    async def _read(self, chunks: AsyncIterator[bytes]) -> tuple[list[RequestSpec], str, str]:
        """Every line checked before anything is written."""
        splitter, validator = LineSplitter(), Validator(self._tokenizer, self._limits, self._draw_seed)
        digest = hashlib.sha256()
        specs: list[RequestSpec] = []
        errors: list[LineError] = []
        async for chunk in chunks:
            digest.update(chunk)
            # in a thread: tokenising a large file must not hold up leases and heartbeats
            await asyncio.to_thread(_sort_all, splitter.feed(chunk), validator, specs, errors)
        await asyncio.to_thread(_sort_all, splitter.end(), validator, specs, errors)
        if not specs and not errors:
            errors.append(LineError(0, "empty_file", "the file has no requests"))
        if errors:
            raise InvalidBatch(errors)
        return specs, validator.endpoint, digest.hexdigest()

    async def get_job(self, job_id: str) -> JobRecord:
        job = await self._store.get_job(job_id)
        if job is None:
            raise UnknownJob(f"no job {job_id!r}; `tideover status` lists them{await self._losses()}")
        return job

    async def list_jobs(self, offset: int, limit: int) -> list[JobRecord]:
        return await self._store.list_jobs(offset=offset, limit=limit)

    async def cancel_job(self, job_id: str) -> JobRecord:
        await self.get_job(job_id)
        return await self._store.cancel_job(job_id)

    async def results(self, job_id: str, start: int, limit: int) -> list[ResultLine]:
        return await self._store.results(job_id, start, limit)

    async def interruptions(self, job_id: str) -> list[Interruption]:
        await self.get_job(job_id)
        return await self._store.interruptions(job_id)

    async def _losses(self) -> str:
        """A job that its user was told of and that is gone needs a word on why."""
        if (incarnation := await self._store.incarnation()) == 1:
            return ""
        return (
            f". The durable store has lost writes (incarnation {incarnation}): if this job was accepted before, it is lost, "
            "submit it again"
        )

    def waiting_for(self, job_id: str) -> str:
        return self._waiting_for.get(job_id, "")


def _sort_all(
    items: Iterable[Line | LineError], validator: Validator, specs: list[RequestSpec], errors: list[LineError]
) -> None:
    for item in items:
        _sort_in(item, validator, specs, errors)


def _sort_in(item: Line | LineError, validator: Validator, specs: list[RequestSpec], errors: list[LineError]) -> None:
    if isinstance(item, Line):
        checked = validator.check(item)
        if isinstance(checked, RequestSpec):
            if not errors:  # once one line is bad nothing will be written; keep no more
                specs.append(checked)
            return
        item = checked
    if len(errors) < MAX_ERRORS:
        errors.append(item)
