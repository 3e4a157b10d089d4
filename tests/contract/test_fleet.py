from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from store_samples import worker_status

from context_daemon.memory_store import MemoryStore
from context_daemon.records import Notice, NoticeKind
from context_daemon.redis_server import EmbeddedServers
from context_daemon.redis_store import RedisStore
from context_daemon.store import ContextStore, StoreUnavailable


async def test_workers_expire(store: ContextStore) -> None:
    await store.put_worker(worker_status("b", "n"), 30)
    await store.put_worker(worker_status("a", "n"), 30)
    await store.put_worker(worker_status("b", "n", beat=2), 30)
    await store.put_worker(worker_status("gone", "n"), 0.05)
    await asyncio.sleep(0.1)
    assert [(s.worker_id, s.beat) for s in await store.workers()] == [("a", 1), ("b", 2)]
    assert (await store.workers())[0] == worker_status("a", "n")
    await store.remove_worker("a")
    await store.remove_worker("a")
    assert [s.worker_id for s in await store.workers()] == ["b"]


async def test_notices(store: ContextStore) -> None:
    late = Notice("n1", NoticeKind.TERMINATE, time.time() + 100, "imds")
    soon = Notice("n2", NoticeKind.REBALANCE, time.time() - 100, "imds")
    assert await store.put_notice(late) and await store.put_notice(soon)
    assert not await store.put_notice(late)
    assert await store.notices() == [soon, late]
    await store.withdraw_notice(late.id)
    await store.withdraw_notice(late.id)
    assert await store.notices() == [soon]
    assert await store.put_notice(late)  # raised again after a withdrawal: it stands again


async def test_leadership(store: ContextStore) -> None:
    assert await store.acquire_leadership("a", 0.2) == 1
    assert await store.acquire_leadership("a", 0.2) == 1
    assert await store.acquire_leadership("b", 0.2) is None
    await asyncio.sleep(0.3)
    assert await store.acquire_leadership("b", 5) == 2
    assert await store.acquire_leadership("a", 5) is None


async def test_memory_store_follows_its_clock() -> None:
    now = 100.0
    store = MemoryStore(clock=lambda: now)
    await store.put_worker(worker_status("a", "n"), 10)
    now = 110.5
    assert await store.workers() == []


async def test_leadership_and_incarnation_survive_a_kill(servers: EmbeddedServers) -> None:
    store = RedisStore(servers.durable.url)
    before, term = await store.server_id(), await store.acquire_leadership("kept", 60)
    assert await store.bump_incarnation(await store.incarnation()) >= 2
    in_force = await store.incarnation()
    servers.durable.kill()
    servers.durable.start()
    with suppress(StoreUnavailable):  # the pooled connection died with the server: said once, then made anew
        await store.server_id()
    assert await store.server_id() != before
    assert await store.incarnation() == in_force
    if term is not None:
        assert await store.acquire_leadership("kept", 60) == term
    await store.close()
