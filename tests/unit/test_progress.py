"""The estimate of what is left: right in a steady run, bent and not broken by a preemption, silent when it knows nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from context_daemon.records import JobRecord, JobState
from orchestrator.jobs.progress import Progress


def job(
    done: int, tokens: int, total: int = 10, state: JobState = JobState.IN_PROGRESS, start: float = 100.0
) -> JobRecord:
    return JobRecord("j", "r", state, "m", "/v1/completions", 0.0, total, done, 0, tokens, started_at=start)


@pytest.mark.parametrize(
    ("looks", "running", "rate", "eta"),
    [
        # (time, lines done, tokens committed)...; the job began at 100
        ([(110.0, 0, 50)], 4, 5.0, -1.0),  # no line is done: what a line needs is not known
        ([(110.0, 5, 100)], 0, 10.0, 10.0),  # 20 tokens a line, 5 lines left
        ([(110.0, 4, 100)], 2, 10.0, 10.0),  # two at half: 5 lines' worth done, 5 left
        ([(110.0, 9, 190)], 1, 19.0, 10.0 / 19),  # the last one, at half of 20
        ([(110.0, 9, 190)], 8, 19.0, 10.0 / 19),  # what the workers say may be older than the job
        ([(200.0, 5, 100), (210.0, 6, 120)], 0, 2.0, 40.0),  # own looks, once they span enough, over the job's life
        ([(200.0, 5, 100), (202.0, 5, 100)], 0, 100 / 102, 102.0),  # too young to be believed
        ([(200.0, 5, 100), (261.0, 5, 100)], 0, 0.0, -1.0),  # nothing for a whole window: unknown, not for ever
        ([(200.0, 5, 100), (230.0, 5, 400), (240.0, 5, 400), (250.0, 5, 400)], 0, 0.0, 400 / 6.0),  # a pause: ETA by 60 s
        ([(110.0, 5, 0)], 0, 0.0, -1.0),  # all failed at once
        ([(110.0, 5, 100), (120.0, 5, 90)], 0, 0.0, -1.0),  # a store that lost its last second
        ([(99.0, 5, 100)], 0, 0.0, -1.0),  # clocks that differ
    ],
)  # fmt: skip
def test_rate_and_time_left(looks: list[tuple[float, int, int]], running: int, rate: float, eta: float) -> None:
    progress = Progress()
    for now, done, tokens in looks:
        progress.look(job(done, tokens), now)
    last = job(looks[-1][1], looks[-1][2])
    assert progress.tokens_per_s() == pytest.approx(rate)
    assert progress.eta_s(last, running) == pytest.approx(eta)


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED])
def test_an_ended_job_has_nothing_left(state: JobState) -> None:
    assert Progress().eta_s(job(3, 10, state=state), 0) == 0.0


def test_a_job_that_is_not_counted_yet_is_unknown() -> None:
    assert Progress().eta_s(job(0, 0, total=0, state=JobState.VALIDATING), 0) == -1.0


def run(pause: tuple[float, float]) -> Iterator[tuple[float, JobRecord, int]]:
    """40 lines of 20 to 60 tokens, 8 at a time, 2 tokens/s each; nothing moves within the pause."""
    rng = random.Random(7)
    waiting = [rng.randint(20, 60) for _ in range(40)]
    total, tokens, done, now = len(waiting), 0, 0, 100.0
    running = [[0, waiting.pop()] for _ in range(8)]
    while running:
        now += 0.5
        if not pause[0] <= now < pause[1]:
            for line in running:
                line[0] += 1
                tokens += 1
            done += sum(line[0] >= line[1] for line in running)
            running = [line for line in running if line[0] < line[1]]
            running += [[0, waiting.pop()] for _ in range(min(len(waiting), 8 - len(running)))]
        yield now, job(done, tokens, total), len(running)


@pytest.mark.parametrize("pause", [(0.0, 0.0), (150.0, 160.0), (130.0, 145.0)])
def test_estimates_stay_near_the_truth_through_a_preemption(pause: tuple[float, float]) -> None:
    progress, seen = Progress(), list[tuple[float, float]]()
    for now, record, running in run(pause):
        progress.look(record, now)
        seen.append((now, progress.eta_s(record, running)))
    end = seen[-1][0]
    # The last wave runs with ever fewer lines, so slower than any window shows: judged while the batch is full.
    judged = [(now, eta, end - now) for now, eta in seen if now > 115.0 and end - now > 35.0]
    assert len(judged) > 100
    assert all(0.5 * left < eta < 1.6 * left for _, eta, left in judged), judged
