"""What the demo and `tideover status` say of interruptions: the recovery table and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from orchestrator.verify import Verdict
from protos import jobs_pb2

_PHASES = ("detect_ms", "queue_ms", "restore_ms", "recompute_ms")


def recovery_table(rows: Sequence[jobs_pb2.Interruption]) -> Table:
    """One row per interruption: how, from where to where, tokens it had, tokens recomputed, and the gap by phase."""
    table = Table(title="Recoveries", title_justify="left")
    for heading in ("request", "how", "from", "to"):
        table.add_column(heading)
    for heading in ("tokens", "recomputed", "gap ms", "detect", "queue", "restore", "recompute"):
        table.add_column(heading, justify="right")
    for row in rows:
        phases = [_ms(row, phase) for phase in _PHASES]
        recomputed = str(row.recomputed_tokens) if row.HasField("recomputed_tokens") else "-"
        table.add_row(
            row.custom_id, row.cause, row.source, row.target, str(row.tokens), recomputed, _ms(row, "gap_ms"), *phases
        )
    return table


def _ms(row: jobs_pb2.Interruption, field: str) -> str:
    if field != "detect_ms" and not row.HasField(field):
        return "-"
    return f"{getattr(row, field):.0f}"


def print_verdict(console: Console, verdict: Verdict) -> None:
    colour = "green" if verdict.ok else "red"
    console.print(
        f"[bold {colour}]{verdict.equal} of {verdict.total} answers are the same bytes as on an undisturbed cluster.[/]"
    )
    for what, names in (
        ("different", verdict.different),
        ("missing", verdict.missing),
        ("answered twice", verdict.duplicated),
        ("inexact (crossed numerics classes)", verdict.inexact),
    ):
        if names:
            console.print(f"  {what}: {', '.join(names)}", style="red")
