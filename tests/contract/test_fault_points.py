"""A daemon that is killed at each named place of its pipeline, while a job runs through it: every answer is the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from context_daemon.client import ContextClient
from context_daemon.fault_points import Fault, Point, parse
from context_daemon.records import InterruptionCause, Notice, NoticeKind, RequestSpec
from orchestrator.verify import compare
from tests.contract.worker_rig import PROMPTS, Rig, until
from tests.unit.tiny_model import write_tiny_model

COUNT = len(PROMPTS)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("points")
    with Rig(folder, write_tiny_model(folder / "tiny")) as made:
        yield made


@pytest.fixture(scope="module")
def specs(rig: Rig) -> list[RequestSpec]:
    return rig.specs()


@pytest.fixture(scope="module")
def reference(rig: Rig, specs: list[RequestSpec]) -> list[bytes]:
    return rig.undisturbed("reference", specs, "n2")


def armed(rig: Rig, fault: str) -> None:
    """n1's daemon, started anew with a fault in it."""
    rig.kill_daemon("n1")
    rig.start_daemon("n1", fault)


def replaced(rig: Rig, point: Point) -> None:
    """The fault has struck, and the supervisor has started another daemon."""
    until(lambda: rig.daemon_ended("n1"), f"the daemon to come to {point}")
    rig.start_daemon("n1")


RUNNING = (
    Point.SLOTS_RECEIVED,
    Point.SLOTS_TAKEN,
    Point.COMMIT_RECEIVED,
    Point.COMMIT_STORED,
    Point.SHIP_STARTED,
    Point.SHIP_STORED,
)


@pytest.mark.parametrize("point", RUNNING)
@pytest.mark.parametrize("nth", [1, 12])
def test_a_daemon_killed_while_requests_run(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], point: Point, nth: int
) -> None:
    job = f"run-{point}-{nth}"
    armed(rig, f"{point}:kill:{nth}")
    worker = rig.worker(f"w-{job}", "n1")
    rig.submit(job, specs)
    leases = rig.lease_all(job, worker)
    replaced(rig, point)
    worker.runtime.admit(leases)  # as the router does for leases that nobody claims: some were still being restored
    assert compare(reference, rig.results(job, COUNT)).ok
    assert worker.deaths == [] and rig.interruptions(job) == []
    rig.retire(worker)


@pytest.mark.parametrize("point", [Point.ARENA_ATTACHED, Point.RESTORE_RECORD, Point.RESTORE_PAGES])
def test_a_daemon_killed_while_a_worker_takes_over(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], point: Point
) -> None:
    job = f"take-{point}"
    first = rig.worker(f"a-{job}", "n2")
    rig.submit(job, specs)
    rig.lease_all(job, first)
    rig.wait_tokens(job, 120)
    rig.retire(first)
    rig.requeue(job)
    armed(rig, f"{point}:kill:1")
    second = rig.worker(f"b-{job}", "n1")
    leases = rig.lease_all(job, second)
    replaced(rig, point)
    until(lambda: second.runtime.status().state == "ready", "the worker")
    second.runtime.admit(leases)  # as the router does for a lease that nobody claims
    assert compare(reference, rig.results(job, COUNT)).ok
    assert second.deaths == []
    rig.retire(second)


@pytest.mark.parametrize("point", [Point.HANDOVER_RECEIVED, Point.HANDOVER_STORED])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_daemon_killed_in_the_middle_of_a_hand_over(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], point: Point, nth: int
) -> None:
    job = f"hand-{point}-{nth}"
    armed(rig, f"{point}:kill:{nth}")
    source = rig.worker(f"a-{job}", "n1")
    rig.submit(job, specs)
    rig.lease_all(job, source)
    rig.wait_tokens(job, 60)
    client = ContextClient(rig.addresses["n1"])
    notice = Notice("n1", NoticeKind.TERMINATE, time.time() + 0.3, "test")
    client.raise_notice(notice)
    client.close()
    replaced(rig, point)
    until(lambda: source.runtime.status().state == "drained", "the drain")
    rig.lease_all(job, rig.worker(f"b-{job}", "n2"))
    assert compare(reference, rig.results(job, COUNT)).ok
    assert {row.cause for row in rig.interruptions(job)} == {InterruptionCause.NOTICE}
    client = ContextClient(rig.addresses["n1"])
    client.withdraw_notice(notice.id)
    client.close()
    rig.retire(source)


def test_a_daemon_killed_while_it_gives_pages_away(rig: Rig, specs: list[RequestSpec], reference: list[bytes]) -> None:
    job = "give"
    armed(rig, f"{Point.PEER_PAGES}:kill:2")
    first = rig.worker("a-give", "n1")
    rig.submit(job, specs)
    rig.lease_all(job, first)
    rig.wait_tokens(job, 120)
    rig.retire(first)
    rig.requeue(job)
    rig.servers.kv.kill()  # so that pages come from the peer, or not at all
    try:
        rig.lease_all(job, rig.worker("b-give", "n2"))
        replaced(rig, Point.PEER_PAGES)
        assert compare(reference, rig.results(job, COUNT)).ok
    finally:
        rig.servers.kv.start()


def test_faults_are_read_or_refused_by_name() -> None:
    assert parse("ship.started:stall=2.5:3") == Fault(Point.SHIP_STARTED, 2.5, 3)
    assert parse("commit.stored:kill") == Fault(Point.COMMIT_STORED, None, 1)
    for bad in ("commit.sored:kill:1", "commit.stored:explode:1", "commit.stored:kill:0", "commit.stored:stall=x", ""):
        with pytest.raises(ValueError, match="TIDEOVER_FAULT"):
            parse(bad)
