"""Records to wire messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from context_daemon.records import Interruption, JobRecord, JobState, ResultLine, WorkerStatus
from orchestrator.events import Event
from protos import jobs_pb2

_STATES = {state: f"JOB_STATE_{state.name}" for state in JobState}
_OPTIONAL = ("queue_ms", "restore_ms", "recompute_ms", "gap_ms", "recomputed_tokens", "restored_positions")


def job(record: JobRecord) -> jobs_pb2.Job:
    return jobs_pb2.Job(
        job_id=record.job_id,
        request_id=record.request_id,
        state=_STATES[record.state],
        model=record.model,
        endpoint=record.endpoint,
        created_at=record.created_at,
        started_at=record.started_at,
        finished_at=record.finished_at,
        total=record.total,
        completed=record.completed,
        failed=record.failed,
        output_tokens=record.output_tokens,
        error=record.error,
        metadata=record.metadata,
    )


def result(line: ResultLine) -> jobs_pb2.StreamResultsResponse:
    return jobs_pb2.StreamResultsResponse(index=line.index, line=line.line, ok=line.ok, payload=line.payload)


def interruption(row: Interruption) -> jobs_pb2.Interruption:
    known = {name: getattr(row, name) for name in _OPTIONAL if getattr(row, name) is not None}
    return jobs_pb2.Interruption(
        line=row.line,
        custom_id=row.custom_id,
        epoch=row.epoch,
        cause=row.cause.value,
        source=row.source,
        target=row.target,
        tokens=row.tokens,
        watermark=row.watermark,
        prompt_tokens=row.prompt_tokens,
        detect_ms=row.detect_ms,
        restore_source=row.restore_source,
        **known,
    )


def workers(statuses: Sequence[WorkerStatus]) -> list[jobs_pb2.WorkerProgress]:
    return [
        jobs_pb2.WorkerProgress(
            worker_id=status.worker_id,
            node_id=status.node_id,
            state=status.state,
            running=status.running,
            waiting=status.waiting,
            tokens_per_s=status.tokens_per_s,
            pages_used=status.pages_used,
            pages_total=status.pages_total,
        )
        for status in statuses
    ]


def events(items: Sequence[Event]) -> list[jobs_pb2.Event]:
    return [jobs_pb2.Event(time=item.time, kind=item.kind, text=item.text) for item in items]
