"""A durable store that comes back without writes that it had acknowledged: real servers, their append-only files cut."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import pytest
from append_only import configure, lose, lose_all, size, write_at_once
from daemon_rig import LAYOUT, Daemon, lease, restore, start_job

from context_daemon import keys
from context_daemon.client import ContextClient, NotOwner
from context_daemon.records import CommitStatus, FencingToken, InterruptionCause, RequestKey, TokenCommit
from context_daemon.redis_script import connect
from context_daemon.redis_server import EmbeddedServers
from context_daemon.redis_store import RedisStore
from context_daemon.store import StoreRefusesWrites, StoreUnavailable
from context_daemon.write_mark import WriteMark

T = TypeVar("T")
KEY = RequestKey("job", 1)
FENCED, OK = CommitStatus.FENCED, CommitStatus.OK


@pytest.fixture(autouse=True)
async def clean(servers: EmbeddedServers) -> None:
    client = connect(servers.durable.url, 2.0)
    await client.flushall()
    await client.aclose()
    write_at_once(servers.durable)


@asynccontextmanager
async def writing(servers: EmbeddedServers, writer: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(servers.durable.url, writer=writer)
    yield store
    await store.close()


async def again(call: Callable[[], Awaitable[T]]) -> T:
    """What a pooled connection to a server that is gone says once is not the answer."""
    with suppress(StoreUnavailable):
        return await call()
    return await call()


async def put(store: RedisStore, token: FencingToken, position: int, *tokens: int) -> CommitStatus:
    (result,) = await again(lambda: store.commit([TokenCommit(KEY, token, position, tokens)]))
    return result.status


async def test_a_kill_that_loses_nothing_changes_nothing(servers: EmbeddedServers) -> None:
    async with writing(servers, "leader") as leader, writing(servers, "daemon") as daemon:
        await start_job(leader)
        token = (await lease(leader, 1, "w")).token
        assert await put(daemon, token, 0, 1, 2) is OK
        servers.durable.kill()
        servers.durable.start()
        assert await put(daemon, token, 2, 3) is OK
        assert await again(leader.incarnation) == 1


@pytest.mark.parametrize("more", [0, 9], ids=["between", "within a command"])
async def test_a_lost_commit_fences_its_owner_and_what_was_lost_is_taken_again(
    servers: EmbeddedServers, more: int
) -> None:
    async with writing(servers, "leader") as leader, writing(servers, "daemon") as daemon:
        await start_job(leader)
        token = (await lease(leader, 1, "w")).token
        assert await put(daemon, token, 0, 1, 2) is OK
        kept = size(servers.durable)
        assert await put(daemon, token, 2, 3, 4) is OK
        lose(servers.durable, kept + more)
        assert await put(daemon, token, 4, 5) is FENCED, "not a gap: whoever lost something is asked to start over"
        assert await again(leader.incarnation) == 2
        assert await leader.requeue("job", 1, [(KEY, token)], InterruptionCause.STORE_LOSS) == 1
        record = await leader.get_request(KEY)
        assert record is not None and record.tokens == (1, 2)
        second = (await lease(leader, 1, "w", 2)).token
        assert second == FencingToken(2, 3)
        assert await put(daemon, second, 2, 3, 4) is OK


async def test_an_epoch_that_was_lost_is_not_handed_out_twice(servers: EmbeddedServers) -> None:
    async with writing(servers, "leader") as leader, writing(servers, "daemon") as daemon:
        await start_job(leader)
        kept = size(servers.durable)
        lost = (await lease(leader, 1, "w1")).token
        lose(servers.durable, kept)
        with suppress(StoreUnavailable):
            await leader.incarnation()
        second = (await lease(leader, 1, "w2")).token
        assert (lost, second) == (FencingToken(1, 1), FencingToken(2, 1))
        assert await put(daemon, lost, 0, 1) is FENCED
        assert await put(daemon, second, 0, 1) is OK


async def test_of_several_writers_one_is_enough_and_all_raise_it_once(servers: EmbeddedServers) -> None:
    async with writing(servers, "leader") as leader, writing(servers, "a") as a, writing(servers, "b") as b:
        await start_job(leader)
        token = (await lease(leader, 1, "w")).token
        kept = size(servers.durable)
        for position, daemon in enumerate((a, b, leader)):
            assert await put(daemon, token, position, position) is OK
        lose(servers.durable, kept)
        assert [await again(store.incarnation) for store in (a, b, leader)] == [2, 2, 2]


async def test_a_second_loss_that_takes_the_first_ones_fence_along_is_a_new_incarnation(
    servers: EmbeddedServers,
) -> None:
    async with writing(servers, "leader") as leader:
        await start_job(leader)
        kept = size(servers.durable)
        await lease(leader, 1, "w1")
        lose(servers.durable, kept)
        assert await again(leader.incarnation) == 2
        await lease(leader, 1, "w2")
        lose(servers.durable, kept)
        assert await again(leader.incarnation) == 3, "2 has an owner already"


async def test_an_empty_store_is_a_loss_too(servers: EmbeddedServers) -> None:
    async with writing(servers, "leader") as leader:
        await start_job(leader)
        lose_all(servers.durable)
        assert await again(leader.incarnation) == 2
        assert await leader.active_jobs() == []


async def test_nothing_is_said_to_a_store_that_lost_writes_and_cannot_be_fenced_yet(servers: EmbeddedServers) -> None:
    async with writing(servers, "leader") as leader:
        await start_job(leader)
        kept = size(servers.durable)
        await lease(leader, 1, "w1")
        lose(servers.durable, kept)
        configure(servers.durable, "maxmemory", "1")
        with suppress(StoreUnavailable):
            await leader.incarnation()  # the connection that died
        for _ in range(2):
            with pytest.raises(StoreRefusesWrites, match="raise maxmemory"):
                await leader.get_request(KEY)
        configure(servers.durable, "maxmemory", "0")
        assert await leader.incarnation() == 2


async def test_a_flushed_script_cache_leaves_a_mark_behind_what_is_sent_again(servers: EmbeddedServers) -> None:
    async with writing(servers, "leader") as leader:
        await start_job(leader)
        client = connect(servers.durable.url, 2.0)
        await client.script_flush()
        await lease(leader, 1, "w1")
        assert await client.ttl(keys.mark("leader")) > 3600
        await client.aclose()
        lose(servers.durable, size(servers.durable) - 20)  # the mark behind the lease only: in doubt, it counts
        assert await again(leader.incarnation) == 2


async def test_an_owner_ahead_of_the_store_is_proof_enough(servers: EmbeddedServers) -> None:
    """Of a daemon that has nothing to remember itself."""
    daemon = Daemon(servers).start()
    client = ContextClient(f"127.0.0.1:{daemon.port}")
    async with writing(servers, "") as store:
        try:
            await start_job(store)
            for _ in range(2):
                (result,) = await asyncio.to_thread(client.commit, [TokenCommit(KEY, FencingToken(1, 1), 0, (1,))])
                assert result.status is FENCED and await store.incarnation() == 2
            token = (await lease(store, 1, "w2")).token
            assert token == FencingToken(2, 1)
            with pytest.raises(NotOwner):
                await asyncio.to_thread(restore, client, KEY, FencingToken(2, 3), "w1", LAYOUT)
            assert await store.incarnation() == 3
        finally:
            client.close()
            daemon.end(signal.SIGTERM)


async def test_reading_and_beating_leave_no_mark(servers: EmbeddedServers) -> None:
    async with writing(servers, "leader") as leader:
        await leader.active_jobs()
        await leader.workers()
        client = connect(servers.durable.url, 2.0)
        assert await client.exists(keys.mark("leader")) == 0
        await client.aclose()


def test_a_mark_that_may_have_expired_proves_nothing() -> None:
    now = 0.0
    mark = WriteMark("w", clock=lambda: now)
    assert len(mark.commands()) == 2 and len(mark.commands()) == 1
    mark.acknowledged(2)
    mark.acknowledged(1)  # the slower of two connections
    assert mark.lost(1, 2) and not mark.lost(2, 2) and not mark.lost(3, 2)
    now = 23 * 3600.0
    assert not mark.lost(0, 2) and mark.lost(1, 2)
    assert len(mark.commands()) == 2, "kept for another day"
