"""A daemon over three real KV servers: one that is killed, hangs or comes back empty concerns its own requests only."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from daemon_rig import LAYOUT, Daemon, Pages, lease, mark, raw_slots, restore, start_job, until
from kv_servers import KVServers

from context_daemon.client import ContextClient
from context_daemon.kv_cluster import KVCluster
from context_daemon.kv_pages import page_key
from context_daemon.kv_slots import bare, identity, verify
from context_daemon.kv_writer import Owned, Progress
from context_daemon.records import InterruptionCause, Lease, TokenCommit
from context_daemon.redis_server import EmbeddedServers
from context_daemon.redis_store import RedisStore

LINES = 24  # each server has some, whatever ports were drawn
PAGE = LAYOUT.page_size


class Setting:
    """All requests leased to one worker, with positions [0, 8) in the store; `mine` lie on the server `victim`."""

    def __init__(self, servers: KVServers, cluster: KVCluster, pages: Pages, leases: list[Lease]) -> None:
        self.servers, self.cluster, self.pages, self.leases = servers, cluster, pages, leases
        self.victim = cluster.server_of(leases[0].key)
        self.mine = {owned(each) for each in leases if cluster.server_of(each.key) == self.victim}
        self.others = {owned(each) for each in leases} - self.mine
        self.put(0, 8)
        self.wait(self.mine | self.others, 8)

    def put(self, start: int, stop: int, only: set[Owned] | None = None) -> None:
        for each in self.leases:
            if only is None or owned(each) in only:
                self.pages.put(each, start, stop)

    def progress(self) -> dict[Owned, Progress]:
        return self.pages.writer.announce([], self.mine | self.others).progress

    def wait(self, which: set[Owned], stored: int, seconds: float = 10.0) -> None:
        until(lambda: all(self.progress()[each].stored >= stored for each in which), seconds)

    async def kept(self, which: set[Owned], positions: int) -> list[bool]:
        return [await self._kept(each, positions) for each in sorted(which)]

    async def _kept(self, whose: Owned, positions: int) -> bool:
        """Every byte of `[0, positions)` is in the store."""
        key, epoch = whose
        raw = b""
        for page in range(positions // PAGE):
            data = await self.cluster.read_page(key, epoch, LAYOUT.fingerprint, page)
            if data is None:
                return False
            name = identity(key, epoch, LAYOUT.fingerprint)
            good = verify(memoryview(data), name, page * PAGE, LAYOUT.slot_bytes, PAGE)
            raw += bare(memoryview(data), good.slots, LAYOUT.slot_bytes).tobytes()
        return raw == raw_slots(0, positions)


def owned(lease: Lease) -> Owned:
    return lease.key, lease.token.epoch


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[EmbeddedServers, KVServers]]:
    embedded = EmbeddedServers(tmp_path / "embedded")
    embedded.durable.start()
    try:
        with KVServers(tmp_path / "kv") as kv:
            yield embedded, kv
    finally:
        embedded.stop()


@pytest.fixture
def clients(servers: tuple[EmbeddedServers, KVServers]) -> Iterator[list[ContextClient]]:
    """Of two nodes."""
    embedded, kv = servers
    daemons = [Daemon(embedded, node, kv_urls=kv.urls) for node in ("node-1", "node-2")]
    made = [ContextClient(f"127.0.0.1:{daemon.port}") for daemon in daemons]
    try:
        for daemon in daemons:
            daemon.start()
        yield made
    finally:
        for client in made:
            client.close()
        for daemon in daemons:
            if daemon.process is not None:
                daemon.end(signal.SIGKILL)


@pytest.fixture
async def store(servers: tuple[EmbeddedServers, KVServers]) -> AsyncIterator[RedisStore]:
    made = RedisStore(servers[0].durable.url)
    yield made
    await made.close()


@pytest.fixture
async def setting(
    servers: tuple[EmbeddedServers, KVServers], clients: list[ContextClient], store: RedisStore
) -> AsyncIterator[Setting]:
    await start_job(store, LINES)
    leases = [await lease(store, line, "w1") for line in range(1, LINES + 1)]
    cluster = KVCluster(servers[1].urls)
    yield Setting(servers[1], cluster, Pages(clients[0]), leases)
    await cluster.close()


async def test_a_killed_servers_requests_stall_alone_and_alone_are_written_again(setting: Setting) -> None:
    setting.servers[setting.victim].kill()
    setting.put(8, 12)
    setting.wait(setting.others, 12, seconds=5)
    assert {setting.progress()[each].stored for each in setting.mine} == {8}
    marker = min(setting.others)
    name = page_key(LAYOUT.fingerprint, *marker, 0)
    raw_server = redis.Redis.from_url(setting.servers[setting.cluster.server_of(marker[0])].url)
    assert raw_server.delete(name) == 1  # who writes everything again would write this, too
    setting.servers[setting.victim].start()
    until(lambda: all(setting.progress()[each].losses == 1 for each in setting.mine))
    assert {setting.progress()[each].losses for each in setting.others} == {0}
    setting.pages.writer.rewrite(setting.mine)
    setting.put(0, 12, setting.mine)
    setting.wait(setting.mine, 12)
    assert all(await setting.kept(setting.mine | (setting.others - {marker}), 12))
    assert not raw_server.exists(name)
    raw_server.close()


async def test_a_server_that_hangs_holds_up_nobody_elses_kv(setting: Setting) -> None:
    """Its message is under way for two seconds before it counts as away."""
    victim = setting.servers[setting.victim]
    victim.pause()
    setting.put(8, 9, setting.mine)
    await asyncio.sleep(0.2)  # its message is under way
    began = time.monotonic()
    setting.put(8, 12)
    setting.wait(setting.others, 12)
    assert time.monotonic() - began < 1.5
    assert {setting.progress()[each].stored for each in setting.mine} == {8}
    victim.resume()
    setting.wait(setting.mine, 12, seconds=15)
    assert {each.losses for each in setting.progress().values()} == {0}
    assert all(await setting.kept(setting.mine | setting.others, 12))


async def test_what_waits_for_an_owner_is_written_again_by_the_daemon_alone(
    setting: Setting, clients: list[ContextClient], store: RedisStore
) -> None:
    for each in setting.leases:
        clients[0].commit([TokenCommit(each.key, each.token, 0, (5,), mark(8))])
    await store.requeue("job", 1, [(each.key, each.token) for each in setting.leases], InterruptionCause.WORKER_DIED)
    setting.servers[setting.victim].kill()
    setting.servers[setting.victim].start()
    assert not any(await setting.kept(setting.mine, 8))
    deadline = time.monotonic() + 10
    while not all(await setting.kept(setting.mine, 8)):  # nobody announces or asks for anything
        assert time.monotonic() < deadline
    first = setting.leases[0]
    second = await lease(store, first.key.line, "w2", epoch=2)
    restored = restore(clients[1], second.key, second.token, "w2", LAYOUT, only="store")
    assert (restored.positions, restored.sources) == (8, ("store",))


@pytest.mark.parametrize("when", ["between", "before"])
async def test_what_was_restored_and_lost_before_the_first_write_is_told(
    setting: Setting, clients: list[ContextClient], store: RedisStore, when: str
) -> None:
    """The new owner's node never wrote these pages, so that only its restore can say which life of the server had them."""
    first = setting.leases[0]
    clients[0].commit([TokenCommit(first.key, first.token, 0, (5,), mark(8))])
    await store.requeue("job", 1, [(first.key, first.token)], InterruptionCause.WORKER_DIED)
    second = await lease(store, first.key.line, "w2", epoch=2)
    server, there = setting.servers[setting.victim], Pages(clients[1])
    if when == "before":
        server.kill()
    source = "store" if when == "between" else "peer"
    restored = restore(clients[1], second.key, second.token, "w2", LAYOUT, only=source)
    assert (restored.positions, restored.sources) == (8, (source,))
    server.kill()
    server.start()
    there.put(second, 8, 9)
    until(lambda: there.writer.announce([], [owned(second)]).progress[owned(second)].losses == 1)
    there.writer.rewrite([owned(second)])
    there.put(second, 0, 4)
    there.stored(second, 4)
    assert await setting.kept({owned(second)}, 4) == [True]
