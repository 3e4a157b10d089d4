"""The lease observer: whose lease has run out, by the observer's own clock. Pure.

A lease is renewed by proof of life: its worker's loop has turned (the heartbeat's `beat` grew) and the worker says that it
holds the request, or the request's tokens grew. While the store is away nothing can be observed, so every timer starts
anew when it is back; the same holds for an observer that has just started.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from context_daemon.records import FencingToken, RequestKey, WorkerStatus
from context_daemon.store import LeasedRequest


@dataclass(slots=True)
class _Seen:
    tokens: int
    beat: int
    renewed_at: float


@dataclass(frozen=True, slots=True)
class Observation:
    expired: list[LeasedRequest]
    unclaimed: list[LeasedRequest]  # leased, but its worker does not say it holds it: tell the worker (again)


class BeatWatch:
    """Which workers' loops have not turned lately: they keep what they hold for its lease time, but get nothing new."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._seen: dict[str, tuple[int, float]] = {}  # beat, and when it was first seen

    def start_over(self) -> None:
        """The store was away: silence until now means nothing."""
        self._seen.clear()

    def silent(self, now: float, workers: Mapping[str, WorkerStatus]) -> set[str]:
        """`now` is any monotonic clock, in seconds."""
        seen = {}
        for worker_id, worker in workers.items():
            beat, since = self._seen.get(worker_id, (worker.beat, now))
            seen[worker_id] = (beat, since) if beat == worker.beat else (worker.beat, now)
        self._seen = seen
        return {worker_id for worker_id, (_, since) in seen.items() if now - since > self._silence_s}


class LeaseObserver:
    def __init__(self, lease_s: float, claim_s: float) -> None:
        self._lease_s = lease_s
        self._claim_s = claim_s
        self._seen: dict[tuple[RequestKey, FencingToken], _Seen] = {}
        self._told_at: dict[tuple[RequestKey, FencingToken], float] = {}

    def start_over(self) -> None:
        """Forget every timer: the store was away, so nobody's silence means anything."""
        self._seen.clear()

    def observe(self, now: float, leased: Iterable[LeasedRequest], workers: Mapping[str, WorkerStatus]) -> Observation:
        """`now` is any monotonic clock, in seconds."""
        held = {
            (job_id, line, choice, epoch): worker.worker_id
            for worker in workers.values()
            for job_id, line, choice, epoch in worker.held
        }
        observation = Observation([], [])
        current = set()
        for lease in leased:
            identity = (lease.key, lease.token)
            current.add(identity)
            key = (lease.key.job_id, lease.key.line, lease.key.choice, lease.token.epoch)
            claimed = held.get(key) == lease.worker_id
            self._judge(now, lease, claimed, workers.get(lease.worker_id), observation)
        self._forget_others(current)
        return observation

    def _judge(
        self, now: float, lease: LeasedRequest, claimed: bool, worker: WorkerStatus | None, out: Observation
    ) -> None:
        identity = (lease.key, lease.token)
        beat = worker.beat if worker else -1
        seen = self._seen.setdefault(identity, _Seen(lease.tokens, beat, now))
        turned = claimed and beat != seen.beat
        if turned or lease.tokens != seen.tokens:
            seen.renewed_at = now
        seen.tokens, seen.beat = lease.tokens, beat
        if now - seen.renewed_at > self._lease_s:
            out.expired.append(lease)
        elif not claimed and worker is not None and now - self._told_at.get(identity, now) >= self._claim_s:
            out.unclaimed.append(lease)
            self._told_at[identity] = now
        self._told_at.setdefault(identity, now)

    def _forget_others(self, current: set[tuple[RequestKey, FencingToken]]) -> None:
        for table in (self._seen, self._told_at):
            for identity in table.keys() - current:
                del table[identity]
