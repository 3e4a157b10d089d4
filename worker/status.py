"""What a worker says of itself in its heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from context_daemon.records import WorkerStatus
from worker.engine.protocol import Engine


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    worker_id: str
    node_id: str
    model: str
    heartbeat_s: float = 0.25
    max_commit_lag: int = 64  # tokens of one sequence
    max_queued_kv_bytes: int = 256 << 20
    metrics_address: str = ""
    pid: int = 0


def loading_status(options: RuntimeOptions) -> WorkerStatus:
    """Before there is an engine."""
    return WorkerStatus(
        worker_id=options.worker_id,
        node_id=options.node_id,
        model=options.model,
        numerics_class="",
        beat=0,
        running=0,
        waiting=0,
        max_num_seqs=0,
        pages_used=0,
        pages_total=0,
        page_size=16,
        max_model_len=0,
        tokens_per_s=0.0,
        held=(),
        draining=False,
        state="loading",
        layout="",
        pid=options.pid,
        metrics_address=options.metrics_address,
    )


def engine_status(status: WorkerStatus, engine: Engine) -> WorkerStatus:
    """`status` with what the engine is and how full it is."""
    capacity, layout = engine.capacity, engine.layout
    return replace(
        status,
        numerics_class=layout.numerics_class,
        layout=layout.fingerprint,
        page_size=layout.page_size,
        running=capacity.running,
        waiting=capacity.waiting,
        max_num_seqs=capacity.max_num_seqs,
        pages_used=capacity.pages_used,
        pages_total=capacity.pages_total,
        max_model_len=capacity.max_model_len,
    )
