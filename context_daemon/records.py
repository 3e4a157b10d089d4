"""Plain records that cross rooms: who a request is, who owns it, what was committed.

No I/O and no torch here; every layer above may import this module.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated

import msgspec


class RequestKey(msgspec.Struct, frozen=True, order=True):
    """Identity of one sequence: a line of a job, and which of its choices."""

    job_id: str
    line: int  # 1-based line number in the submitted file
    choice: int = 0

    def __str__(self) -> str:
        return f"{self.job_id}/{self.line}" + (f".{self.choice}" if self.choice else "")


class FencingToken(msgspec.Struct, frozen=True, order=True):
    """Orders owners in time. The epoch grows with each lease, the incarnation when the durable store lost data."""

    incarnation: int
    epoch: int


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are drawn. `temperature == 0` is greedy; `top_k == 0` and `top_p == 1` mean off.

    `seed` is never missing: one is drawn at acceptance when the user gave none.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Endpoint(StrEnum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class RequestSpec(msgspec.Struct, frozen=True):
    """What the user asked for on one line, after validation. Immutable for the life of the request."""

    line: int
    custom_id: str
    endpoint: Endpoint
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


class RequestState(StrEnum):
    READY = "ready"  # waits for an owner
    LEASED = "leased"  # owned under a fencing token
    COMPLETED = "completed"
    FAILED = "failed"  # has its error line
    CANCELLED = "cancelled"  # has its error line; the job was cancelled


class JobState(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


PAGE_SIZE = 16  # tokens, where nobody says otherwise


class KVLayout(msgspec.Struct, frozen=True):
    """Says which bytes a KV slot holds, so that only bytes of the same making are ever restored.

    A slot is one token's KV: `[layer][k|v][kv_head][head_dim]`, heads in canonical order.
    """

    model_fingerprint: str  # weights, config and RoPE settings
    numerics_class: str
    dtype: str  # "float32", "bfloat16", "float16"
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int = PAGE_SIZE

    @property
    def slot_bytes(self) -> int:
        itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * itemsize

    @property
    def fingerprint(self) -> str:
        """16 hex digits that stand for the whole layout in keys and messages."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class KVSegment(msgspec.Struct, frozen=True):
    """Pages `first_page` onwards lie under this epoch (until a later segment's first page)."""

    epoch: int
    first_page: int


class CommitStatus(StrEnum):
    OK = "ok"  # durable now, or was already there
    FENCED = "fenced"  # not the owner any more: drop the sequence
    GAP = "gap"  # the store holds fewer tokens: send again from `length`
    DIVERGED = "diverged"  # other tokens are committed there: refused, counted, loud


class Finish(msgspec.Struct, frozen=True):
    """Terminal part of a commit: the result line that the finishing script writes, once."""

    ok: bool
    payload: bytes  # one JSON object in OpenAI's output or error line shape, no newline


class KVWatermark(msgspec.Struct, frozen=True):
    """Positions `[0, positions)` of a request have KV in the store; written from `first_page` on by this epoch."""

    positions: int
    first_page: int
    layout: str  # KVLayout.fingerprint


class TokenCommit(msgspec.Struct, frozen=True):
    """One request's part of a step. `position` counts generated tokens from 0."""

    key: RequestKey
    token: FencingToken
    position: int
    tokens: tuple[int, ...]
    watermark: KVWatermark | None = None
    finish: Finish | None = None
    resume: ResumeReport | None = None
    kv_at: str = ""  # host:port of the context daemon that it came through: its arena has the owner's KV


class CommitResult(msgspec.Struct, frozen=True):
    key: RequestKey
    status: CommitStatus
    length: int  # generated tokens the store holds now
    ahead: bool = False  # FENCED under a token that the store never heard of: it lost data. Not told to owners.


class ResumeReport(msgspec.Struct, frozen=True):
    """What the new owner of an interrupted request did before its first commit."""

    recomputed_tokens: int
    restored_positions: int
    restore_ms: float
    recompute_ms: float
    restore_source: str  # "store" | "peer" | "recompute"


class Lease(msgspec.Struct, frozen=True):
    key: RequestKey
    token: FencingToken
    worker_id: str


