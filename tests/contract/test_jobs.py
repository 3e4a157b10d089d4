from __future__ import annotations

import msgspec
import pytest
from store_samples import job_record, spec

from context_daemon.records import Finish, JobState, RequestKey, TokenCommit
from context_daemon.store import Conflict, ContextStore, LeaseRequest, StaleLeader, UnknownJob


async def started(store: ContextStore, job_id: str = "job", lines: int = 3) -> None:
    await store.create_job(job_record(job_id))
    await store.add_requests(job_id, [spec(line) for line in range(1, lines + 1)])
    await store.start_job(job_id, lines)


async def test_create_is_idempotent_under_the_first_id(store: ContextStore) -> None:
    first = await store.create_job(job_record("a", "req"))
    assert first.state is JobState.VALIDATING and first.created_at > 1e9 and first.metadata == {"who": "tést"}
    again = await store.create_job(job_record("b", "req"))
    assert again == first
    assert await store.find_job("req") == first
    assert await store.get_job("b") is None
    with pytest.raises(Conflict, match="req"):
        await store.create_job(job_record("c", "req", digest="other"))
    assert len(await store.list_jobs()) == 1


async def test_bad_ids_are_refused(store: ContextStore) -> None:
    with pytest.raises(ValueError, match="request_id"):
        await store.create_job(msgspec.structs.replace(job_record("a"), request_id=""))


async def test_requests_are_not_visible_before_the_start(store: ContextStore) -> None:
    await store.create_job(job_record("job"))
    await store.add_requests("job", [spec(2), spec(1)])
    await store.add_requests("job", [spec(2)])
    assert await store.ready_requests("job", 10) == []
    assert await store.active_jobs() == []
    assert await store.lease("job", 1, [LeaseRequest(RequestKey("job", 1), 0, "w", "c")]) == []
    with pytest.raises(ValueError, match="2 requests are there, not 3"):
        await store.start_job("job", 3)
    job = await store.start_job("job", 2)
    assert (job.state, job.total) == (JobState.IN_PROGRESS, 2)
    assert [r.key.line for r in await store.ready_requests("job", 10)] == [1, 2]
    assert await store.start_job("job", 2) == job
    assert [j.job_id for j in await store.active_jobs()] == ["job"]


async def test_line_order_is_numeric(store: ContextStore) -> None:
    await started(store, lines=12)
    assert [r.key.line for r in await store.ready_requests("job", 11)] == list(range(1, 12))
    assert await store.ready_requests("job", 0) == []


async def test_adding_after_the_start(store: ContextStore) -> None:
    await started(store)
    await store.add_requests("job", [spec(1)])  # a late repeat
    with pytest.raises(ValueError, match="no more requests"):
        await store.add_requests("job", [spec(4)])
    with pytest.raises(ValueError, match="no more requests"):
        await store.add_requests("job", [spec(1, prompt_tokens=3)])


async def test_failed_job_keeps_nothing(store: ContextStore) -> None:
    await store.create_job(job_record("job"))
    await store.add_requests("job", [spec(line) for line in range(1, 1202)])
    job = await store.fail_job("job", "line 7 is not JSON")
    assert (job.state, job.error) == (JobState.FAILED, "line 7 is not JSON")
    assert (await store.fail_job("job", "other")).error == "line 7 is not JSON"
    assert await store.get_request(RequestKey("job", 1)) is None
    assert await store.get_request(RequestKey("job", 1201)) is None
    with pytest.raises(ValueError, match="failed"):
        await store.start_job("job", 1201)
    await started(store, "other")
    with pytest.raises(ValueError, match="in_progress"):
        await store.fail_job("other", "too late")


async def test_listing_is_newest_first_and_active_oldest_first(store: ContextStore) -> None:
    for name in "abc":
        await started(store, name)
    assert [j.job_id for j in await store.list_jobs()] == ["c", "b", "a"]
    assert [j.job_id for j in await store.list_jobs(offset=1, limit=1)] == ["b"]
    assert [j.job_id for j in await store.active_jobs()] == ["a", "b", "c"]
    await store.cancel_job("b")
    assert await store.cancel_requests("b", 1) == 0
    await store.finish_job("b", 1)
    assert [j.job_id for j in await store.active_jobs()] == ["a", "c"]


