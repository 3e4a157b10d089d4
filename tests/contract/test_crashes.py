"""A process that dies, or a connection that breaks, between any two round trips of one call: readers stay well, and the
repeat of the call leaves what an undisturbed one leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from store_samples import job_record, spec

from context_daemon.records import FencingToken, JobRecord, JobState, RequestKey, TokenCommit
from context_daemon.redis_script import Arg, connect
from context_daemon.redis_server import EmbeddedServers
from context_daemon.redis_store import RedisStore
from context_daemon.store import LeaseRequest, StoreUnavailable

Act = Callable[[RedisStore], Awaitable[Any]]


class BreakingStore(RedisStore):
    """Raises at the n-th round trip: before it ran (`lost_reply=False`) or after it ran."""

    def __init__(self, url: str, at: int, lost_reply: bool) -> None:
        super().__init__(url)
        self._left, self._lost_reply, self.broke = at, lost_reply, False

    async def _trip(self, run: Callable[[], Awaitable[Any]]) -> Any:
        self._left -= 1
        if self._left == 0 and not self._lost_reply:
            self.broke = True
            raise StoreUnavailable("cut before the call")
        answer = await run()
        if self._left == 0:
            self.broke = True
            raise StoreUnavailable("cut before the reply")
        return answer

    async def _command(self, *args: Arg) -> Any:
        return await self._trip(lambda: super(BreakingStore, self)._command(*args))

    async def _pipeline(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        run = super()._pipeline
        answer: list[Any] = await self._trip(lambda: run(commands))
        return answer


async def nothing(store: RedisStore) -> None: ...


async def validating(store: RedisStore) -> None:
    await store.create_job(job_record("job"))
    await store.add_requests("job", [spec(line) for line in range(1, 4)])


async def many_validating(store: RedisStore) -> None:
    await store.create_job(job_record("job"))
    await store.add_requests("job", [spec(line) for line in range(1, 1202)])


async def running(store: RedisStore) -> None:
    await validating(store)
    await store.start_job("job", 3)
    (lease,) = await store.lease("job", 1, [LeaseRequest(RequestKey("job", 1), 0, "w", "c")])
    await store.commit([TokenCommit(lease.key, lease.token, 0, (1, 2))])


async def cancelling(store: RedisStore) -> None:
    await running(store)
    await store.cancel_job("job")


async def cancelled_lines(store: RedisStore) -> None:
    await cancelling(store)
    await store.cancel_requests("job", 1)


ACTS: dict[str, tuple[Act, Act]] = {
    "create": (nothing, lambda s: s.create_job(job_record("job"))),
    "add": (
        lambda s: s.create_job(job_record("job")),
        lambda s: s.add_requests("job", [spec(n) for n in range(1, 1100)]),
    ),
    "start": (validating, lambda s: s.start_job("job", 3)),
    "fail": (many_validating, lambda s: s.fail_job("job", "bad line")),
    "cancel": (running, lambda s: s.cancel_job("job")),
    "cancel_requests": (cancelling, lambda s: s.cancel_requests("job", 1)),
    "finish": (cancelled_lines, lambda s: s.finish_job("job", 1)),
    "bump": (running, lambda s: s.bump_incarnation(1)),
    "lease": (running, lambda s: s.lease("job", 1, [LeaseRequest(RequestKey("job", 2), 0, "w", "c")])),
    "commit": (running, lambda s: s.commit([TokenCommit(RequestKey("job", 1), FencingToken(1, 1), 2, (3,))])),
}


def _still(job: JobRecord) -> JobRecord:
    return msgspec.structs.replace(job, created_at=0.0, started_at=0.0, finished_at=0.0)


async def picture(store: RedisStore) -> Any:
    """Everything a reader can see, without instants."""
    jobs = [_still(job) for job in await store.list_jobs()]
    requests = [await store.get_request(RequestKey("job", line)) for line in (1, 2, 3, 1000)]
    ready = [msgspec.structs.replace(r, ready_since=0.0) for r in await store.ready_requests("job", 2000)]
    found = await store.find_job("req-job")
    return (
        jobs, [_still(job) for job in await store.active_jobs()], found and _still(found), requests, ready,
        await store.results("job", 0, 99), await store.incarnation(),
    )  # fmt: skip


@pytest.fixture
async def plain(servers: EmbeddedServers) -> AsyncIterator[RedisStore]:
    made = RedisStore(servers.durable.url)
    yield made
    await made.close()


async def wipe(servers: EmbeddedServers) -> None:
    client = connect(servers.durable.url, 2.0)
    await client.flushall()
    await client.aclose()


@pytest.mark.parametrize("lost_reply", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", list(ACTS))
async def test_a_break_at_any_round_trip(
    servers: EmbeddedServers, plain: RedisStore, name: str, lost_reply: bool
) -> None:
    prepare, act = ACTS[name]
    await wipe(servers)
    await prepare(plain)
    expected_answer = await act(plain)
    expected = await picture(plain)
    for at in range(1, 20):
        await wipe(servers)
        await prepare(plain)
        broken = BreakingStore(servers.durable.url, at, lost_reply)
        try:
            await act(broken)
        except StoreUnavailable:
            assert broken.broke
        await broken.close()
        if not broken.broke:
            assert at > 1
            return
        await picture(plain)  # readers tolerate what dangles
        answer = await act(plain)
        if isinstance(answer, JobRecord):
            assert _still(answer) == _still(expected_answer)
        else:
            assert answer == expected_answer
        assert await picture(plain) == expected
    raise AssertionError("the call never ended")


async def test_another_payload_may_take_a_claim_that_never_became_a_job(
    servers: EmbeddedServers, plain: RedisStore
) -> None:
    await wipe(servers)
    broken = BreakingStore(servers.durable.url, 3, lost_reply=False)
    with pytest.raises(StoreUnavailable):
        await broken.create_job(job_record("first", "req"))
    await broken.close()
    assert await plain.find_job("req") is None and await plain.list_jobs() == []
    job = await plain.create_job(job_record("second", "req", digest="other"))
    assert (job.job_id, job.state, job.input_digest) == ("first", JobState.VALIDATING, "other")


async def test_indexes_can_be_rebuilt(servers: EmbeddedServers, plain: RedisStore) -> None:
    await wipe(servers)
    await running(plain)
    before = await picture(plain)
    client = connect(servers.durable.url, 2.0)
    await client.delete("to:jobs", "to:active", "to:reqid:req-job")
    await client.aclose()
    assert await plain.active_jobs() == []
    assert await plain.rebuild_indexes() == 1
    assert await picture(plain) == before


async def test_a_flushed_script_cache_is_filled_again(servers: EmbeddedServers, plain: RedisStore) -> None:
    await wipe(servers)
    await running(plain)
    client = connect(servers.durable.url, 2.0)
    await client.script_flush()
    await client.aclose()
    (result,) = await plain.commit([TokenCommit(RequestKey("job", 1), FencingToken(1, 1), 2, (3,))])
    assert result.length == 3
