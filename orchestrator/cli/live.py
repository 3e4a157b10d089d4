"""The live view of a job: workers, progress, events. Drawn on stderr, redrawn in place on a terminal, by lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from protos import jobs_pb2

TERMINAL = {jobs_pb2.JOB_STATE_COMPLETED, jobs_pb2.JOB_STATE_FAILED, jobs_pb2.JOB_STATE_CANCELLED}
_LINE_EVERY_S = 5.0


def state_name(state: int) -> str:
    return jobs_pb2.JobState.Name(state).removeprefix("JOB_STATE_").lower()


def duration(seconds: float) -> str:
    if seconds < 0:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary(update: jobs_pb2.WatchJobResponse) -> str:
    job = update.job
    parts = [
        f"{job.completed + job.failed}/{job.total} done",
        f"{job.output_tokens} tokens",
        f"{update.tokens_per_s:.1f} tokens/s",
        f"elapsed {duration(update.elapsed_s)}",
        f"ETA {duration(update.eta_s)}",
    ]
    if job.failed:
        parts.insert(1, f"{job.failed} failed")
    if update.waiting_for:
        parts.append(f"waiting: {update.waiting_for}")
    return "  ".join(parts)


def worker_table(update: jobs_pb2.WatchJobResponse) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("worker", "state"):
        table.add_column(heading)
    for heading in ("running", "waiting", "tokens/s", "KV pages"):
        table.add_column(heading, justify="right")
    for worker in update.workers:
        pages = f"{worker.pages_used}/{worker.pages_total}"
        rate = f"{worker.tokens_per_s:.1f}"
        table.add_row(worker.worker_id, worker.state, str(worker.running), str(worker.waiting), rate, pages)
    return table


def render(update: jobs_pb2.WatchJobResponse) -> RenderableType:
    job = update.job
    bar = ProgressBar(total=max(1, job.total), completed=job.completed + job.failed, width=40)
    head = Text(f"{job.job_id}  {state_name(job.state)}  {summary(update)}")
    return Group(worker_table(update), bar, head)


def show(updates: Iterator[jobs_pb2.WatchJobResponse], console: Console) -> jobs_pb2.Job:
    """Draw until the stream ends; returns the job as it was last seen."""
    job = jobs_pb2.Job()
    last_line = 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for update in updates:
            job = update.job
            for event in update.events:
                at = time.strftime("%H:%M:%S", time.localtime(event.time))
                console.print(Text(f"{at}  {event.kind:<15} {event.text}"), soft_wrap=True)
            if console.is_terminal:
                live.update(render(update), refresh=True)
            elif time.monotonic() - last_line > _LINE_EVERY_S or job.state in TERMINAL:
                last_line = time.monotonic()
                workers = "; ".join(f"{w.worker_id} {w.state} {w.running}+{w.waiting}" for w in update.workers)
                console.print(Text(f"          {summary(update)}  [{workers}]"), soft_wrap=True)
    return job
