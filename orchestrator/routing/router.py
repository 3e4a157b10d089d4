"""The router: reads what waits and what the fleet looks like, asks the pure deciders, and carries their answers out.

It keeps nothing that the durable store does not have, but for its timers: killed and started again it reads the same
tables and goes on. Every transition carries its leader's term, so that a router that was replaced changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counted
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from context_daemon.observability import Counter, Gauge, Histogram, get_logger
from context_daemon.records import (
    DrainTarget,
    InterruptionCause,
    JobRecord,
    JobState,
    Lease,
    Notice,
    NoticeKind,
    RequestKey,
    WorkerStatus,
)
from context_daemon.store import ContextStore, LeasedRequest, ReadyRequest, StoreUnavailable, UnknownJob
from orchestrator.events import EventLog
from orchestrator.routing import placement, recovery
from orchestrator.routing.gateway import WorkerGateway
from orchestrator.routing.leases import BeatWatch, LeaseObserver
from orchestrator.routing.store_watch import StoreWatch

log = get_logger()

REQUEUED = Counter("tideover_requests_requeued", "Requests taken from an owner", ["cause"])
TICK_SECONDS = Histogram("tideover_router_tick_seconds", "Duration of one routing round")
LEASED = Gauge("tideover_requests_leased", "Requests that have an owner")


@dataclass(frozen=True, slots=True)
class RouterOptions:
    tick_s: float = 0.05
    lease_s: float = 5.0
    claim_s: float = 0.75  # a lease that its worker does not claim by then is told again
    silence_s: float = 2.0  # a worker whose loop has not turned for so long gets nothing new
    ready_window: int = 256  # waiting requests looked at per job and round
    placement: placement.PlacementPolicy = field(default_factory=placement.PlacementPolicy)
    recovery: recovery.RecoveryPolicy = field(default_factory=recovery.RecoveryPolicy)


@dataclass(slots=True)
class _Round:
    """One consistent look at the world."""

    jobs: list[JobRecord]
    workers: dict[str, WorkerStatus]
    notices: dict[str, Notice]  # by node
    dead: dict[str, InterruptionCause]
    leased: dict[str, list[LeasedRequest]] = field(default_factory=dict)  # by job


class Router:
    def __init__(
        self,
        store: ContextStore,
        gateway: WorkerGateway,
        events: EventLog,
        options: RouterOptions,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._gateway = gateway
        self._events = events
        self._options = options
        self._wall = wall
        self._clock = clock
        self._observer = LeaseObserver(options.lease_s, options.claim_s)
        self._beats = BeatWatch(options.silence_s)
        self._watch = StoreWatch(store, events, clock)
        self._away = False
        self._sent_targets: dict[str, tuple[float, dict[RequestKey, DrainTarget]]] = {}  # when and what, by worker
        self._owners: dict[RequestKey, str] = {}
        self._announced: dict[str, int] = {}  # by job: the term it has been told of
        self._known_notices: set[str] = set()
        self.waiting_for: dict[str, str] = {}  # by job: why nothing of it can be placed

    async def run(self, term: Callable[[], int]) -> None:
        """Route until cancelled. `term` is asked each round; StaleLeader goes up to the caller."""
        while True:
            started = self._clock()
            try:
                await self.tick(term())
                self._store_back()
            except StoreUnavailable as error:
                self._store_away(error)
            except UnknownJob as error:  # the store lost it between two of our calls: the next round tells of it
                log.warning("round_cut_short", error=str(error))
            TICK_SECONDS.observe(self._clock() - started)
            await asyncio.sleep(self._options.tick_s)

    def _store_away(self, error: StoreUnavailable) -> None:
        if not self._away:
            self._events.add("store_away", f"work waits: {error}")
        self._away = True
        self._watch.doubt()
        self._start_over()  # before the first round after the outage judges anybody by it

    def _store_back(self) -> None:
        if self._away:
            self._events.add("store_back", "the durable store answers again; every lease gets a full lease time")
        self._away = False

    def _start_over(self) -> None:
        self._observer.start_over()
        self._beats.start_over()

    async def tick(self, term: int) -> None:
        if await self._watch.look():
            self._start_over()
        world = await self._look()
        self._tell_what_changed(world)
        await self._announce(world, term)
        for job in world.jobs:
            await self._recover(job, world, term)
        views = self._views(world)
        for job in world.jobs:
            if job.state is JobState.CANCELLING:
                await self._store.cancel_requests(job.job_id, term)
            if job.state is JobState.IN_PROGRESS:
                await self._place(job, views, world, term)
            if job.completed + job.failed >= job.total or job.state is JobState.CANCELLING:
                await self._finish(job, term)
        self._direct_drains(world, views)

    async def _look(self) -> _Round:
        jobs = await self._store.active_jobs()
        await self._watch.miss([job.job_id for job in jobs])
        workers = {worker.worker_id: worker for worker in await self._store.workers()}
        notices = {}
        for notice in sorted(await self._store.notices(), key=lambda n: n.kind is not NoticeKind.REBALANCE):
            notices[notice.node_id] = notice
        world = _Round(jobs, workers, notices, dict(self._gateway.dead()))
        for job in jobs:
            world.leased[job.job_id] = await self._store.leased_requests(job.job_id)
        LEASED.set(sum(map(len, world.leased.values())))
        return world

    async def _announce(self, world: _Round, term: int) -> None:
        """Make each job remember our term before we judge its owners: a router that we replaced may wake only now."""
        for job in world.jobs:
            if self._announced.get(job.job_id) != term:
                await self._store.finish_job(job.job_id, term)  # changes nothing else while lines are open
        self._announced = {job.job_id: term for job in world.jobs}

    # -- recovery ---------------------------------------------------------------------------------------------------
    async def _recover(self, job: JobRecord, world: _Round, term: int) -> None:
        leased = world.leased[job.job_id]
        lost = recovery.orphans(leased, world.dead, self._watch.incarnation)
        orphaned = {lease.key for leases in lost.values() for lease in leases}
        alive = [lease for lease in leased if lease.key not in orphaned]
        observation = self._observer.observe(self._clock(), alive, world.workers)
        if observation.expired:
            lost.setdefault(InterruptionCause.LEASE_EXPIRED, []).extend(observation.expired)
        for cause, leases in lost.items():
            await self._requeue(job, leases, cause, term)
        gone = {lease.key for leases in lost.values() for lease in leases}
        world.leased[job.job_id] = [lease for lease in leased if lease.key not in gone]
        self._tell_again([lease for lease in observation.unclaimed if lease.key not in gone])

    async def _requeue(self, job: JobRecord, leases: list[LeasedRequest], cause: InterruptionCause, term: int) -> None:
        owners = sorted({lease.worker_id for lease in leases})
        moved = await self._store.requeue(job.job_id, term, [(lease.key, lease.token) for lease in leases], cause)
        REQUEUED.labels(cause.value).inc(moved)
        for lease in leases:
            self._owners.pop(lease.key, None)  # its next owner is our doing, not a hand-over
        if moved:
            self._events.add("requeued", f"{moved} requests taken back from {', '.join(owners)}: {cause.value}")

    def _tell_again(self, leases: list[LeasedRequest]) -> None:
        by_worker: dict[str, list[Lease]] = defaultdict(list)
        for lease in leases:
            by_worker[lease.worker_id].append(Lease(lease.key, lease.token, lease.worker_id))
        for worker_id, mine in by_worker.items():
            self._gateway.admit(worker_id, mine)

    # -- placement --------------------------------------------------------------------------------------------------
    def _views(self, world: _Round) -> dict[str, placement.WorkerView]:
        reachable = self._gateway.reachable() - self._beats.silent(self._clock(), world.workers)
        loads: dict[str, list[LeasedRequest]] = defaultdict(list)
        for leases in world.leased.values():
            for lease in leases:
                loads[lease.worker_id].append(lease)
        return {
            worker.worker_id: self._view(worker, loads[worker.worker_id], world)
            for worker in world.workers.values()
            if worker.worker_id in reachable and worker.worker_id not in world.dead
        }

    def _view(self, worker: WorkerStatus, leases: list[LeasedRequest], world: _Round) -> placement.WorkerView:
        notice = world.notices.get(worker.node_id)
        hinted = notice is not None and notice.kind is NoticeKind.REBALANCE
        lookahead = self._options.placement.lookahead_tokens
        promised = sum(
            placement.pages_needed(lease.prompt_tokens, lease.tokens, lease.max_tokens, worker.page_size, lookahead)
            for lease in leases
        )
        return placement.WorkerView(
            worker_id=worker.worker_id,
            numerics_class=worker.numerics_class,
            max_num_seqs=worker.max_num_seqs,
            pages_total=worker.pages_total,
            page_size=worker.page_size,
            assigned=len(leases),
            pages_promised=promised,
            accepting=worker.state == "ready" and (notice is None or hinted),
            hinted=hinted,
            exclusive=any(lease.attempts > 0 for lease in leases),
        )

    async def _place(self, job: JobRecord, views: dict[str, placement.WorkerView], world: _Round, term: int) -> None:
        ready = await self._store.ready_requests(job.job_id, self._options.ready_window)
        guilty = recovery.convicted(ready, self._options.recovery)
        for request in guilty:
            await self._convict(request, term)
        waiting = [request for request in ready if request not in guilty]
        wanted = placement.plan(waiting, list(views.values()), self._wall(), self._options.placement)
        self._explain(job, waiting, views, placed=bool(wanted), world=world)
        if not wanted:
            return
        leases = await self._store.lease(job.job_id, term, wanted)
        by_worker: dict[str, list[Lease]] = defaultdict(list)
        for lease in leases:
            by_worker[lease.worker_id].append(lease)
        for worker_id, mine in by_worker.items():
            self._gateway.admit(worker_id, mine)
        self._promise(views, waiting, leases)

    def _promise(
        self, views: dict[str, placement.WorkerView], waiting: list[ReadyRequest], leases: list[Lease]
    ) -> None:
        """Later jobs of this round must see what this one took."""
        by_key = {request.key: request for request in waiting}
        for lease in leases:
            view = views[lease.worker_id]
            views[lease.worker_id] = placement.take(view, by_key[lease.key], self._options.placement)

    async def _convict(self, request: ReadyRequest, term: int) -> None:
        record = await self._store.get_request(request.key)
        if record is None:
            return
        payload = recovery.conviction_payload(request, record.spec.custom_id)
        if await self._store.fail_request(request.key, term, request.epoch, payload):
            self._events.add("convicted", f"{request.key}: broke an engine {request.attempts} times; set aside")

    def _explain(
        self,
        job: JobRecord,
        waiting: list[ReadyRequest],
        views: dict[str, placement.WorkerView],
        *,
        placed: bool,
        world: _Round,
    ) -> None:
        reason = ""
        if waiting and not placed and not world.leased[job.job_id]:
            if not views:
                reason = "no worker is up yet"
            elif not any(view.accepting for view in views.values()):
                reason = "every worker is draining"
            else:
                reason = "every worker is full, or of another numerics class than the tokens already committed"
        self.waiting_for[job.job_id] = reason

    async def _finish(self, job: JobRecord, term: int) -> None:
        done = await self._store.finish_job(job.job_id, term)
        if done.state in (JobState.COMPLETED, JobState.CANCELLED):
            self.waiting_for.pop(job.job_id, None)
            self._events.add("job_done", f"{job.job_id}: {done.state.value}, {done.completed} of {done.total} good")

    # -- drains -----------------------------------------------------------------------------------------------------
    def _direct_drains(self, world: _Round, views: dict[str, placement.WorkerView]) -> None:
        """Tell each draining worker where its sequences should go, as things stand now."""
        self._sent_targets = {
            worker_id: sent
            for worker_id, sent in self._sent_targets.items()
            if worker_id in world.workers and world.workers[worker_id].draining
        }
        for worker in world.workers.values():
            if not worker.draining or worker.worker_id not in self._gateway.reachable():
                continue
            leaving = [
                _as_ready(lease, self._wall())
                for leases in world.leased.values()
                for lease in leases
                if lease.worker_id == worker.worker_id
            ]
            others = [view for view in views.values() if view.worker_id != worker.worker_id]
            _, sent = self._sent_targets.get(worker.worker_id, (0.0, {}))
            before = {key: target.worker_id for key, target in sent.items()}
            chosen = placement.drain_targets(leaving, others, self._wall(), self._options.placement, before)
            if leaving:
                targets = {key: DrainTarget(name, world.workers[name].daemon) for key, name in chosen.items()}
                self._send_targets(worker.worker_id, targets)

    def _send_targets(self, worker_id: str, targets: dict[RequestKey, DrainTarget]) -> None:
        """Told when they change, and again at intervals: a call may be lost."""
        now = self._clock()
        at, last = self._sent_targets.get(worker_id, (0.0, None))
        if targets != last or now - at >= self._options.claim_s:
            self._gateway.set_targets(worker_id, targets)
            self._sent_targets[worker_id] = (now, targets)

    def _tell_what_changed(self, world: _Round) -> None:
        """Events for what others did: notices raised, leases handed over by their owners."""
        for notice in world.notices.values():
            if notice.id not in self._known_notices:
                left = notice.deadline - self._wall()
                self._events.add("notice", f"{notice.node_id}: {notice.kind.value} in {left:.1f} s ({notice.source})")
        self._known_notices = {notice.id for notice in world.notices.values()}
        owners = {lease.key: lease.worker_id for leases in world.leased.values() for lease in leases}
        moves = Counted((self._owners[key], owner) for key, owner in owners.items() if key in self._owners)
        for (source, target), count in moves.items():
            if source != target:
                self._events.add("handover", f"{count} requests handed over from {source} to {target}")
        self._owners = owners


def _as_ready(lease: LeasedRequest, now: float) -> ReadyRequest:
    """As if it had just come to the queue: a drain is no reason to leave the numerics class, or to run beside others
    while suspected."""
    return ReadyRequest(
        key=lease.key,
        epoch=lease.token.epoch,
        prompt_tokens=lease.prompt_tokens,
        tokens=lease.tokens,
        max_tokens=lease.max_tokens,
        numerics_class=lease.numerics_class,
        attempts=lease.attempts,
        interruptions=0,
        ready_since=now,
        avoid_worker=lease.worker_id,
    )