class RequestRecord(msgspec.Struct, frozen=True):
    """Everything an owner needs to start or resume a request."""

    key: RequestKey
    spec: RequestSpec
    state: RequestState
    token: FencingToken
    worker_id: str
    tokens: tuple[int, ...]  # generated and committed so far
    watermark: int  # positions with KV in the store; <= T-1
    layout: str
    segments: tuple[KVSegment, ...]
    numerics_class: str  # class of the committed tokens; "" before the first
    exact: bool  # False once the request crossed numerics classes
    attempts: int  # failures blamed on the request itself
    interruptions: int  # preemptions and losses; never counted against it
    kv_at: str = ""  # host:port of the daemon through which its last owner committed


class JobRecord(msgspec.Struct, frozen=True):
    job_id: str
    request_id: str
    state: JobState
    model: str
    endpoint: str
    created_at: float  # seconds since the epoch, store clock
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_tokens: int = 0
    input_digest: str = ""  # sha256 of the submitted bytes: tells a repeat from another payload
    error: str = ""
    started_at: float = 0.0
    finished_at: float = 0.0
    metadata: dict[str, str] = {}


class ResultLine(msgspec.Struct, frozen=True):
    index: int  # completion order, from 0; resume position of StreamResults
    line: int
    ok: bool
    payload: bytes


class InterruptionCause(StrEnum):
    NOTICE = "notice"  # handed over before the machine went
    WORKER_DIED = "worker_died"
    NODE_LOST = "node_lost"
    LEASE_EXPIRED = "lease_expired"
    ENGINE_FAULT = "engine_fault"  # blamed: uses up an attempt
    CANCELLED = "cancelled"
    STORE_LOSS = "store_loss"  # the durable store came back without acknowledged writes

    @property
    def blames_request(self) -> bool:
        return self is InterruptionCause.ENGINE_FAULT


class Interruption(msgspec.Struct, frozen=True):
    """One row of the recovery table. Times are milliseconds by the store's clock unless said otherwise."""

    line: int
    custom_id: str
    epoch: int  # the epoch that took over
    cause: InterruptionCause
    source: str  # worker id
    target: str  # worker id, "" while nobody owns it
    tokens: int  # generated tokens committed when interrupted
    watermark: int
    prompt_tokens: int
    detect_ms: float  # last commit of the old owner -> back in the queue or handed over
    queue_ms: float | None  # -> leased
    restore_ms: float | None  # measured by the new owner
    recompute_ms: float | None  # measured by the new owner
    gap_ms: float | None  # last commit of the old owner -> first of the new one
    recomputed_tokens: int | None
    restored_positions: int | None
    restore_source: str


class NoticeKind(StrEnum):
    TERMINATE = "terminate"
    STOP = "stop"
    ASG_TERMINATE = "asg_terminate"
    REBALANCE = "rebalance"  # a hint: nothing is stopped


class Notice(msgspec.Struct, frozen=True):
    """A cloud's word that a node will go. The id is a hash of the content, so that a repeat is the same notice."""

    node_id: str
    kind: NoticeKind
    deadline: float  # seconds since the epoch
    source: str  # "aws-imds", "signal", …

    @property
    def id(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


class DrainTarget(msgspec.Struct, frozen=True):
    """Where a draining worker's request shall go. Without a worker: to the queue; without a daemon nothing goes ahead."""

    worker_id: str = ""
    daemon: str = ""  # host:port of the worker's context daemon


class WorkerStatus(msgspec.Struct, frozen=True):
    """A worker's heartbeat. `beat` grows only while its engine loop turns."""

    worker_id: str  # also the Ray actor's name
    node_id: str
    model: str
    numerics_class: str
    beat: int
    running: int
    waiting: int
    max_num_seqs: int
    pages_used: int
    pages_total: int
    page_size: int
    max_model_len: int
    tokens_per_s: float
    held: tuple[tuple[str, int, int, int], ...]  # (job_id, line, choice, epoch)
    draining: bool
    state: Annotated[str, "loading | ready | draining | drained"]
    layout: str
    pid: int
    metrics_address: str = ""
    daemon: str = ""  # host:port of the context daemon that the heartbeat came through
