"""A worker's whole life on real parts: commits, crashes, hand-overs, outages. Answers are compared to the byte."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from context_daemon.client import ContextClient
from context_daemon.records import (
    CommitStatus,
    DrainTarget,
    FencingToken,
    Interruption,
    InterruptionCause,
    Notice,
    NoticeKind,
    RequestKey,
    RequestSpec,
    TokenCommit,
)
from orchestrator.verify import compare
from tests.contract.worker_rig import PROMPTS, Gate, PacedEngine, Rig, Worker, keys, spec, until
from tests.unit.tiny_model import write_tiny_model
from worker.engine.engine import TorchEngine
from worker.engine.protocol import EngineFault, StepOutput

COUNT = len(PROMPTS)
Raise = Callable[[str, float], Notice]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("rig")
    with Rig(folder, write_tiny_model(folder / "tiny")) as made:
        yield made


@pytest.fixture(scope="module")
def specs(rig: Rig) -> list[RequestSpec]:
    return rig.specs()


@pytest.fixture(scope="module")
def reference(rig: Rig, specs: list[RequestSpec]) -> list[bytes]:
    lines = rig.undisturbed("reference", specs)
    assert {len(json.loads(line)["response"]["body"]["choices"]) for line in lines} == {1}
    return lines


@pytest.fixture(scope="module")
def long(rig: Rig) -> list[RequestSpec]:
    """At the paced engine's step time, long enough that a drain of seconds falls into the middle of it."""
    return rig.specs(max_tokens=450)


@pytest.fixture(scope="module")
def long_reference(rig: Rig, long: list[RequestSpec]) -> list[bytes]:
    return rig.undisturbed("long-reference", long, "n2")


def started(rig: Rig, job_id: str, specs: list[RequestSpec], tokens: int, node: str = "n1", **engine: int) -> Worker:
    """A worker on `node` that has committed `tokens` tokens of a new job."""
    worker = rig.worker(f"a-{job_id}", node, **engine)
    rig.submit(job_id, specs)
    rig.lease_all(job_id, worker)
    rig.wait_tokens(job_id, tokens)
    return worker


def holds_the_formula(rows: list[Interruption]) -> bool:
    return all(row.recomputed_tokens == row.prompt_tokens + row.tokens - 1 - row.restored_positions for row in rows)


def test_a_crash_costs_less_than_a_page(rig: Rig, specs: list[RequestSpec], reference: list[bytes]) -> None:
    first = started(rig, "crash", specs, 120)
    rig.retire(first)  # nothing is handed over
    assert rig.requeue("crash") == COUNT
    rig.lease_all("crash", rig.worker("b-crash", "n2"))
    assert compare(reference, rig.results("crash", COUNT)).ok
    rows = rig.interruptions("crash")
    assert len(rows) == COUNT and holds_the_formula(rows)
    assert max(row.recomputed_tokens or 0 for row in rows) < 16


def test_crash_after_crash_changes_nothing(rig: Rig, specs: list[RequestSpec], reference: list[bytes]) -> None:
    rig.submit("many", specs)
    for crash in range(8):
        worker = rig.worker(f"many-{crash}", "n1" if crash % 2 else "n2")
        before = rig.tokens("many")
        rig.lease_all("many", worker)
        until(lambda before=before: rig.tokens("many") > before + 20, "progress")  # type: ignore[misc]
        rig.retire(worker)
        rig.requeue("many")
    rig.lease_all("many", rig.worker("many-last", "n1"))
    assert compare(reference, rig.results("many", COUNT)).ok
    by_line: dict[int, list[Interruption]] = {}
    for row in rig.interruptions("many"):
        by_line.setdefault(row.line, []).append(row)
    for rows in by_line.values():
        assert [row.tokens for row in rows] == sorted(row.tokens for row in rows), "a position under two epochs"


@pytest.fixture
def raise_notice(rig: Rig) -> Iterator[Raise]:
    """Tells a node's daemon that its machine goes in so many seconds; withdrawn with the test, however it ends."""
    raised: list[Notice] = []

    def raise_(node: str, seconds: float) -> Notice:
        notice = Notice(node, NoticeKind.TERMINATE, time.time() + seconds, "test")
        raised.append(notice)
        client = ContextClient(rig.addresses[node])
        client.raise_notice(notice)
        client.close()
        return notice

    yield raise_
    for notice in raised:
        withdraw(rig, notice)


