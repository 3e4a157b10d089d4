"""What goes wrong between two threads or two messages of a worker, made to happen on real parts."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from context_daemon.client import ContextClient
from context_daemon.kv_writer import Announced
from context_daemon.records import (
    CommitResult,
    DrainTarget,
    InterruptionCause,
    Lease,
    Notice,
    NoticeKind,
    RequestKey,
    RequestSpec,
    TokenCommit,
)
from context_daemon.restore_stream import RestoreStream
from context_daemon.store import ContextStore, LeaseRequest, StoreUnavailable
from orchestrator.verify import compare
from tests.contract.worker_rig import PROMPTS, Gate, Rig, Worker, keys, spec, until
from tests.unit.tiny_model import write_tiny_model
from worker.engine.engine import TorchEngine
from worker.engine.protocol import EngineFault, StepOutput

COUNT = len(PROMPTS)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("races")
    with Rig(folder, write_tiny_model(folder / "tiny")) as made:
        yield made


@pytest.fixture(scope="module")
def specs(rig: Rig) -> list[RequestSpec]:
    return rig.specs()


@pytest.fixture(scope="module")
def reference(rig: Rig, specs: list[RequestSpec]) -> list[bytes]:
    worker = rig.worker("reference", "n1")
    commits = Commits(worker)
    rig.submit("reference", specs)
    rig.lease_all("reference", worker)
    lines = rig.results("reference", COUNT)
    rig.retire(worker)
    assert {c.finish is not None for c in commits.seen if c.position + len(c.tokens) == 90} == {True}, (
        "no commit carried a last token without the end"
    )
    return lines


class Commits:
    """Stands between a worker's committer and its daemon: records, delays, or loses the replies of what was done."""

    def __init__(self, worker: Worker) -> None:
        self._commit = worker.client.commit
        self.seen: list[TokenCommit] = []
        self.delay_s = 0.0
        self.lose_replies_until = 0.0
        self.lost = 0
        worker.client.commit = self._send  # type: ignore[method-assign]

    def _send(self, commits: Sequence[TokenCommit]) -> list[CommitResult]:
        self.seen += commits
        results = self._commit(commits)
        time.sleep(self.delay_s)
        if time.monotonic() < self.lose_replies_until:
            self.lost += 1
            raise StoreUnavailable("the reply was lost")
        return results


def started(rig: Rig, job_id: str, specs: Sequence[RequestSpec], tokens: int, **engine: Any) -> Worker:
    worker = rig.worker(f"a-{job_id}", "n1", **engine)
    rig.submit(job_id, specs)
    rig.lease_all(job_id, worker)
    rig.wait_tokens(job_id, tokens)
    return worker


class NoticeTo:
    """A notice to n1 for the length of a `with`; `worker` takes no step until it has heard of it."""

    def __init__(self, rig: Rig, seconds: float, worker: Worker | None = None) -> None:
        self._worker = worker
        self._client = ContextClient(rig.addresses["n1"])
        self.notice = Notice("n1", NoticeKind.TERMINATE, time.time() + seconds, "test")

    def __enter__(self) -> NoticeTo:
        gate = Gate()
        if self._worker is not None:
            gate.close(self._worker)
        self._client.raise_notice(self.notice)
        if self._worker is not None:
            heard_by = self._worker.runtime
            until(lambda: heard_by.status().draining, "the notice to be heard")
        gate.opened.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._client.withdraw_notice(self.notice.id)
        self._client.close()


def drained(worker: Worker) -> None:
    until(lambda: worker.runtime.status().state == "drained", "the drain")


def test_a_lease_lost_and_won_again_by_the_same_worker(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes]
) -> None:
    worker = started(rig, "again", specs, 60)
    for _ in range(3):
        gate = Gate()
        gate.close(worker)
        rig.requeue("again", InterruptionCause.LEASE_EXPIRED)
        rig.lease_all("again", worker)  # its engine still holds the old ones
        gate.opened.set()
        time.sleep(0.1)
    assert compare(reference, rig.results("again", COUNT)).ok
    assert worker.deaths == [], "an engine that meets a request again does not break"
    until(lambda: not worker.runtime.status().held, "nothing is left behind")
    assert worker.engine.capacity.pages_used == 0


