from __future__ import annotations

from context_daemon.records import FencingToken, RequestKey, WorkerStatus
from context_daemon.store import LeasedRequest
from orchestrator.routing.leases import BeatWatch, LeaseObserver

KEY = RequestKey("job", 1)


def lease(tokens: int = 0, epoch: int = 1) -> LeasedRequest:
    return LeasedRequest(KEY, FencingToken(1, epoch), "w", tokens, 10, 100, "cpu", 0.0)


def worker(beat: int, holds: bool = True, epoch: int = 1) -> dict[str, WorkerStatus]:
    held = ((KEY.job_id, KEY.line, KEY.choice, epoch),) if holds else ()
    status = WorkerStatus("w", "n", "m", "cpu", beat, 1, 0, 8, 0, 100, 16, 512, 0.0, held, False, "ready", "l", 1)
    return {"w": status}


def test_a_silent_owner_loses_its_lease_after_one_lease_time() -> None:
    observer = LeaseObserver(lease_s=5.0, claim_s=1.0)
    assert observer.observe(0.0, [lease()], worker(1)).expired == []
    assert observer.observe(4.9, [lease()], worker(1)).expired == []
    assert observer.observe(5.1, [lease()], worker(1)).expired == [lease()]


def test_a_turning_loop_that_holds_it_renews() -> None:
    observer = LeaseObserver(5.0, 1.0)
    for second in range(0, 60, 4):
        assert observer.observe(float(second), [lease()], worker(second)).expired == []


def test_a_turning_loop_that_does_not_hold_it_does_not_renew() -> None:
    observer = LeaseObserver(5.0, 1.0)
    expired = [bool(observer.observe(float(s), [lease()], worker(s, holds=False)).expired) for s in range(8)]
    assert expired == [False] * 6 + [True] * 2


def test_progress_renews_without_any_heartbeat() -> None:
    observer = LeaseObserver(5.0, 1.0)
    for second in range(0, 60, 4):
        assert observer.observe(float(second), [lease(tokens=second)], {}).expired == []


def test_holding_an_older_epoch_proves_nothing() -> None:
    observer = LeaseObserver(5.0, 1.0)
    observer.observe(0.0, [lease(epoch=2)], worker(1, epoch=1))
    assert observer.observe(5.1, [lease(epoch=2)], worker(9, epoch=1)).expired


def test_after_an_outage_nobody_expires_for_one_lease_time() -> None:
    observer = LeaseObserver(5.0, 1.0)
    observer.observe(0.0, [lease()], worker(1))
    observer.start_over()  # the store was away for a minute
    assert observer.observe(60.0, [lease()], worker(1)).expired == []
    assert observer.observe(64.9, [lease()], worker(1)).expired == []
    assert observer.observe(65.1, [lease()], worker(1)).expired


def test_an_unclaimed_lease_is_told_again_at_intervals() -> None:
    observer = LeaseObserver(5.0, 1.0)
    told = [
        bool(observer.observe(at, [lease()], worker(int(at * 10), holds=False)).unclaimed)
        for at in (0.0, 0.5, 1.0, 1.5, 2.0)
    ]
    assert told == [False, False, True, False, True]


def test_finished_requests_leave_no_trace() -> None:
    observer = LeaseObserver(5.0, 1.0)
    observer.observe(0.0, [lease()], worker(1))
    observer.observe(1.0, [], worker(1))
    assert not observer._seen and not observer._told_at


def test_a_worker_whose_loop_does_not_turn_is_silent_until_it_does() -> None:
    watch = BeatWatch(silence_s=2.0)
    assert watch.silent(0.0, worker(7)) == set()
    assert watch.silent(1.9, worker(7)) == set()
    assert watch.silent(2.1, worker(7)) == {"w"}
    assert watch.silent(2.2, worker(8)) == set()


def test_silence_during_an_outage_means_nothing() -> None:
    watch = BeatWatch(silence_s=2.0)
    watch.silent(0.0, worker(7))
    watch.start_over()
    assert watch.silent(60.0, worker(7)) == set()