def withdraw(rig: Rig, notice: Notice) -> None:
    """Withdrawing what is withdrawn already changes nothing."""
    client = ContextClient(rig.addresses[notice.node_id])
    client.withdraw_notice(notice.id)
    client.close()


def test_a_notice_with_a_target_computes_nothing_again(
    rig: Rig, long: list[RequestSpec], long_reference: list[bytes], raise_notice: Raise
) -> None:
    source = started(rig, "notice", long, 60, node="n1")
    target = rig.worker("b-notice", "n2")
    source.runtime.set_targets(dict.fromkeys(keys("notice", COUNT), DrainTarget(target.name)))
    notice = raise_notice("n1", 2.5)
    until(lambda: source.runtime.status().state == "drained", "the drain")
    assert time.time() < notice.deadline, "handed over before the machine goes"
    moved = list(source.notified)
    target.runtime.admit(moved)
    assert compare(long_reference, rig.results("notice", COUNT)).ok
    rows = rig.interruptions("notice")
    assert {row.cause for row in rows} == {InterruptionCause.NOTICE} and len(rows) == len(moved)
    assert [row.recomputed_tokens for row in rows] == [0] * len(rows)
    late = TokenCommit(moved[0].key, FencingToken(moved[0].token.incarnation, 1), 0, (1,))
    assert source.client.commit([late])[0].status is CommitStatus.FENCED


def test_a_notice_without_a_target_gives_back_to_the_queue_and_a_withdrawn_one_lets_work_go_on(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], raise_notice: Raise
) -> None:
    source = started(rig, "queue", specs, 60, node="n1")
    notice = raise_notice("n1", 0.5)  # too short for anything but handing back
    until(lambda: source.runtime.status().state == "drained", "the drain")
    withdraw(rig, notice)
    until(lambda: source.runtime.status().state == "ready", "the withdrawal to be heard")
    rig.lease_all("queue", source)
    assert compare(reference, rig.results("queue", COUNT)).ok
    assert all(row.recomputed_tokens == 0 for row in rig.interruptions("queue"))


def test_requests_that_wait_in_the_engine_are_handed_over_too(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], raise_notice: Raise
) -> None:
    source = started(rig, "waiting", specs, 10, node="n1", max_num_seqs=2)
    raise_notice("n1", 0.5)
    until(lambda: source.runtime.status().state == "drained", "the drain")
    rig.lease_all("waiting", rig.worker("b-waiting", "n2"))
    assert compare(reference, rig.results("waiting", COUNT)).ok


def test_a_stale_owner_that_wakes_is_fenced(rig: Rig, specs: list[RequestSpec], reference: list[bytes]) -> None:
    frozen = started(rig, "stale", specs, 60)
    gate = Gate()
    gate.close(frozen)
    time.sleep(0.3)  # its commits on the way may still arrive
    rig.requeue("stale", InterruptionCause.LEASE_EXPIRED)
    rig.lease_all("stale", rig.worker("b-stale", "n2"))
    gate.opened.set()
    assert compare(reference, rig.results("stale", COUNT)).ok
    until(lambda: not frozen.runtime.status().held, "the stale owner to drop everything")
    assert frozen.deaths == []


def test_a_killed_daemon_costs_time_only(rig: Rig, specs: list[RequestSpec], reference: list[bytes]) -> None:
    worker = started(rig, "daemon", specs, 60, node="n2")
    rig.kill_daemon("n2")
    time.sleep(1.0)
    rig.start_daemon("n2")
    assert compare(reference, rig.results("daemon", COUNT)).ok
    assert worker.deaths == [] and rig.interruptions("daemon") == []


