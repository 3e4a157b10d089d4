from __future__ import annotations

import asyncio

import pytest
from store_samples import job_record, spec

from context_daemon.records import (
    CommitStatus,
    FencingToken,
    Finish,
    InterruptionCause,
    KVSegment,
    KVWatermark,
    Lease,
    RequestKey,
    RequestRecord,
    RequestState,
    ResumeReport,
    TokenCommit,
)
from context_daemon.store import ContextStore, LeaseRequest

KEY = RequestKey("job", 1)
OK, FENCED, GAP, DIVERGED = CommitStatus.OK, CommitStatus.FENCED, CommitStatus.GAP, CommitStatus.DIVERGED


async def started(store: ContextStore, lines: int = 3) -> None:
    await store.create_job(job_record("job"))
    await store.add_requests("job", [spec(line) for line in range(1, lines + 1)])
    await store.start_job("job", lines)


async def take(store: ContextStore, worker: str = "w1", epoch: int = 0, cls: str = "c", exact: bool = True) -> Lease:
    (lease,) = await store.lease("job", 1, [LeaseRequest(KEY, epoch, worker, cls, exact)])
    return lease


async def put(
    store: ContextStore, lease: Lease, position: int, *tokens: int, **more: object
) -> tuple[CommitStatus, int]:
    (result,) = await store.commit([TokenCommit(lease.key, lease.token, position, tokens, **more)])  # type: ignore[arg-type]
    return result.status, result.length


async def read(store: ContextStore) -> RequestRecord:
    record = await store.get_request(KEY)
    assert record is not None
    return record


async def test_lease_and_its_repeat(store: ContextStore) -> None:
    await started(store)
    lease = await take(store)
    assert lease == Lease(KEY, FencingToken(1, 1), "w1")
    wanted = LeaseRequest(KEY, 0, "w1", "c")
    assert await store.lease("job", 1, [wanted]) == [lease]
    assert await store.lease("job", 1, [LeaseRequest(KEY, 0, "w2", "c")]) == []
    assert await store.lease("job", 1, [LeaseRequest(RequestKey("job", 99), 0, "w2", "c")]) == []
    await put(store, lease, 0, 5)
    assert await store.lease("job", 1, [wanted]) == []
    (row,) = await store.leased_requests("job")
    assert (row.key, row.token, row.worker_id, row.tokens, row.prompt_tokens, row.max_tokens, row.numerics_class) == (
        KEY, lease.token, "w1", 1, 10, 50, "c",
    )  # fmt: skip
    with pytest.raises(ValueError, match="not of job"):
        await store.lease("job", 1, [LeaseRequest(RequestKey("other", 1), 0, "w1", "c")])


async def test_commit_repeat_gap_divergence(store: ContextStore) -> None:
    await started(store)
    lease = await take(store)
    assert await put(store, lease, 0, 5, 6, 7) == (OK, 3)
    assert await put(store, lease, 0, 5, 6, 7) == (OK, 3)
    assert await put(store, lease, 1, 6) == (OK, 3)
    assert await put(store, lease, 2, 7, 8) == (OK, 4)
    assert await put(store, lease, 5, 9) == (GAP, 4)
    assert await put(store, lease, 3, 9) == (DIVERGED, 4)
    assert await put(store, lease, 2, 9, 8, 10) == (DIVERGED, 4)
    assert await put(store, lease, 4) == (OK, 4)
    assert await put(store, lease, 4, -1, 2**31 - 1) == (OK, 6)
    record = await read(store)
    assert record.tokens == (5, 6, 7, 8, -1, 2**31 - 1) and record.spec == spec(1)
    job = await store.get_job("job")
    assert job is not None and job.output_tokens == 6
    with pytest.raises(ValueError, match="negative"):
        await put(store, lease, -1, 1)


async def test_stale_and_future_owners_are_fenced(store: ContextStore) -> None:
    await started(store)
    lease = await take(store)
    for token in (FencingToken(1, 0), FencingToken(1, 2), FencingToken(0, 1), FencingToken(2, 1)):
        assert await put(store, Lease(KEY, token, "w1"), 0, 5) == (FENCED, 0)
    assert await put(store, Lease(RequestKey("gone", 1), lease.token, "w1"), 0, 5) == (FENCED, 0)
    assert store.ahead_commits == 3  # type: ignore[attr-defined]
    assert (await read(store)).tokens == ()