def test_a_late_word_of_an_old_lease_changes_nothing(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes]
) -> None:
    worker = rig.worker("a-late", "n1")
    rig.submit("late", specs)
    old = rig.lease_all("late", worker)
    rig.wait_tokens("late", 30)
    rig.requeue("late", InterruptionCause.LEASE_EXPIRED)
    new = rig.lease_all("late", worker)
    until(lambda: sorted(h[3] for h in worker.runtime.status().held) == [3] * COUNT, "the new leases to be taken in")
    for _ in range(3):
        worker.runtime.admit(old)
        worker.runtime.admit(new)
    assert {h[3] for h in worker.runtime.status().held} <= {3}
    assert compare(reference, rig.results("late", COUNT)).ok and worker.deaths == []


def test_a_hand_over_meets_a_commit_whose_reply_was_lost(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes]
) -> None:
    source = started(rig, "lost", specs, 60)
    target = rig.worker("b-lost", "n2")
    source.runtime.set_targets(dict.fromkeys(keys("lost", COUNT), DrainTarget(target.name)))
    commits = Commits(source)
    commits.lose_replies_until = time.monotonic() + 1.0  # the store has tokens that the worker does not know it has
    until(lambda: commits.lost, "a reply to be lost")
    with NoticeTo(rig, 0.1, source):
        drained(source)
        until(lambda: len(source.notified) == COUNT, "each to be moved, none left to run out")
        target.runtime.admit(source.notified)
        assert compare(reference, rig.results("lost", COUNT)).ok
    assert {row.cause for row in rig.interruptions("lost")} == {InterruptionCause.NOTICE}


def test_kv_writes_that_fail_during_the_hand_over_are_made_again(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes]
) -> None:
    source = started(rig, "kvaway", specs, 60)
    announce, back = source.client.announce, threading.Event()

    def away(*args: Any) -> Announced:
        if not back.is_set():
            raise StoreUnavailable("no daemon")
        return announce(*args)

    source.client.announce = away  # type: ignore[method-assign]
    with NoticeTo(rig, 1.2, source):  # no time to finish, but some to flush
        until(lambda: all(held.frozen for held in source.runtime._ledger.all()), "the freeze")
        back.set()
        drained(source)
        assert source.deaths == []
        rig.lease_all("kvaway", rig.worker("b-kvaway", "n2"))
        assert compare(reference, rig.results("kvaway", COUNT)).ok
    rows = rig.interruptions("kvaway")
    assert rows and all(row.recomputed_tokens == 0 for row in rows)


def test_a_kv_store_that_is_gone_for_good_costs_kv_and_not_the_hand_over(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes]
) -> None:
    source = started(rig, "kvgone", specs, 60)

    def gone(*args: Any) -> Announced:
        raise StoreUnavailable("no daemon")

    source.client.announce = gone  # type: ignore[method-assign]
    with NoticeTo(rig, 1.2, source):
        until(lambda: all(held.frozen for held in source.runtime._ledger.all()), "the freeze")
        rig.submit("beside", [spec(1, "and more", rig.tokenizer)])
        rig.lease_all("beside", source)  # the loop steps, and exports, beside the frozen ones
        drained(source)
        assert source.deaths == []
        rig.lease_all("kvgone", rig.worker("b-kvgone", "n2"))
        assert compare(reference, rig.results("kvgone", COUNT)).ok
    assert rig.interruptions("kvgone"), "something was left to hand over"


def test_a_target_that_cannot_be_told_does_not_end_the_source(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes]
) -> None:
    source = started(rig, "untold", specs, 60)
    target = rig.worker("b-untold", "n2")
    heard: list[Lease] = []

    def broken(lease: Lease) -> None:
        heard.append(lease)
        raise ConnectionError("the target's node is cut off")

    source.runtime._handovers._notify = broken
    source.runtime.set_targets(dict.fromkeys(keys("untold", COUNT), DrainTarget(target.name)))
    with NoticeTo(rig, 0.3, source):
        drained(source)
        assert source.deaths == [] and len(heard) == COUNT
        target.runtime.admit(heard)  # the router does, when nobody claims them
        assert compare(reference, rig.results("untold", COUNT)).ok


