"""Rate and time left of a job, from what is committed. Pure but for what it has seen."""

from __future__ import annotations

from collections import deque

from context_daemon.records import JobRecord

_WINDOW_S = 20.0


class Progress:
    """Fed with each look at a job. Rates are over a sliding window: a preemption bends them and does not break them."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()  # when, tokens, lines

    def look(self, job: JobRecord, now: float) -> None:
        self._seen.append((now, job.output_tokens, job.completed + job.failed))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()

    def tokens_per_s(self) -> float:
        if len(self._seen) < 2:
            return 0.0
        first, last = self._seen[0], self._seen[-1]
        return (last[1] - first[1]) / max(1e-6, last[0] - first[0])

    def eta_s(self, job: JobRecord, now: float) -> float:
        """Seconds left, by lines done since the start; -1 while nothing is done. 0 when all is."""
        done = job.completed + job.failed
        if done >= job.total:
            return 0.0
        elapsed = now - job.started_at
        if not done or elapsed <= 0:
            return -1.0
        return elapsed / done * (job.total - done)