def test_a_durable_store_that_is_away_holds_the_engine_back_and_loses_nothing(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes]
) -> None:
    worker = started(rig, "durable", specs, 30)
    rig.servers.durable.kill()
    time.sleep(2.0)
    assert worker.runtime._ledger.lag() <= 17, "back-pressure: at most the bound and the step under way"
    beat = worker.runtime._loop.beat
    until(lambda: worker.runtime._loop.beat > beat, "the loop to turn all the same")
    rig.servers.durable.start()
    assert compare(reference, rig.results("durable", COUNT)).ok
    assert worker.deaths == [] and rig.interruptions("durable") == []


def test_a_kv_store_that_comes_back_empty_is_filled_again(
    rig: Rig, long: list[RequestSpec], long_reference: list[bytes]
) -> None:
    worker = started(rig, "kv", long, 60)
    rig.servers.kv.kill()
    rig.servers.kv.start()
    until(lambda: all(held.kv_losses for held in worker.runtime._ledger.all()), "the new server to be noticed")
    rig.wait_tokens("kv", rig.tokens("kv") + 60)
    rig.retire(worker)
    rig.requeue("kv")
    rig.lease_all("kv", rig.worker("b-kv", "n2"))
    assert compare(long_reference, rig.results("kv", COUNT)).ok
    rows = rig.interruptions("kv")
    assert rows and holds_the_formula(rows)
    assert all(row.restored_positions for row in rows), "what was resident was written to the new server"


class FaultOnce(PacedEngine):
    """The real engine, made to break once, in the step after it was armed."""

    armed: threading.Event
    suspect: RequestKey

    def step(self) -> StepOutput:
        if self.armed.is_set():
            raise EngineFault("broken on purpose", (self.suspect,))
        return super().step()


def test_an_engine_fault_blames_its_suspects_only(rig: Rig, specs: list[RequestSpec], reference: list[bytes]) -> None:
    def breakable(engine: TorchEngine) -> TorchEngine:
        engine.__class__ = FaultOnce
        assert isinstance(engine, FaultOnce)
        engine.armed, engine.suspect = threading.Event(), RequestKey("fault", 2)
        return engine

    worker = rig.worker("a-fault", "n1", wrap=breakable)
    rig.submit("fault", specs)
    rig.lease_all("fault", worker)
    rig.wait_tokens("fault", 60)
    assert isinstance(worker.engine, FaultOnce)
    worker.engine.armed.set()
    until(lambda: worker.deaths, "the worker to die")
    ready = rig.store(lambda store: store.ready_requests("fault", 100))
    assert {request.key.line: request.attempts for request in ready} == {
        line: int(line == 2) for line in range(1, COUNT + 1)
    }
    rig.lease_all("fault", rig.worker("b-fault", "n2"))
    assert compare(reference, rig.results("fault", COUNT)).ok


def test_pages_that_run_out_and_stop_strings_and_refusals(rig: Rig, specs: list[RequestSpec]) -> None:
    answer = next(
        json.loads(line)["response"]["body"]["choices"][0]["text"]
        for line in rig._lines("reference")
        if json.loads(line)["custom_id"] == "c1"
    )
    assert len(answer) > 20
    stop = answer[10:14]
    mixed = [
        spec(1, PROMPTS[0], rig.tokenizer, stop=(stop,)),
        spec(2, PROMPTS[1], rig.tokenizer, max_tokens=1),
        spec(3, "x" * 400, rig.tokenizer, max_tokens=200),  # can never fit in 20 pages
        *specs[3:],
    ]
    worker = rig.worker("mixed", "n1", num_pages=20)
    rig.submit("mixed", mixed)
    rig.lease_all("mixed", worker)
    lines = {json.loads(line)["custom_id"]: json.loads(line) for line in rig.results("mixed", COUNT)}
    stopped = lines["c1"]["response"]["body"]["choices"][0]
    assert (stopped["finish_reason"], stopped["text"]) == ("stop", answer[: answer.index(stop)])
    assert lines["c2"]["response"]["body"]["usage"]["completion_tokens"] == 1
    assert lines["c3"]["response"] is None and "pages" in lines["c3"]["error"]["message"]
    whole = {json.loads(line)["custom_id"]: json.loads(line) for line in rig._lines("reference")}
    for name in ("c4", "c5", "c6"):
        assert lines[name]["response"]["body"]["choices"] == whole[name]["response"]["body"]["choices"]