async def test_one_batch_of_several_jobs_keeps_its_order(store: ContextStore) -> None:
    leases = []
    for name in ("a", "b"):
        await store.create_job(job_record(name))
        await store.add_requests(name, [spec(1), spec(2)])
        await store.start_job(name, 2)
        leases += await store.lease(name, 1, [LeaseRequest(RequestKey(name, n), 0, "w", "c") for n in (1, 2)])
    order = [leases[i] for i in (0, 2, 1, 3)]
    results = await store.commit([TokenCommit(at.key, at.token, 0, (1,) * n) for n, at in enumerate(order, 1)])
    assert [(r.key, r.length) for r in results] == [(at.key, n) for n, at in enumerate(order, 1)]
    assert await store.commit([]) == []


async def test_finish_once(store: ContextStore) -> None:
    await started(store)
    lease = await take(store)
    finish = Finish(True, b'{"n":1}')
    assert await put(store, lease, 0, 5, 6) == (OK, 2)
    assert await put(store, lease, 0, 5, finish=finish) == (DIVERGED, 2)  # would cut tokens that are there
    assert await put(store, lease, 1, 6, 7, finish=finish) == (OK, 3)
    assert await put(store, lease, 1, 6, 7, finish=finish) == (OK, 3)
    assert await put(store, lease, 1, 6) == (OK, 3)
    assert await put(store, lease, 3, 8) == (FENCED, 3)
    assert await put(store, lease, 3, finish=Finish(True, b'{"n":2}')) == (DIVERGED, 3)
    assert await put(store, lease, 3, finish=Finish(False, b'{"n":1}')) == (DIVERGED, 3)
    assert [r.payload for r in await store.results("job", 0, 9)] == [b'{"n":1}']
    assert (await read(store)).state is RequestState.COMPLETED
    assert await store.leased_requests("job") == []
    assert await store.requeue("job", 1, [(KEY, lease.token)], InterruptionCause.WORKER_DIED) == 0


async def test_requeue_fences_at_once_and_counts_blame(store: ContextStore) -> None:
    await started(store)
    lease = await take(store)
    await put(store, lease, 0, 5)
    moved = [(KEY, lease.token), (RequestKey("job", 99), lease.token)]
    other = [(KEY, FencingToken(2, 1)), (KEY, FencingToken(1, 0)), (KEY, FencingToken(1, 2))]
    assert await store.requeue("job", 1, other, InterruptionCause.NODE_LOST) == 0
    assert await store.requeue("job", 1, moved, InterruptionCause.NODE_LOST) == 1
    assert await store.requeue("job", 1, moved, InterruptionCause.NODE_LOST) == 1  # the reply was lost
    assert await put(store, lease, 1, 6) == (FENCED, 1)
    (row, *_) = await store.ready_requests("job", 1)
    assert (row.key, row.epoch, row.tokens, row.avoid_worker, row.numerics_class) == (KEY, 2, 1, "w1", "c")
    assert (row.attempts, row.interruptions) == (0, 1)
    second = await take(store, "w2", 2)
    assert second.token == FencingToken(1, 3)
    assert await store.requeue("job", 1, moved, InterruptionCause.NODE_LOST) == 0
    await store.requeue("job", 1, [(KEY, second.token)], InterruptionCause.ENGINE_FAULT)
    record = await read(store)
    assert (record.attempts, record.interruptions, record.state) == (1, 1, RequestState.READY)


async def test_fail_request(store: ContextStore) -> None:
    await started(store)
    assert not await store.fail_request(KEY, 1, 3, b"{}")
    assert await store.fail_request(KEY, 1, 0, b'{"e":1}')
    assert await store.fail_request(KEY, 1, 0, b'{"e":1}')
    assert [(r.ok, r.payload) for r in await store.results("job", 0, 9)] == [(False, b'{"e":1}')]
    assert not await store.fail_request(RequestKey("job", 99), 1, 0, b"{}")
    (lease,) = await store.lease("job", 1, [LeaseRequest(RequestKey("job", 2), 0, "w", "c")])
    assert not await store.fail_request(lease.key, 1, 1, b"{}")


