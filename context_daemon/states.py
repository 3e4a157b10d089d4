"""Legal transitions of jobs and requests. Pure; the stores follow it and the contract suite checks it."""

from __future__ import annotations

from context_daemon.records import JobState, RequestState

JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.VALIDATING: frozenset({JobState.IN_PROGRESS, JobState.FAILED}),
    JobState.IN_PROGRESS: frozenset({JobState.FINALIZING, JobState.COMPLETED, JobState.CANCELLING}),
    JobState.FINALIZING: frozenset({JobState.COMPLETED}),
    JobState.CANCELLING: frozenset({JobState.CANCELLED}),
    JobState.FAILED: frozenset(),
    JobState.COMPLETED: frozenset(),
    JobState.CANCELLED: frozenset(),
}

REQUEST_TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.READY: frozenset({RequestState.LEASED, RequestState.FAILED, RequestState.CANCELLED}),
    # LEASED -> LEASED is a handover: the epoch grows, so it is a transition too.
    RequestState.LEASED: frozenset(
        {RequestState.LEASED, RequestState.READY, RequestState.COMPLETED, RequestState.FAILED, RequestState.CANCELLED}
    ),
    RequestState.COMPLETED: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.CANCELLED: frozenset(),
}

TERMINAL_JOB_STATES = frozenset(state for state, after in JOB_TRANSITIONS.items() if not after)
TERMINAL_REQUEST_STATES = frozenset(state for state, after in REQUEST_TRANSITIONS.items() if not after)
ACTIVE_JOB_STATES = frozenset({JobState.IN_PROGRESS, JobState.FINALIZING, JobState.CANCELLING})


def job_may(before: JobState, after: JobState) -> bool:
    return after in JOB_TRANSITIONS[before]


def request_may(before: RequestState, after: RequestState) -> bool:
    return after in REQUEST_TRANSITIONS[before]


def finished_state(job: JobState) -> JobState | None:
    """Where a job goes when its last line is terminal; None if it is not running."""
    return {JobState.IN_PROGRESS: JobState.COMPLETED, JobState.FINALIZING: JobState.COMPLETED}.get(
        job, JobState.CANCELLED if job is JobState.CANCELLING else None
    )
