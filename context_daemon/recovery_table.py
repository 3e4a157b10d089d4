"""Rows of the recovery table as the stores keep them, and what is reported of them. Pure."""

from __future__ import annotations

import msgspec

from context_daemon.records import Interruption, InterruptionCause


class InterruptionRow(msgspec.Struct, omit_defaults=True):
    """Raw row: instants in microseconds of the store's clock.

    Written by requeue and handover, completed by the lease and by the first commit of the epoch that took over.
    """

    line: int
    custom_id: str
    epoch: int
    cause: str
    source: str
    tokens: int
    watermark: int
    prompt_tokens: int
    last_at: int  # last commit of the old owner, or its lease if it made none
    moved_at: int  # back in the queue, or handed over
    choice: int = 0
    target: str = ""
    leased_at: int | None = None
    first_at: int | None = None  # first commit of the new owner
    restore_ms: float | None = None
    recompute_ms: float | None = None
    recomputed_tokens: int | None = None
    restored_positions: int | None = None
    restore_source: str = ""


def _between(start: int, end: int | None) -> float | None:
    return None if end is None else (end - start) / 1000.0


def to_interruption(row: InterruptionRow) -> Interruption:
    return Interruption(
        line=row.line,
        custom_id=row.custom_id,
        epoch=row.epoch,
        cause=InterruptionCause(row.cause),
        source=row.source,
        target=row.target,
        tokens=row.tokens,
        watermark=row.watermark,
        prompt_tokens=row.prompt_tokens,
        detect_ms=(row.moved_at - row.last_at) / 1000.0,
        queue_ms=_between(row.moved_at, row.leased_at),
        restore_ms=row.restore_ms,
        recompute_ms=row.recompute_ms,
        gap_ms=_between(row.last_at, row.first_at),
        recomputed_tokens=row.recomputed_tokens,
        restored_positions=row.restored_positions,
        restore_source=row.restore_source,
    )


def report(rows: list[InterruptionRow]) -> list[Interruption]:
    """By epoch within line."""
    return [to_interruption(row) for row in sorted(rows, key=lambda row: (row.line, row.choice, row.epoch))]
