"""The drain planner: what each sequence of a node under notice should do, and when. Pure.

A sequence that can finish before the deadline finishes here; every other one decodes on until the moment when its
commits can still be flushed and its lease moved, and is handed over then. With no time for that it goes at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from context_daemon.records import RequestKey


@dataclass(frozen=True, slots=True)
class DrainSequence:
    key: RequestKey
    remaining_tokens: int  # at most; may stop earlier


@dataclass(frozen=True, slots=True)
class DrainPace:
    """Measured on this worker."""

    step_s: float  # one decode step of the present batch
    flush_s: float  # commit, KV write and hand-over of the whole batch
    reserve_s: float = 1.0  # kept free before the deadline: clouds end early


class Action(StrEnum):
    FINISH_HERE = "finish_here"
    DECODE_ON = "decode_on"
    HAND_OVER = "hand_over"


def cut_over_at(deadline: float, pace: DrainPace) -> float:
    """The latest moment at which hand-over should begin: a flush takes twice as long on a bad day."""
    return deadline - pace.reserve_s - 2 * pace.flush_s - pace.step_s


def plan(now: float, deadline: float, pace: DrainPace, sequences: list[DrainSequence]) -> dict[RequestKey, Action]:
    """Decide for each sequence. Called every iteration, so that a deadline that shrinks or a slow step is seen."""
    cut_over = cut_over_at(deadline, pace)
    decisions: dict[RequestKey, Action] = {}
    for sequence in sequences:
        if now >= cut_over:
            decisions[sequence.key] = Action.HAND_OVER
        elif now + sequence.remaining_tokens * pace.step_s < cut_over:
            decisions[sequence.key] = Action.FINISH_HERE
        else:
            decisions[sequence.key] = Action.DECODE_ON
    return decisions
