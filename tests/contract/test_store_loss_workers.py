"""A job runs on while its durable store dies, and comes back with all, without its last second, or with nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from context_daemon.records import Interruption, InterruptionCause, RequestSpec
from orchestrator.verify import compare
from tests.contract.append_only import lose, lose_all, size, write_at_once
from tests.contract.router_rig import Gateway, Routing
from tests.contract.worker_rig import PROMPTS, Rig, Worker, until
from tests.unit.tiny_model import write_tiny_model

COUNT = len(PROMPTS)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("loss")
    with Rig(folder, write_tiny_model(folder / "tiny")) as made:
        write_at_once(made.servers.durable)
        yield made


@pytest.fixture(scope="module")
def specs(rig: Rig) -> list[RequestSpec]:
    return rig.specs(max_tokens=350)


@pytest.fixture(scope="module")
def reference(rig: Rig, specs: list[RequestSpec]) -> list[bytes]:
    return rig.undisturbed("reference", specs)


@pytest.fixture
def workers(rig: Rig) -> Iterator[list[Worker]]:
    stamp = time.monotonic_ns()
    made = [rig.worker(f"{node}-{stamp}", node) for node in rig.addresses]
    yield made
    for worker in made:
        rig.retire(worker)


def incarnation(rig: Rig) -> int:
    return int(rig.store(lambda store: store.incarnation()))


def no_epoch_twice(rows: list[Interruption]) -> bool:
    return len({(row.line, row.epoch) for row in rows}) == len(rows)


def test_a_kill_without_loss_takes_nothing_from_anybody(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], workers: list[Worker]
) -> None:
    before = incarnation(rig)
    with Routing(rig, Gateway(*workers)) as routing:
        rig.submit("kept", specs)
        rig.wait_tokens("kept", 200)
        rig.servers.durable.kill()
        rig.servers.durable.start()
        write_at_once(rig.servers.durable)
        assert compare(reference, rig.results("kept", COUNT)).ok
        assert incarnation(rig) == before and rig.interruptions("kept") == []
        assert "store_lost_writes" not in routing.kinds and "store_restarted" in routing.kinds
    assert all(worker.deaths == [] for worker in workers)


@pytest.mark.parametrize("more", [0, 7], ids=["between", "within a command"])
def test_a_lost_second_is_computed_again_the_same(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], workers: list[Worker], more: int
) -> None:
    job, before = f"second-{more}", incarnation(rig)
    with Routing(rig, Gateway(*workers)) as routing:
        rig.submit(job, specs)
        rig.wait_tokens(job, 300)
        sizes: deque[tuple[float, int]] = deque()
        start = time.monotonic()
        while time.monotonic() - start < 1.0:
            sizes.append((time.monotonic(), size(rig.servers.durable)))
            time.sleep(0.05)
        lost = rig.tokens(job)
        lose(rig.servers.durable, sizes[0][1] + more)
        write_at_once(rig.servers.durable)
        assert rig.tokens(job) < lost, "something was lost"
        assert compare(reference, rig.results(job, COUNT)).ok
        rows = rig.interruptions(job)
        assert incarnation(rig) == before + 1
        assert routing.kinds.count("store_lost_writes") == 1
        assert {row.cause for row in rows} == {InterruptionCause.STORE_LOSS}
        assert len(rows) == COUNT and no_epoch_twice(rows)
        assert all(row.restored_positions for row in rows), "from the arena or the store, up to what is still known"
    assert all(worker.deaths == [] for worker in workers)


def test_a_store_restarted_while_nobody_led_is_in_doubt(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], workers: list[Worker]
) -> None:
    before, gateway = incarnation(rig), Gateway(*workers)
    with Routing(rig, gateway):
        rig.submit("doubt", specs)
        rig.wait_tokens("doubt", 200)
    rig.servers.durable.kill()
    rig.servers.durable.start()
    write_at_once(rig.servers.durable)
    with Routing(rig, gateway) as second:
        assert compare(reference, rig.results("doubt", COUNT)).ok
        assert any("nobody led" in text for text in second.texts("store_restarted"))
    assert incarnation(rig) == before + 1
    with Routing(rig, gateway) as third:
        rig.submit("after", specs[:1])
        rig.results("after", 1)
        assert third.texts("store_restarted") == [], "the same server as the last leader's"
    assert incarnation(rig) == before + 1


def test_an_empty_store_is_told_of_and_takes_new_work(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], workers: list[Worker]
) -> None:
    with Routing(rig, Gateway(*workers)) as routing:
        rig.submit("gone", specs)
        rig.wait_tokens("gone", 200)
        lose_all(rig.servers.durable)
        until(lambda: routing.texts("job_lost"), "the word of the lost job")
        assert "gone was running" in routing.texts("job_lost")[0] and "submit it again" in routing.texts("job_lost")[0]
        until(lambda: not any(w.runtime.status().held for w in workers), "its owners to drop it")
        rig.submit("anew", specs)
        assert compare(reference, rig.results("anew", COUNT)).ok
    assert all(worker.deaths == [] for worker in workers)
