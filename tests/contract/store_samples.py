from __future__ import annotations

from context_daemon.records import (
    Endpoint,
    JobRecord,
    JobState,
    RequestSpec,
    SamplingParams,
    WorkerStatus,
)


def job_record(job_id: str, request_id: str = "", digest: str = "digest") -> JobRecord:
    return JobRecord(
        job_id, request_id or f"req-{job_id}", JobState.VALIDATING, "model", Endpoint.CHAT, 0.0, input_digest=digest,
        metadata={"who": "tést"},
    )  # fmt: skip


def spec(line: int, prompt_tokens: int = 10, max_tokens: int = 50) -> RequestSpec:
    params = SamplingParams(seed=line, max_tokens=max_tokens, stop=("\n", "ß"))
    return RequestSpec(line, f'id-"{line}"/ü', Endpoint.CHAT, tuple(range(prompt_tokens)), params)


def worker_status(worker_id: str, node_id: str, beat: int = 1) -> WorkerStatus:
    return WorkerStatus(
        worker_id=worker_id, node_id=node_id, model="m", numerics_class="cpu-1", beat=beat, running=1, waiting=0,
        max_num_seqs=8, pages_used=1, pages_total=10, page_size=16, max_model_len=100, tokens_per_s=1.5,
        held=(("job", 1, 0, 1),), draining=False, state="ready", layout="lay", pid=1,
    )  # fmt: skip
