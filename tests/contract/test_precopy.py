"""Workers whose node is under notice: KV goes ahead to the next owner's node, and whatever dies on the way, the answers are
the same to the byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from context_daemon.client import ContextClient
from context_daemon.fault_points import Point
from context_daemon.phases import Phase
from context_daemon.records import (
    DrainTarget,
    Interruption,
    InterruptionCause,
    Lease,
    Notice,
    NoticeKind,
    RequestKey,
    RequestSpec,
    WorkerStatus,
)
from context_daemon.redis_store import RedisStore
from context_daemon.store import ContextStore, LeasedRequest, LeaseRequest
from orchestrator.events import EventLog
from orchestrator.routing.router import Router, RouterOptions
from orchestrator.verify import compare
from tests.contract.worker_process import WorkerProcess
from tests.contract.worker_rig import PROMPTS, Rig, Worker, keys, until
from tests.unit.tiny_model import write_tiny_model

COUNT = len(PROMPTS)
NOTICE_S = 3.0


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("precopy")
    with Rig(folder, write_tiny_model(folder / "tiny")) as made:
        yield made


@pytest.fixture(scope="module")
def specs(rig: Rig) -> list[RequestSpec]:
    """Long enough that a drain falls into the middle of it."""
    return rig.specs(max_tokens=480)


@pytest.fixture(scope="module")
def reference(rig: Rig, specs: list[RequestSpec]) -> list[bytes]:
    return rig.undisturbed("reference", specs, "n2")


@contextmanager
def notice(rig: Rig, node: str = "n1", seconds: float = NOTICE_S) -> Iterator[Notice]:
    """Stands for the length of a `with`."""
    made = Notice(node, NoticeKind.TERMINATE, time.time() + seconds, "test")
    client = ContextClient(rig.addresses[node])
    client.raise_notice(made)
    try:
        yield made
    finally:
        client.withdraw_notice(made.id)
        client.close()


def targets(rig: Rig, job: str, worker: Worker, node: str) -> dict[RequestKey, DrainTarget]:
    return dict.fromkeys(keys(job, COUNT), DrainTarget(worker.name, rig.addresses[node]))


def directed(rig: Rig, job: str, source: Worker, target: Worker, node: str) -> None:
    """As by the router, which hears of a drain from the worker."""
    until(lambda: source.runtime.status().draining, "the notice to be heard")
    source.runtime.set_targets(targets(rig, job, target, node))


def started(rig: Rig, job: str, specs: Sequence[RequestSpec], tokens: int = 60, node: str = "n1") -> Worker:
    worker = rig.worker(f"a-{job}", node)
    rig.submit(job, specs)
    rig.lease_all(job, worker)
    rig.wait_tokens(job, tokens)
    return worker


def drained(worker: Worker) -> None:
    until(lambda: worker.runtime.status().state == "drained", "the drain")
    until(lambda: not worker.runtime._handovers._threads._work_queue.qsize(), "every hand-over to begin")


def timed(phase: Phase) -> float:
    return REGISTRY.get_sample_value("tideover_phase_seconds_count", {"phase": phase.value}) or 0.0


def nothing_again(rows: Sequence[Interruption]) -> bool:
    return bool(rows) and all(row.recomputed_tokens == 0 for row in rows)


def test_a_drain_takes_its_kv_along_and_waits_for_no_store(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes]
) -> None:
    source, target = started(rig, "ahead", specs), rig.worker("b-ahead", "n2")
    before = {phase: timed(phase) for phase in Phase}
    rig.servers.kv.kill()
    try:
        with notice(rig) as made:
            directed(rig, "ahead", source, target, "n2")
            drained(source)
            assert time.time() < made.deadline
            until(lambda: len(source.notified) == COUNT, "each to be moved")
            rig.kill_daemon("n1")  # the machine goes at once
            target.runtime.admit(source.notified)
            assert compare(reference, rig.results("ahead", COUNT)).ok
            rig.start_daemon("n1")
    finally:
        rig.servers.kv.start()
    rows = rig.interruptions("ahead")
    assert len(rows) == COUNT and nothing_again(rows)
    assert {row.restore_source for row in rows} == {"arena"}
    assert all((row.restored_positions or 0) > 4 * 16 for row in rows), "pages, not an open one alone"
    for phase in (Phase.PRE_COPY, Phase.CUT_OVER, Phase.RESTORE, Phase.FIRST_TOKEN):
        assert timed(phase) == before[phase] + COUNT, phase
    for phase in (Phase.PLAN, Phase.SOURCE_STOPPED):
        assert timed(phase) == before[phase] + 1, phase
    assert source.deaths == target.deaths == []


def test_there_and_back_again(rig: Rig, specs: list[RequestSpec], reference: list[bytes]) -> None:
    """The second time part of it is there already."""
    first, second = started(rig, "back", specs, 30), rig.worker("b-back", "n2")
    with notice(rig, "n1", 2.2):
        directed(rig, "back", first, second, "n2")
        drained(first)
        until(lambda: len(first.notified) == COUNT, "each to be moved")
        second.runtime.admit(first.notified)
        rig.wait_tokens("back", rig.tokens("back") + 60)
    until(lambda: first.runtime.status().state == "ready", "the withdrawal to be heard")
    with notice(rig, "n2", 1.6):
        directed(rig, "back", second, first, "n1")
        drained(second)
        until(lambda: len(second.notified) > 0, "some to be moved")
        first.runtime.admit(second.notified)
        assert compare(reference, rig.results("back", COUNT)).ok
    rows = rig.interruptions("back")
    assert len(rows) > COUNT and nothing_again(rows)
    assert {row.restore_source for row in rows} == {"arena"}


def test_after_a_crash_the_head_comes_from_the_store(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes]
) -> None:
    """The source restored from elsewhere: of the head its arena has nothing."""
    crashed = started(rig, "head", specs, 240, node="n2")
    until(lambda: all(held.watermark_sent >= 32 for held in crashed.runtime._ledger.all()), "pages in the store")
    rig.retire(crashed)
    rig.kill_daemon("n2")
    rig.start_daemon("n2")
    rig.requeue("head")
    source, target = rig.worker("b-head", "n1"), rig.worker("c-head", "n2")
    rig.lease_all("head", source)
    rig.wait_tokens("head", rig.tokens("head") + 120)
    with notice(rig, "n1", 2.0):
        directed(rig, "head", source, target, "n2")
        drained(source)
        until(lambda: len(source.notified) > 0, "some to be moved")
        target.runtime.admit(source.notified)
        assert compare(reference, rig.results("head", COUNT)).ok
    rows = [row for row in rig.interruptions("head") if row.cause is InterruptionCause.NOTICE]
    assert nothing_again(rows) and {row.restore_source for row in rows} == {"arena"}


def moved_by(rig: Rig, job: str, worker: str) -> list[Lease]:
    """What the store says `worker` owns: the router tells it again."""

    async def read(store: ContextStore) -> list[LeasedRequest]:
        return await store.leased_requests(job)

    leased: list[LeasedRequest] = rig.store(read)
    return [Lease(one.key, one.token, worker) for one in leased if one.worker_id == worker]


def ends_well(rig: Rig, job: str, target: Worker, reference: list[bytes]) -> list[Interruption]:
    """Whatever is left goes to `target`, as the router does."""
    target.runtime.admit(moved_by(rig, job, target.name))
    rig.lease_all(job, target)
    assert compare(reference, rig.results(job, COUNT)).ok
    assert target.deaths == []
    return rig.interruptions(job)


@pytest.mark.parametrize("fault", ["guests.received:kill:2", "guests.page:kill:3", "guests.taken:kill:1"])
def test_a_target_daemon_killed_on_the_way(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], fault: str
) -> None:
    job = f"target-{fault.split(':')[0]}"
    rig.kill_daemon("n2")
    rig.start_daemon("n2", fault)
    source, target = started(rig, job, specs), rig.worker(f"b-{job}", "n2")
    with notice(rig):
        directed(rig, job, source, target, "n2")
        until(lambda: rig.daemon_ended("n2"), "the target's daemon to die")
        rig.start_daemon("n2")
        drained(source)
        until(lambda: target.runtime.status().state == "ready", "the target")
        assert nothing_again(ends_well(rig, job, target, reference))
    assert source.deaths == []


@pytest.mark.parametrize(
    ("point", "nth"),
    [(Point.PREPARE_RECEIVED, 1), (Point.PREPARE_ANSWERED, 3), (Point.PEER_PAGES, 1), (Point.PEER_PAGES, 20)],
)
def test_a_source_daemon_killed_on_the_way(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], point: Point, nth: int
) -> None:
    job = f"source-{point}-{nth}"
    rig.kill_daemon("n1")
    rig.start_daemon("n1", f"{point}:kill:{nth}")
    source, target = started(rig, job, specs), rig.worker(f"b-{job}", "n2")
    with notice(rig):
        directed(rig, job, source, target, "n2")
        until(lambda: rig.daemon_ended("n1"), "the source's daemon to die")
        rig.start_daemon("n1")
        drained(source)
        ends_well(rig, job, target, reference)
    assert source.deaths == []


@pytest.mark.parametrize("point", [Point.GUESTS_RECEIVED, Point.PREPARE_RECEIVED])
def test_a_daemon_that_stalls_does_not_hold_the_drain_up(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], point: Point
) -> None:
    node, job = ("n2" if point is Point.GUESTS_RECEIVED else "n1"), f"stall-{point}"
    rig.kill_daemon(node)
    rig.start_daemon(node, f"{point}:stall=4:6")
    source, target = started(rig, job, specs), rig.worker(f"b-{job}", "n2")
    with notice(rig):
        directed(rig, job, source, target, "n2")
        drained(source)
        ends_well(rig, job, target, reference)
    assert source.deaths == target.deaths == []


@pytest.mark.parametrize(
    ("point", "nth"),
    [(Point.NOTICE_HEARD, 1), (Point.TARGETS_HEARD, 1), (Point.PRECOPY_TURN, 3), (Point.CUT_STOPPED, 3),
     (Point.CUT_SETTLED, 3), (Point.CUT_PREPARED, 3), (Point.CUT_MOVED, 3)],
)  # fmt: skip
def test_a_source_process_killed_on_the_way(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], point: Point, nth: int
) -> None:
    job = f"process-{point}"
    source = WorkerProcess(str(rig.model), rig.addresses["n1"], f"a-{job}", "n1", f"{point}:kill:{nth}")
    target = rig.worker(f"b-{job}", "n2")
    rig.submit(job, specs)
    try:
        source.admit(leased_to(rig, job, source.name, target))
        rig.wait_tokens(job, 60)
        with notice(rig):
            until(lambda: source.exit_code is not None or says_it_drains(rig, source.name), "the notice to be heard")
            with suppress(BrokenPipeError):
                source.set_targets(targets(rig, job, target, "n2"))
            until(lambda: source.exit_code is not None, f"the source to come to {point}")
            lost = [one for one in rig.store(lambda store: store.leased_requests(job)) if one.worker_id == source.name]
            dead = InterruptionCause.WORKER_DIED
            rig.store(lambda store: store.requeue(job, 1, [(one.key, one.token) for one in lost], dead))
            ends_well(rig, job, target, reference)
    finally:
        source.kill()


def says_it_drains(rig: Rig, name: str) -> bool:
    workers: list[WorkerStatus] = rig.store(lambda store: store.workers())
    return any(worker.worker_id == name and worker.draining for worker in workers)


def leased_to(rig: Rig, job: str, name: str, like: Worker) -> list[Lease]:
    async def lease(store: ContextStore) -> list[Lease]:
        numerics = like.engine.layout.numerics_class
        ready = await store.ready_requests(job, 100)
        return await store.lease(job, 1, [LeaseRequest(r.key, r.epoch, name, numerics) for r in ready])

    leases: list[Lease] = rig.store(lease)
    return leases


class Gateway:
    """A WorkerGateway to workers in this process."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = {worker.name: worker for worker in workers}

    def admit(self, worker_id: str, leases: Sequence[Lease]) -> None:
        self.workers[worker_id].runtime.admit(leases)

    def set_targets(self, worker_id: str, told: Mapping[RequestKey, DrainTarget]) -> None:
        self.workers[worker_id].runtime.set_targets(told)

    def dead(self) -> Mapping[str, InterruptionCause]:
        return {}

    def reachable(self) -> set[str]:
        return set(self.workers)


async def route(rig: Rig, gateway: Gateway, done: Callable[[], bool]) -> None:
    store = RedisStore(rig.servers.durable.url)
    router = Router(store, gateway, EventLog(time.time), RouterOptions())
    term = await store.acquire_leadership("test", 60.0)
    running = asyncio.create_task(router.run(lambda: term or 1))
    try:
        await asyncio.to_thread(until, done, "the routing to be done")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await store.close()


def test_the_router_says_where_the_pages_go(rig: Rig, specs: list[RequestSpec], reference: list[bytes]) -> None:
    source, target = started(rig, "routed", specs), rig.worker("b-routed", "n2")
    with notice(rig):
        asyncio.run(route(rig, Gateway(source, target), lambda: source.runtime.status().state == "drained"))
        rows = ends_well(rig, "routed", target, reference)
    assert nothing_again(rows) and {row.restore_source for row in rows} == {"arena"}
