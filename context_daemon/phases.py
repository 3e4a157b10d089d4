"""The phases of a drain or a recovery, each timed apart: a fixed control cost hides everything else if it is not seen."""

from __future__ import annotations

from enum import StrEnum

from context_daemon.observability import LATENCY_BUCKETS, Histogram


class Phase(StrEnum):
    """In the order of a request's move. Those of the node are timed once a notice, those of a request once a move."""

    NOTICE_SEEN = "notice_seen"  # node: the daemon had the notice -> a worker was told
    PLAN = "plan"  # node: the worker was told -> it knows where its requests shall go
    PRE_COPY = "pre_copy"  # request: first asked for -> all pages that were full by then are at the target
    CUT_OVER = "cut_over"  # request: stopped -> its lease moved
    RESTORE = "restore"  # request, at the next owner: it was told -> the KV is in its engine
    FIRST_TOKEN = "first_token"  # request, at the next owner: -> its next token
    SOURCE_STOPPED = "source_stopped"  # node: the worker was told -> it holds nothing any more


_SECONDS = Histogram(
    "tideover_phase_seconds",
    "Phases of a drain or a recovery",
    ["phase"],
    buckets=(*LATENCY_BUCKETS, 30.0, 60.0, 120.0),
)


def observe(phase: Phase, seconds: float) -> None:
    _SECONDS.labels(phase.value).observe(seconds)
