"""Placement: which worker runs which waiting request next. Pure; the router executes what it returns.

Rules, in this order:
1. A worker that is not ready, is draining or has a terminating notice gets nothing. One with a rebalance hint comes last.
2. A request with committed tokens stays within its numerics class, so that its bytes are those of an undisturbed run. Only
   when no worker of that class has been there for `class_patience_s` does it cross, and is then marked inexact.
3. A request that is suspected of killing an engine runs alone.
4. Otherwise the worker with the most room, measured by free sequences, then by free pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from context_daemon.records import RequestKey
from context_daemon.store import LeaseRequest, ReadyRequest


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What placement knows of a worker. `assigned` and `pages_promised` are derived from leases, never counted beside."""

    worker_id: str
    numerics_class: str
    max_num_seqs: int
    pages_total: int
    page_size: int
    assigned: int = 0
    pages_promised: int = 0
    accepting: bool = True
    hinted: bool = False
    exclusive: bool = False  # runs a suspect: takes nothing beside it

    @property
    def free_seqs(self) -> int:
        return self.max_num_seqs - self.assigned

    @property
    def free_pages(self) -> int:
        return self.pages_total - self.pages_promised


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    class_patience_s: float = 60.0
    lookahead_tokens: int = 256  # output that is reserved at placement; the engine preempts if more is needed


def pages_needed(prompt_tokens: int, tokens: int, max_tokens: int, page_size: int, lookahead: int) -> int:
    """Pages to reserve for a request: what it has and what it will soon have."""
    length = prompt_tokens + tokens + min(max(0, max_tokens - tokens), lookahead)
    return -(-length // page_size)


def _allowed(request: ReadyRequest, worker: WorkerView, classes: set[str], now: float, policy: PlacementPolicy) -> bool:
    if not worker.accepting or worker.exclusive or worker.free_seqs <= 0:
        return False
    if request.attempts > 0 and worker.assigned > 0:
        return False
    if request.tokens == 0 or request.numerics_class in ("", worker.numerics_class):
        return True
    return request.numerics_class not in classes and now - request.ready_since > policy.class_patience_s


def _fits(request: ReadyRequest, worker: WorkerView, policy: PlacementPolicy) -> bool:
    # An empty worker takes anything that passed admission: it will preempt rather than starve the request for ever.
    return worker.assigned == 0 or _pages(request, worker, policy) <= worker.free_pages


def _pages(request: ReadyRequest, worker: WorkerView, policy: PlacementPolicy) -> int:
    return pages_needed(
        request.prompt_tokens, request.tokens, request.max_tokens, worker.page_size, policy.lookahead_tokens
    )


def choose(
    request: ReadyRequest, workers: Iterable[WorkerView], now: float, policy: PlacementPolicy
) -> WorkerView | None:
    """The best worker for one request now, or None: it waits."""
    workers = list(workers)
    classes = {worker.numerics_class for worker in workers if worker.accepting}
    fit = [w for w in workers if _allowed(request, w, classes, now, policy) and _fits(request, w, policy)]

    def preference(worker: WorkerView) -> tuple[bool, bool, int, int, str]:
        just_left = worker.worker_id == request.avoid_worker
        return (worker.hinted, just_left, -worker.free_seqs, -worker.free_pages, worker.worker_id)

    return min(fit, key=preference, default=None)


def take(worker: WorkerView, request: ReadyRequest, policy: PlacementPolicy) -> WorkerView:
    return replace(
        worker,
        assigned=worker.assigned + 1,
        pages_promised=worker.pages_promised + _pages(request, worker, policy),
        exclusive=worker.exclusive or request.attempts > 0,
    )


def plan(
    ready: Sequence[ReadyRequest], workers: Sequence[WorkerView], now: float, policy: PlacementPolicy
) -> list[LeaseRequest]:
    """Assign what can be assigned now, in the order given. `now` is the store's clock, as `ready_since` is."""
    views = {worker.worker_id: worker for worker in workers}
    leases = []
    for request in ready:
        worker = choose(request, views.values(), now, policy)
        if worker is None:
            continue
        views[worker.worker_id] = take(worker, request, policy)
        same_class = request.tokens == 0 or request.numerics_class in ("", worker.numerics_class)
        leases.append(LeaseRequest(request.key, request.epoch, worker.worker_id, worker.numerics_class, same_class))
    return leases


def drain_targets(
    leaving: Sequence[ReadyRequest],
    workers: Sequence[WorkerView],
    now: float,
    policy: PlacementPolicy,
    before: Mapping[RequestKey, str],
) -> dict[RequestKey, str]:
    """Where the sequences of a draining worker should go: the same rules, asked ahead of the cut-over. Whoever has a target
    from `before` that still takes it keeps that: its pages are on their way there."""
    views = {worker.worker_id: worker for worker in workers}
    targets = {}
    for request in leaving:
        former = views.get(before.get(request.key, ""))
        stays = [former] if former is not None and not former.hinted else []
        worker = choose(request, stays, now, policy) or choose(request, views.values(), now, policy)
        if worker is not None:
            views[worker.worker_id] = take(worker, request, policy)
            targets[request.key] = worker.worker_id
    return targets