async def test_handover_to_a_target(store: ContextStore) -> None:
    await started(store)
    lease = await take(store)
    await put(store, lease, 0, 5, 6)
    assert await store.handover(KEY, lease.token, 3, None, "w2", InterruptionCause.NOTICE) is None
    assert await store.handover(KEY, FencingToken(1, 0), 2, None, "w2", InterruptionCause.NOTICE) is None
    mark = KVWatermark(11, 0, "lay")
    moved = await store.handover(KEY, lease.token, 2, mark, "w2", InterruptionCause.NOTICE)
    assert moved == Lease(KEY, FencingToken(1, 2), "w2")
    assert await put(store, lease, 2, 7) == (FENCED, 2)
    assert await put(store, moved, 2, 7) == (OK, 3)
    assert await store.handover(KEY, lease.token, 2, mark, "w2", InterruptionCause.NOTICE) == moved
    assert await store.handover(KEY, lease.token, 2, mark, "w3", InterruptionCause.NOTICE) is None
    record = await read(store)
    assert (record.watermark, record.segments, record.interruptions) == (11, (KVSegment(1, 0),), 1)
    assert len(await store.interruptions("job")) == 1


async def test_handover_back_to_the_queue(store: ContextStore) -> None:
    await started(store)
    lease = await take(store)
    back = await store.handover(KEY, lease.token, 0, None, "", InterruptionCause.NOTICE)
    assert back == Lease(KEY, FencingToken(1, 2), "")
    assert await store.handover(KEY, lease.token, 0, None, "", InterruptionCause.NOTICE) == back
    assert (await store.ready_requests("job", 1))[0].avoid_worker == "w1"
    assert (await read(store)).interruptions == 1


async def test_no_handover_to_a_target_in_a_cancelled_job(store: ContextStore) -> None:
    await started(store)
    lease = await take(store)
    await store.cancel_job("job")
    assert await store.handover(KEY, lease.token, 0, None, "w2", InterruptionCause.NOTICE) is None
    await store.cancel_requests("job", 1)
    assert await store.handover(KEY, lease.token, 0, None, "", InterruptionCause.NOTICE) is None


async def test_watermark(store: ContextStore) -> None:
    await started(store)
    lease = await take(store)

    async def mark(at: Lease, positions: int, first_page: int = 0, layout: str = "lay") -> RequestRecord:
        length = len((await read(store)).tokens)
        assert (await put(store, at, length, watermark=KVWatermark(positions, first_page, layout)))[0] is OK
        return await read(store)

    assert (await mark(lease, 16)).watermark == 9  # prompt of 10, nothing generated: at most T-1
    await put(store, lease, 0, *range(30))
    assert (await mark(lease, 33)).watermark == 33
    assert (await mark(lease, 20)).watermark == 33
    assert (await mark(lease, 99)).watermark == 39
    await store.requeue("job", 1, [(KEY, lease.token)], InterruptionCause.WORKER_DIED)
    second = await take(store, "w2", 2)
    record = await mark(second, 35, first_page=2)  # found less than was there, wrote from page 2 on
    assert (record.watermark, record.segments) == (35, (KVSegment(1, 0), KVSegment(3, 2)))
    assert (await mark(second, 36, first_page=5)).segments == (KVSegment(1, 0), KVSegment(3, 2))
    assert (await mark(second, 36, first_page=1)).segments == (KVSegment(1, 0), KVSegment(3, 1))
    assert (await mark(second, 36, first_page=0)).segments == (KVSegment(3, 0),)
    other = await mark(second, 20, first_page=1, layout="other")
    assert (other.watermark, other.segments, other.layout) == (0, (KVSegment(3, 1),), "other")  # a hole before page 1
    assert (await mark(second, 20, first_page=0, layout="other")).watermark == 20


async def test_classes_and_exactness(store: ContextStore) -> None:
    await started(store)
    lease = await take(store, cls="a")
    assert (await read(store)).numerics_class == ""
    await put(store, lease, 0, 5)
    record = await read(store)
    assert (record.numerics_class, record.exact) == ("a", True)
    await store.requeue("job", 1, [(KEY, lease.token)], InterruptionCause.WORKER_DIED)
    second = await take(store, "w2", 2, cls="b", exact=False)
    await put(store, second, 1, 6)
    record = await read(store)
    assert (record.numerics_class, record.exact, record.tokens) == ("b", False, (5, 6))
    await store.requeue("job", 1, [(KEY, second.token)], InterruptionCause.WORKER_DIED)
    await take(store, "w3", 4, cls="b")
    assert not (await read(store)).exact  # for good