async def test_cancel(store: ContextStore) -> None:
    await started(store, lines=5)
    (one, two) = await store.lease("job", 1, [LeaseRequest(RequestKey("job", n), 0, "w", "c") for n in (1, 2)])
    await store.commit([TokenCommit(one.key, one.token, 0, (1,), finish=Finish(True, b'{"done":1}'))])
    with pytest.raises(ValueError, match="cancel it first"):
        await store.cancel_requests("job", 1)
    assert (await store.cancel_job("job")).state is JobState.CANCELLING
    assert (await store.cancel_job("job")).state is JobState.CANCELLING
    assert await store.lease("job", 1, [LeaseRequest(RequestKey("job", 3), 0, "w", "c")]) == []
    assert (await store.finish_job("job", 1)).state is JobState.CANCELLING
    assert await store.cancel_requests("job", 1, limit=2) == 2
    assert await store.cancel_requests("job", 1) == 0
    (fenced,) = await store.commit([TokenCommit(two.key, two.token, 0, (1,), finish=Finish(True, b"{}"))])
    assert fenced.status == "fenced"
    job = await store.finish_job("job", 1)
    assert (job.state, job.completed, job.failed, job.total) == (JobState.CANCELLED, 1, 4, 5)
    assert await store.cancel_requests("job", 1) == 0
    assert (await store.cancel_job("job")).state is JobState.CANCELLED
    lines = await store.results("job", 0, 10)
    assert lines[0].payload == b'{"done":1}' and sorted(line.line for line in lines) == [1, 2, 3, 4, 5]
    error = msgspec.json.decode(lines[1].payload)
    assert error["error"]["code"] == "batch_cancelled" and error["custom_id"] == spec(lines[1].line).custom_id


async def test_results_resume_by_index(store: ContextStore) -> None:
    await started(store)
    for n in (2, 3, 1):
        (owner,) = await store.lease("job", 1, [LeaseRequest(RequestKey("job", n), 0, "w", "c")])
        payload = b'{"a:b":"\x00\xff\n%d"}' % n
        await store.commit([TokenCommit(owner.key, owner.token, 0, (n,), finish=Finish(n != 3, payload))])
    lines = await store.results("job", 0, 10)
    assert [(r.index, r.line, r.ok) for r in lines] == [(0, 2, True), (1, 3, False), (2, 1, True)]
    assert await store.results("job", 1, 1) == lines[1:2]
    assert await store.results("job", 3, 5) == [] and await store.results("job", 0, 0) == []
    job = await store.finish_job("job", 1)
    assert (job.state, job.completed, job.failed, job.output_tokens) == (JobState.COMPLETED, 2, 1, 3)
    assert await store.finish_job("job", 1) == job


async def test_a_replaced_leader_is_refused(store: ContextStore) -> None:
    await started(store)
    await store.lease("job", 5, [LeaseRequest(RequestKey("job", 1), 0, "w", "c")])
    wanted = LeaseRequest(RequestKey("job", 2), 0, "w", "c")
    with pytest.raises(StaleLeader, match="term 4"):
        await store.lease("job", 4, [wanted])
    with pytest.raises(StaleLeader):
        await store.finish_job("job", 4)
    with pytest.raises(StaleLeader):
        await store.fail_request(RequestKey("job", 2), 4, 0, b"{}")
    assert len(await store.lease("job", 5, [wanted])) == 1


async def test_unknown_jobs(store: ContextStore) -> None:
    for call in (store.start_job("no", 1), store.cancel_job("no"), store.finish_job("no", 1), store.fail_job("no", "x"),
                 store.add_requests("no", [spec(1)]), store.cancel_requests("no", 1)):  # fmt: skip
        with pytest.raises(UnknownJob):
            await call
    assert await store.get_job("no") is None and await store.find_job("no") is None
    assert await store.ready_requests("no", 5) == [] and await store.leased_requests("no") == []
    assert await store.results("no", 0, 5) == [] and await store.interruptions("no") == []


async def test_an_empty_job_completes(store: ContextStore) -> None:
    await store.create_job(job_record("job"))
    await store.start_job("job", 0)
    assert (await store.finish_job("job", 1)).state is JobState.COMPLETED
