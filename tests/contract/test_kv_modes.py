"""What a crash and a notice cost in each commit mode, on real workers, daemons and stores; answers are equal in all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from context_daemon.client import ContextClient
from context_daemon.records import Interruption, Notice, NoticeKind, RequestSpec
from orchestrator.verify import compare
from tests.contract.worker_rig import PROMPTS, Rig, Worker, until
from tests.unit.tiny_model import write_tiny_model

COUNT = len(PROMPTS)


@pytest.fixture(scope="module", params=["store", "grace", "arena"])
def rig(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("modes")
    with Rig(folder, write_tiny_model(folder / "tiny"), "--kv-commit", request.param) as made:
        yield made


@pytest.fixture
def mode(rig: Rig) -> str:
    return rig._daemon_flags[1]


@pytest.fixture(scope="module")
def specs(rig: Rig) -> list[RequestSpec]:
    return rig.specs()


@pytest.fixture(scope="module")
def reference(rig: Rig, specs: list[RequestSpec]) -> list[bytes]:
    return rig.undisturbed("reference", specs, "n1")


def crashed(rig: Rig, job_id: str, specs: list[RequestSpec]) -> None:
    """A worker on n1 that committed something of each request and died without a word."""
    worker = rig.worker(f"a-{job_id}", "n1")
    rig.submit(job_id, specs)
    rig.lease_all(job_id, worker)
    rig.wait_tokens(job_id, 120)
    rig.retire(worker)
    assert rig.requeue(job_id) == COUNT


def finished_by(rig: Rig, job_id: str, worker: Worker, reference: list[bytes]) -> list[Interruption]:
    rig.lease_all(job_id, worker)
    assert compare(reference, rig.results(job_id, COUNT)).ok
    rows = rig.interruptions(job_id)
    assert len(rows) == COUNT
    assert all(row.recomputed_tokens == row.prompt_tokens + row.tokens - 1 - row.restored_positions for row in rows)
    return rows


def test_an_engine_that_dies_is_resumed_on_its_node_from_the_arena(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes]
) -> None:
    crashed(rig, "here", specs)
    rig.servers.kv.kill()
    try:
        rows = finished_by(rig, "here", rig.worker("b-here", "n1"), reference)
    finally:
        rig.servers.kv.start()
    assert {row.restore_source for row in rows} == {"arena"}
    assert max(row.recomputed_tokens or 0 for row in rows) < 16


def test_an_engine_that_dies_is_resumed_elsewhere_from_its_nodes_daemon(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], mode: str
) -> None:
    crashed(rig, "peer", specs)
    rows = finished_by(rig, "peer", rig.worker("b-peer", "n2"), reference)
    ways = {"peer"} if mode != "store" else {"peer", "store"}
    assert {row.restore_source for row in rows} <= ways
    assert max(row.recomputed_tokens or 0 for row in rows) < 16


def test_a_machine_that_vanishes_costs_what_was_not_shipped(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], mode: str
) -> None:
    crashed(rig, "gone", specs)
    rig.kill_daemon("n1")
    try:
        rows = finished_by(rig, "gone", rig.worker("b-gone", "n2"), reference)
    finally:
        rig.start_daemon("n1")
    if mode == "store":
        assert {row.restore_source for row in rows} == {"store"}
        assert max(row.recomputed_tokens or 0 for row in rows) < 16
    else:
        assert {row.restored_positions for row in rows} == {0}


def test_a_notice_saves_all_kv_where_anything_is_ever_shipped(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], mode: str
) -> None:
    worker = rig.worker("a-notice", "n1")
    rig.submit("notice", specs)
    rig.lease_all("notice", worker)
    rig.wait_tokens("notice", 60)
    client = ContextClient(rig.addresses["n1"])
    notice = Notice("n1", NoticeKind.TERMINATE, time.time() + 1.6, "test")
    client.raise_notice(notice)
    until(lambda: worker.runtime.status().state == "drained", "the drain")
    client.withdraw_notice(notice.id)
    client.close()
    rig.retire(worker)
    rig.kill_daemon("n1")  # the machine is gone, and its arena with it
    try:
        rig.lease_all("notice", rig.worker("b-notice", "n2"))
        assert compare(reference, rig.results("notice", COUNT)).ok
    finally:
        rig.start_daemon("n1")
    rows = rig.interruptions("notice")
    assert rows, "something was left to hand over"
    if mode == "arena":
        assert {row.restored_positions for row in rows} == {0}
    else:
        assert [row.recomputed_tokens for row in rows] == [0] * len(rows)
        assert {row.restore_source for row in rows} == {"store"}