async def test_recovery_table(store: ContextStore) -> None:
    await started(store)
    lease = await take(store)
    await put(store, lease, 0, 5, 6, watermark=KVWatermark(10, 0, "lay"))
    await store.requeue("job", 1, [(KEY, lease.token)], InterruptionCause.LEASE_EXPIRED)
    (row,) = await store.interruptions("job")
    assert (row.line, row.custom_id, row.epoch, row.cause) == (1, spec(1).custom_id, 3, InterruptionCause.LEASE_EXPIRED)
    assert (row.source, row.target, row.tokens, row.watermark, row.prompt_tokens) == ("w1", "", 2, 10, 10)
    assert row.queue_ms is None and row.gap_ms is None and row.recomputed_tokens is None
    second = await take(store, "w2", 2)
    await put(store, second, 2, watermark=KVWatermark(10, 0, "lay"))
    assert (await store.interruptions("job"))[0].gap_ms is None  # no token yet
    report = ResumeReport(1, 10, 0.0, 2.5, "store")
    for _ in range(2):
        await put(store, second, 2, 7, resume=report)
    (row,) = await store.interruptions("job")
    assert row.target == "w2" and row.queue_ms is not None and row.gap_ms is not None
    assert row.gap_ms >= row.detect_ms + row.queue_ms >= 0
    assert (row.recomputed_tokens, row.restored_positions, row.restore_ms, row.recompute_ms) == (1, 10, 0.0, 2.5)
    gap = row.gap_ms
    await put(store, second, 3, 8)
    assert (await store.interruptions("job"))[0].gap_ms == gap
    await store.handover(KEY, second.token, 4, None, "w3", InterruptionCause.NOTICE)
    rows = await store.interruptions("job")
    assert [(r.epoch, r.source, r.target, r.tokens) for r in rows] == [(3, "w1", "w2", 2), (4, "w2", "w3", 4)]
    assert rows[1].queue_ms == 0.0


async def test_an_owner_without_a_commit_is_timed_from_its_lease(store: ContextStore) -> None:
    await started(store)
    lease = await take(store)
    await put(store, lease, 0, 5)
    await asyncio.sleep(0.3)
    moved = await store.handover(KEY, lease.token, 1, None, "w2", InterruptionCause.NOTICE)
    assert moved is not None
    await store.requeue("job", 1, [(KEY, moved.token)], InterruptionCause.WORKER_DIED)
    third = await take(store, "w3", 3)
    await store.requeue("job", 1, [(KEY, third.token)], InterruptionCause.WORKER_DIED)
    first, *later = await store.interruptions("job")
    assert first.detect_ms >= 300 and [row.epoch for row in later] == [4, 6]
    assert all(row.detect_ms < 250 for row in later)


async def test_a_new_incarnation_fences_every_owner(store: ContextStore) -> None:
    await started(store)
    lease = await take(store)
    await put(store, lease, 0, 5)
    assert await store.incarnation() == 1
    assert await store.bump_incarnation(1) == 2
    assert await store.bump_incarnation(1) == 2
    assert await put(store, lease, 1, 6) == (FENCED, 1)
    assert await store.handover(KEY, lease.token, 1, None, "w2", InterruptionCause.NOTICE) is None
    assert await store.requeue("job", 1, [(KEY, lease.token)], InterruptionCause.WORKER_DIED) == 1
    second = await take(store, "w1", 2)
    assert second.token == FencingToken(2, 3)
    assert await put(store, second, 1, 6) == (OK, 2)


async def test_a_lease_says_that_it_is_a_suspects(store: ContextStore) -> None:
    """Suspects run alone: who looks at the leases must see them."""
    await started(store)
    await store.requeue("job", 1, [(KEY, (await take(store)).token)], InterruptionCause.ENGINE_FAULT)
    await take(store, epoch=2)
    assert [leased.attempts for leased in await store.leased_requests("job")] == [1]
