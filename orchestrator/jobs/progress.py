"""Rate and time left of a job, from what is committed. Pure but for what it has seen."""

from __future__ import annotations

from collections import deque

from context_daemon.records import JobRecord, JobState

_RATE_WINDOW_S = 20.0
_ETA_WINDOW_S = 60.0  # longer than a recovery, so that one bends the estimate and does not break it
_OWN_SPAN_S = 5.0  # own looks must span this much before they are believed over the average since the start
_ENDED = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


class Progress:
    """Fed with each look at a job. Rates count committed tokens over a sliding window: a repeat of work adds nothing."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # when, output tokens
        self._start: tuple[float, int] | None = None

    def look(self, job: JobRecord, now: float) -> None:
        if 0.0 < job.started_at < now:
            self._start = (job.started_at, 0)
        self._seen.append((now, job.output_tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _ETA_WINDOW_S:
            self._seen.popleft()

    def tokens_per_s(self) -> float:
        return self._rate(_RATE_WINDOW_S)

    def eta_s(self, job: JobRecord, running: int) -> float:
        """Seconds left; -1 while unknown: no line is done yet, or nothing was committed for a whole window.

        `running` of the job's lines are with a worker. Their lengths so far are not known one by one: each is taken for
        half an answer, so that answer = tokens / (done + running / 2), and what is left is the answers not yet given.
        """
        if job.state in _ENDED:
            return 0.0
        done = job.completed + job.failed
        rate = self._rate(_ETA_WINDOW_S)
        if not done or not job.total or rate <= 0:
            return -1.0
        begun = done + min(max(0, running), job.total - done) / 2
        return job.output_tokens / begun * (job.total - begun) / rate

    def _rate(self, window_s: float) -> float:
        """Tokens a second over the last `window_s`; over the job's life while this watch is young."""
        if not self._seen:
            return 0.0
        now, tokens = self._seen[-1]
        older = [look for look in self._seen if now - look[0] >= window_s]
        first = older[-1] if older else self._seen[0]
        if now - first[0] < _OWN_SPAN_S and self._start is not None:
            first = self._start
        return max(0.0, (tokens - first[1]) / (now - first[0])) if now > first[0] else 0.0
