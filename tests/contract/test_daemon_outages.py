"""The real daemon while one of its stores is killed, hangs, comes back empty or refuses writes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from daemon_rig import LAYOUT, Pages, available, lease, mark, restore, start_job, until
from store_samples import worker_status

from context_daemon.client import ContextClient
from context_daemon.records import (
    CommitStatus,
    Notice,
    NoticeKind,
    TokenCommit,
)
from context_daemon.redis_server import EmbeddedServers, ServerProcess, free_port
from context_daemon.redis_store import RedisStore
from context_daemon.store import StoreRefusesWrites, StoreUnavailable


@pytest.fixture
async def store(own_servers: EmbeddedServers) -> Any:
    made = RedisStore(own_servers.durable.url)
    yield made
    await made.close()


async def test_durable_store_killed_in_the_middle(
    client: ContextClient, store: RedisStore, own_servers: EmbeddedServers
) -> None:
    await start_job(store)
    owner = await lease(store, 1, "w1")
    for position in range(20):
        client.commit([TokenCommit(owner.key, owner.token, position, (position,))])
    own_servers.durable.kill()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="does not answer"):
        client.commit([TokenCommit(owner.key, owner.token, 20, (20,))])
    assert time.monotonic() - began < 3.0
    assert client.heartbeat(worker_status("w1", "node-1")) == []  # answered while the store is away
    own_servers.durable.start()
    (result,) = available(lambda: client.commit([TokenCommit(owner.key, owner.token, 20, (20,))]))
    assert (result.status, result.length) == (CommitStatus.OK, 21)
    assert available(lambda: restore(client, owner.key, owner.token, "w1", LAYOUT))[0].tokens == tuple(range(21))
    available(lambda: client.heartbeat(worker_status("w1", "node-1")))


async def test_hung_durable_store_shows_within_the_timeout(
    client: ContextClient, store: RedisStore, own_servers: EmbeddedServers
) -> None:
    await start_job(store)
    owner = await lease(store, 1, "w1")
    own_servers.durable.pause()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        client.commit([TokenCommit(owner.key, owner.token, 0, (1,))])
    assert time.monotonic() - began < 3.0
    client.heartbeat(worker_status("w1", "node-1"))
    assert time.monotonic() - began < 4.0
    own_servers.durable.resume()
    (result,) = available(lambda: client.commit([TokenCommit(owner.key, owner.token, 0, (1,))]))
    assert (result.status, result.length) == (CommitStatus.OK, 1)


async def test_kv_restart_is_told_and_costs_no_token(
    client: ContextClient, elsewhere: ContextClient, pages: Pages, store: RedisStore, own_servers: EmbeddedServers
) -> None:
    await start_job(store)
    owner = await lease(store, 1, "w1")
    pages.put(owner, 0, 8)
    pages.stored(owner, 8)
    client.commit([TokenCommit(owner.key, owner.token, 0, (5,), mark(8))])
    own_servers.kv.kill()
    pages.put(owner, 8, 9)
    record, _, positions, _ = restore(elsewhere, owner.key, owner.token, "w1", LAYOUT, only="store")
    assert record.tokens == (5,) and positions == 0
    own_servers.kv.start()
    owned = (owner.key, owner.token.epoch)
    until(lambda: pages.writer.announce([], [owned]).progress[owned].losses == 1)
    pages.writer.rewrite([owned])
    pages.put(owner, 0, 9)
    pages.stored(owner, 9)
    assert restore(elsewhere, owner.key, owner.token, "w1", LAYOUT, only="store").positions == 8, (
        "as far as the watermark says"
    )


async def test_a_notice_raised_while_the_store_is_away_is_not_lost(
    client: ContextClient, store: RedisStore, own_servers: EmbeddedServers
) -> None:
    notice = Notice("node-1", NoticeKind.TERMINATE, time.time() + 60, "test")
    own_servers.durable.kill()
    assert client.raise_notice(notice)
    assert not client.raise_notice(notice)
    assert client.heartbeat(worker_status("w1", "node-1")) == [notice]
    own_servers.durable.start()
    deadline = time.monotonic() + 10
    while (await store.notices()) != [notice]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    client.withdraw_notice(notice.id)
    assert client.heartbeat(worker_status("w1", "node-1")) == []
    assert await store.notices() == []


async def test_a_store_that_refuses_writes_is_named(tmp_path: Path) -> None:
    server = ServerProcess("durable", tmp_path, free_port(), maxmemory=4 << 20)
    server.start()
    store = RedisStore(server.url)
    try:
        await start_job(store)
        owner = await lease(store, 1, "w1")
        with pytest.raises(StoreRefusesWrites, match=r"memory limit is reached: raise maxmemory"):
            for position in range(0, 2_000_000, 2000):
                await store.commit([TokenCommit(owner.key, owner.token, position, tuple(range(2000)))])
        record = await store.get_request(owner.key)
        assert record is not None and len(record.tokens) % 2000 == 0  # a refused script wrote nothing
        job = await store.get_job("job")
        assert job is not None and job.output_tokens == len(record.tokens)
    finally:
        await store.close()
        server.stop()
