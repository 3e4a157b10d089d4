"""Fault points drawn by seed over a job's committed progress, and their execution on a cluster of real processes."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from context_daemon.records import InterruptionCause
from orchestrator.client import TideoverClient
from orchestrator.demo.lasting import longer, next_factor
from orchestrator.verify import Verdict, compare
from protos import jobs_pb2

PAGE = 16
LASTS_S = 12.0
SHORTEST_NOTICE_S = 2.5  # the drain keeps a second of it free


@dataclass(frozen=True, slots=True)
class FaultPoint:
    """At `progress` (share of the reference's output tokens committed) a worker is lost, with notice or without.

    `lead` is the notice's length as a share of what the job still needs undisturbed, so that a notice ends in the
    middle of the work on any machine.
    """

    seed: int
    progress: float
    lead: float | None

    def notice_s(self, undisturbed_s: float) -> float | None:
        left = (1 - self.progress) * undisturbed_s
        return None if self.lead is None else max(SHORTEST_NOTICE_S, self.lead * left)


def draw(seed: int) -> FaultPoint:
    """The same seed gives the same point. Half of them are with notice, so that both paths are always met."""
    rng = random.Random(seed)
    if seed % 2:
        return FaultPoint(seed, rng.uniform(0.02, 0.5), rng.uniform(0.2, 0.5))
    return FaultPoint(seed, rng.uniform(0.02, 0.7), None)


@dataclass(frozen=True, slots=True)
class Reference:
    """The undisturbed run of the job that the faults fall into."""

    file: Path
    lines: Sequence[bytes]
    tokens: int
    seconds: float


def undisturbed(client: TideoverClient, file: Path, folder: Path) -> Reference:
    """The job's undisturbed run, with its answers made longer until it lasts: a fault must meet work in its middle."""
    factor, job = 1, file
    while True:
        begin = time.monotonic()
        job_id, answers = run_job(client, job, f"reference-{factor}")
        seconds = time.monotonic() - begin
        more = next_factor(factor, seconds, LASTS_S)
        if more == factor:
            return Reference(job, answers, client.get_job(job_id).output_tokens, seconds)
        factor, job = more, longer(file, more, folder)


@dataclass(frozen=True, slots=True)
class Outcome:
    point: FaultPoint
    verdict: Verdict
    interrupted: int
    recomputed: tuple[int, ...]  # of requests that had tokens
    formula_holds: bool  # recomputed == T - 1 - watermark, wherever it is known
    causes: tuple[str, ...]
    one_epoch_a_position: bool  # each owner took over at or after where the one before it stood


def run_job(client: TideoverClient, file: Path, request_id: str) -> tuple[str, list[bytes]]:
    """Submit and wait; returns the job's id and its result lines."""
    job = client.create_job(file, request_id=request_id)
    return job.job_id, wait_results(client, job.job_id)


def wait_results(client: TideoverClient, job_id: str) -> list[bytes]:
    return [line.payload for line in client.stream_results(job_id, follow=True)]


def run_with_fault(client: TideoverClient, point: FaultPoint, reference: Reference) -> Outcome:
    job = client.create_job(reference.file, request_id=f"fault-{point.seed}-{time.time_ns()}")
    _wait_progress(client, job.job_id, int(point.progress * reference.tokens))
    worker_id = _busiest_worker(client)
    notice_s = point.notice_s(reference.seconds)
    if notice_s is None:
        client.kill(worker_id)
    else:
        client.preempt(worker_id, notice_s)
    results = wait_results(client, job.job_id)
    return _outcome(client, job.job_id, point, compare(reference.lines, results))


def _wait_progress(client: TideoverClient, job_id: str, tokens: int) -> None:
    while client.get_job(job_id).output_tokens < tokens:
        time.sleep(0.02)


def _busiest_worker(client: TideoverClient) -> str:
    ready = [worker for worker in client.workers() if worker.state == "ready"]
    return max(ready, key=lambda worker: worker.running).worker_id


def _outcome(client: TideoverClient, job_id: str, point: FaultPoint, verdict: Verdict) -> Outcome:
    rows = client.interruptions(job_id)
    known = [row for row in rows if row.HasField("recomputed_tokens")]
    formula = all(row.recomputed_tokens == row.prompt_tokens + row.tokens - 1 - row.restored_positions for row in known)
    return Outcome(
        point,
        verdict,
        interrupted=len(rows),
        recomputed=tuple(row.recomputed_tokens for row in known if row.tokens > 0),
        formula_holds=formula,
        causes=tuple(sorted({row.cause for row in rows})),
        one_epoch_a_position=_epochs_in_order(rows),
    )


def _epochs_in_order(rows: Sequence[jobs_pb2.Interruption]) -> bool:
    """Owner e writes positions from where it took over up to where e+1 did: ranges that never overlap."""
    by_line: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        by_line.setdefault(row.line, []).append((row.epoch, row.tokens))
    return all(
        before[0] < after[0] and before[1] <= after[1]
        for owners in by_line.values()
        for before, after in pairwise(sorted(owners))
    )


def check(outcome: Outcome) -> list[str]:
    """What the outcome breaks of the promises, in words; empty when all hold."""
    broken = []
    if not outcome.verdict.ok:
        broken.append(f"answers differ: {outcome.verdict}")
    if not outcome.formula_holds:
        broken.append("recomputed tokens are not T-1 minus the watermark")
    if not outcome.one_epoch_a_position:
        broken.append("a position was written under two epochs")
    if outcome.interrupted == 0:
        broken.append("the fault interrupted nothing: it proves nothing")
    noticed = InterruptionCause.NOTICE.value in outcome.causes
    if outcome.point.lead is not None and not noticed:
        broken.append(f"a notice led to {outcome.causes}, not to a hand-over")
    if outcome.point.lead is not None and any(outcome.recomputed):
        broken.append(f"recomputed {outcome.recomputed} tokens after a notice that left time")
    if outcome.point.lead is None and outcome.recomputed and max(outcome.recomputed) >= PAGE:
        broken.append(f"recomputed {max(outcome.recomputed)} tokens, a page or more, with a healthy KV store")
    return broken
