"""ContextStore and KVStore: the durable contract and its soft companion.

Both have a Redis and an in-memory implementation, which pass one contract suite. Every transition is one atomic,
idempotent script: called twice with the same arguments (a reply was lost) it changes nothing the second time and answers
the same. Times are the store's own clock in seconds since the epoch, so that two hosts' clocks are never compared.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from context_daemon.records import (
    CommitResult,
    FencingToken,
    Interruption,
    InterruptionCause,
    JobRecord,
    KVWatermark,
    Lease,
    Notice,
    RequestKey,
    RequestRecord,
    RequestSpec,
    ResultLine,
    TokenCommit,
    WorkerStatus,
)


class StoreUnavailable(Exception):
    """The server does not answer; nothing is known about the call. Retry the same call: it is idempotent."""


class StoreRefusesWrites(StoreUnavailable):
    """The server answers but takes no writes (full disk under its AOF, memory limit, replica); the text says which."""


class UnknownJob(LookupError):
    """No job has this id."""


class StaleLeader(Exception):
    """Another orchestrator leads with a higher term; the caller must step down."""


class Conflict(Exception):
    """The identity exists with other content (a job's request_id with another payload)."""


class LeaseRequest(msgspec.Struct, frozen=True):
    """Give `key`, READY at `epoch`, to `worker_id`. `exact=False` records that the request crosses numerics classes."""

    key: RequestKey
    epoch: int
    worker_id: str
    numerics_class: str
    exact: bool = True


class ReadyRequest(msgspec.Struct, frozen=True):
    """What placement needs to know of a waiting request, without its prompt."""

    key: RequestKey
    epoch: int
    prompt_tokens: int
    tokens: int
    max_tokens: int
    numerics_class: str
    attempts: int
    interruptions: int
    ready_since: float
    avoid_worker: str  # the worker it was just taken from, "" if none


class LeasedRequest(msgspec.Struct, frozen=True):
    """A row of the lease table: enough for the observer's timers and for a drain's targets."""

    key: RequestKey
    token: FencingToken
    worker_id: str
    tokens: int
    prompt_tokens: int
    max_tokens: int
    numerics_class: str
    leased_at: float
    attempts: int = 0  # > 0: a suspect, which runs alone


class ContextStore(Protocol):
    """What must survive. Everything acknowledged here outlives every worker and the orchestrator."""

    # -- jobs -------------------------------------------------------------------------------------------------------
    async def create_job(self, job: JobRecord) -> JobRecord:
        """Record a job as VALIDATING. Repeating with the same `request_id` and `input_digest` returns the job that
        exists (whatever its state now, under the first one's job_id); another digest raises Conflict."""

    async def add_requests(self, job_id: str, specs: Sequence[RequestSpec]) -> None:
        """Write requests of a VALIDATING job; not visible to placement before `start_job`. Repeats overwrite equally."""

    async def start_job(self, job_id: str, total: int) -> JobRecord:
        """VALIDATING -> IN_PROGRESS with all requests READY in line order. Raises ValueError if `total` requests are not
        there. Idempotent. After it returns the job survives every process."""

    async def fail_job(self, job_id: str, error: str) -> JobRecord:
        """VALIDATING -> FAILED: nothing was accepted; its requests are deleted."""

    async def get_job(self, job_id: str) -> JobRecord | None: ...

    async def find_job(self, request_id: str) -> JobRecord | None: ...

    async def list_jobs(self, *, offset: int = 0, limit: int = 100) -> list[JobRecord]:
        """Newest first."""

    async def active_jobs(self) -> list[JobRecord]:
        """Jobs IN_PROGRESS, FINALIZING or CANCELLING, oldest first."""

    async def cancel_job(self, job_id: str) -> JobRecord:
        """IN_PROGRESS -> CANCELLING: from here on no request of it is leased. Terminal jobs are returned unchanged."""

    async def cancel_requests(self, job_id: str, term: int, limit: int = 500) -> int:
        """Of a CANCELLING job, give up to `limit` READY or LEASED requests their `batch_cancelled` error line (owners are
        fenced by an epoch bump). Returns how many are left. Finished lines are not touched."""

    async def finish_job(self, job_id: str, term: int) -> JobRecord:
        """If every line is terminal: IN_PROGRESS -> COMPLETED, CANCELLING -> CANCELLED; else returned unchanged."""

    # -- requests: the orchestrator's side --------------------------------------------------------------------------
    async def ready_requests(self, job_id: str, limit: int) -> list[ReadyRequest]:
        """In line order."""

    async def leased_requests(self, job_id: str) -> list[LeasedRequest]: ...

    async def lease(self, job_id: str, term: int, requests: Sequence[LeaseRequest]) -> list[Lease]:
        """READY at that epoch -> LEASED with epoch + 1. What is not READY at that epoch any more is left out, except a
        repeat of this very lease (same worker, epoch + 1, no commit yet), which is answered again."""

    async def requeue(
        self, job_id: str, term: int, keys: Sequence[tuple[RequestKey, FencingToken]], cause: InterruptionCause
    ) -> int:
        """LEASED under that token -> READY with epoch + 1 (so that the old owner is fenced at once); records the
        interruption. ENGINE_FAULT adds an attempt, every other cause an interruption. Returns how many moved."""

    async def fail_request(self, key: RequestKey, term: int, epoch: int, payload: bytes) -> bool:
        """READY at that epoch -> FAILED with its error line (a convicted suspect, or no worker can ever run it)."""

    # -- requests: the owner's side ---------------------------------------------------------------------------------
    async def get_request(self, key: RequestKey) -> RequestRecord | None: ...

    async def commit(self, commits: Sequence[TokenCommit]) -> list[CommitResult]:
        """Write tokens at their positions under the owner's token, one script per job. With `finish`, also the result
        line, the terminal state and the job's counts, in the same script. A repeat of what is there (a finish included)
        is OK. A watermark is clamped to T-1, never moves back within an epoch, and is recorded with its segment: pages
        from `first_page` on lie under this epoch, earlier segments are cut there. `resume` completes the epoch's row of
        the recovery table. An owner whose token is higher than the store's proves that the store lost data: FENCED, and
        `ahead`."""

    async def handover(
        self,
        key: RequestKey,
        token: FencingToken,
        length: int,
        watermark: KVWatermark | None,
        target: str,
        cause: InterruptionCause,
    ) -> Lease | None:
        """The cut-over: if owned under `token` with exactly `length` tokens, epoch + 1 goes to `target`; with target ""
        the request goes back to READY. None if the condition fails (the source goes on, or was fenced). A repeat after a
        lost reply returns the same lease. Back to READY returns a Lease with worker_id ""."""

    # -- results ----------------------------------------------------------------------------------------------------
    async def results(self, job_id: str, start: int, limit: int) -> list[ResultLine]:
        """Result and error lines in completion order from index `start`."""

    async def interruptions(self, job_id: str) -> list[Interruption]:
        """The recovery table, by epoch within line."""

    # -- fleet ------------------------------------------------------------------------------------------------------
    async def put_worker(self, status: WorkerStatus, ttl_s: float) -> None: ...

    async def workers(self) -> list[WorkerStatus]: ...

    async def remove_worker(self, worker_id: str) -> None: ...

    async def put_notice(self, notice: Notice) -> bool:
        """True if it is new. Kept until well past its deadline."""

    async def withdraw_notice(self, notice_id: str) -> None: ...

    async def notices(self) -> list[Notice]: ...

    async def acquire_leadership(self, holder: str, ttl_s: float) -> int | None:
        """A term (grows by one with each new holder), or None while another holds it. Renewing returns the same term."""

    async def incarnation(self) -> int: ...

    async def bump_incarnation(self, seen: int) -> int:
        """`seen` -> `seen + 1`, once, when the store is found to have lost acknowledged writes; also when it has gone back
        behind `seen` itself. Returns the one in force. Every owner is fenced; requests come back to READY by `requeue`.
        A writer of a store that can lose anything calls this by itself before it says the first word to a server that
        lost what this writer had been acknowledged."""

    async def server_id(self) -> str:
        """Changes when the server process was restarted."""

    async def noted_server(self) -> str:
        """The `server_id` that a leader noted last, "" if none did. A new leader cannot know what another one's server
        may have lost: it raises the incarnation when this is another than the present one."""

    async def note_server(self, server_id: str) -> None: ...

    async def close(self) -> None: ...


class SlotWrite(msgspec.Struct, frozen=True):
    """Consecutive KV slots of one request: `data` holds `count` framed slots from `start` on (see kv_slots.frame)."""

    key: RequestKey
    epoch: int
    layout: str
    start: int
    count: int
    slot_bytes: int  # unframed
    page_size: int
    data: bytes | memoryview


class StoredPage(msgspec.Struct, frozen=True):
    """What lies in a KV store, whether or not anybody will come for it."""

    key: RequestKey
    layout: str
    epoch: int
    page: int
    bytes: int = 0  # framed


class KVStore(Protocol):
    """Page bytes: soft, evictable, unfenced. Pages lie under (request, epoch, page); slots carry their own checksum."""

    async def write_slots(self, writes: Sequence[SlotWrite]) -> str:
        """Write by slot offset (repeats are harmless); one SET for a whole page, SETRANGE for parts. Returns the server's
        generation: when it changes, everything written before may be gone."""

    async def read_page(self, key: RequestKey, epoch: int, layout: str, page: int) -> bytes | None:
        """The framed slots of a page, possibly fewer than page_size; None if absent."""

    async def delete_request(self, key: RequestKey, epochs: Sequence[int], layout: str, pages: int) -> None: ...

    def list_pages(self, job_id: str = "") -> AsyncGenerator[list[StoredPage], None]:
        """Every page that is there, of one job or of all, some at a time. One that comes or goes meanwhile may be missing,
        and one may come twice. Of several servers those that are away are left out; StoreUnavailable is raised at the end.
        Raises ValueError for what is no job id."""

    async def delete_pages(self, pages: Sequence[StoredPage]) -> int:
        """Returns how many were there."""

    async def close(self) -> None: ...