@pytest.mark.parametrize("seconds", [0.4, -5.0], ids=["soon", "past"])
def test_a_notice_while_requests_are_being_restored(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes], seconds: float
) -> None:
    job_id = f"restoring{seconds}"
    first = started(rig, job_id, specs, 60)
    rig.retire(first)
    rig.requeue(job_id)
    second = rig.worker(f"b-{job_id}", "n1")
    restoring, turns = second.client.restoring, itertools.count()

    @contextmanager
    def slow(*args: Any, **kwargs: Any) -> Iterator[RestoreStream]:
        with restoring(*args, **kwargs) as stream:
            time.sleep(0.8 if next(turns) < 4 else 1.6)  # after the drain has begun, and after the deadline
            yield stream

    second.client.restoring = slow  # type: ignore[method-assign]
    rig.lease_all(job_id, second)
    with NoticeTo(rig, seconds):
        drained(second)
        assert second.deaths == [] and rig.store(lambda store: store.leased_requests(job_id)) == []
        rig.lease_all(job_id, rig.worker(f"c-{job_id}", "n2"))
        assert compare(reference, rig.results(job_id, COUNT)).ok
    by_notice = [row for row in rig.interruptions(job_id) if row.cause is InterruptionCause.NOTICE]
    assert len(by_notice) == COUNT
    # Not one step may have been made in between: then the crash's missing slots are still missing.
    assert all((row.recomputed_tokens or 0) < 16 for row in by_notice)


class Breaks(TorchEngine):
    """The real engine, made to break in the step after it was armed."""

    armed: threading.Event
    suspects: tuple[RequestKey, ...]

    def step(self) -> StepOutput:
        if self.armed.is_set():
            raise EngineFault("broken on purpose", self.suspects)
        return super().step()


def breakable(engine: TorchEngine, *suspects: RequestKey) -> TorchEngine:
    engine.__class__ = Breaks
    assert isinstance(engine, Breaks)
    engine.armed, engine.suspects = threading.Event(), suspects
    return engine


def test_a_fault_with_commits_on_their_way_still_blames_its_suspects(
    rig: Rig, specs: list[RequestSpec], reference: list[bytes]
) -> None:
    guilty = RequestKey("blame", 4)
    worker = rig.worker("a-blame", "n1", wrap=lambda engine: breakable(engine, guilty))
    commits = Commits(worker)
    rig.submit("blame", specs)
    rig.lease_all("blame", worker)
    rig.wait_tokens("blame", 60)
    commits.delay_s = 0.4  # what is committed is not yet known to be
    time.sleep(0.2)
    assert isinstance(worker.engine, Breaks)
    worker.engine.armed.set()
    until(lambda: worker.deaths, "the worker to die")
    assert len(worker.deaths) == 1
    ready = rig.store(lambda store: store.ready_requests("blame", 100))
    assert {r.key.line: r.attempts for r in ready} == {line: int(line == 4) for line in range(1, COUNT + 1)}
    rig.lease_all("blame", rig.worker("b-blame", "n2"))
    assert compare(reference, rig.results("blame", COUNT)).ok


def by_a_ghost(rig: Rig, job_id: str, tokens: Sequence[int]) -> None:
    """Line 1's owner commits `tokens` and dies before it says that they are all."""

    async def haunt(store: ContextStore) -> None:
        (lease,) = await store.lease(job_id, 1, [LeaseRequest(RequestKey(job_id, 1), 0, "ghost", "")])
        await store.commit([TokenCommit(lease.key, lease.token, 0, tuple(tokens))])
        await store.requeue(job_id, 1, [(lease.key, lease.token)], InterruptionCause.WORKER_DIED)

    rig.store(haunt)


@pytest.mark.parametrize(
    ("name", "changes", "tokens", "expected"),
    [
        ("max-tokens", {"max_tokens": 5}, 5, "length"),
        ("max-model-len", {"max_tokens": 400}, 64 - len(PROMPTS[0]), "length"),
        ("stop-string", {"stop": ("bb",)}, 7, "stop"),
    ],
)
def test_an_owner_that_died_between_the_last_token_and_the_end(
    rig: Rig, name: str, changes: dict[str, Any], tokens: int, expected: str
) -> None:
    asked = spec(1, PROMPTS[0], rig.tokenizer, **changes)
    rig.submit(name, [asked])
    text = "a" * (tokens - 2) + "bb"
    by_a_ghost(rig, name, rig.tokenizer.encode_prompt(text))
    worker = rig.worker(f"a-{name}", "n1", max_model_len=64)
    rig.lease_all(name, worker)
    (line,) = rig.results(name, 1)
    (choice,) = json.loads(line)["response"]["body"]["choices"]
    shown = text if expected == "length" else text[:-2]
    assert (choice["finish_reason"], choice["text"]) == (expected, shown)
    assert worker.deaths == []
