"""Pages between two machines that share no network but one cable."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import netns
import pytest
import redis
from daemon_rig import until
from transfer_rig import LAYOUT, PAGE, Held, Node, attached, hold, leased, moved, restored, work_and_die

from context_daemon.redis_server import EmbeddedServers
from context_daemon.redis_store import RedisStore


@pytest.fixture(scope="module")
def network() -> Iterator[netns.TwoNamespaces]:
    if reason := netns.why_not():
        pytest.skip(reason)
    with netns.TwoNamespaces() as made:
        yield made


async def test_two_machines_a_dead_worker_and_a_link_that_fails(network: netns.TwoNamespaces, tmp_path: Path) -> None:
    """The daemons share no network but one cable; the KV store is gone, the source's worker too."""
    with ExitStack() as stack:
        servers = stack.enter_context(EmbeddedServers(tmp_path, host="0.0.0.0"))
        for server in (servers.durable, servers.kv):  # not to the whole world, and without a password
            with redis.Redis(port=server.port) as raw_server:
                raw_server.config_set("protected-mode", "no")
                raw_server.config_set("bind", f"127.0.0.1 {network.home}")
        urls = [f"redis://{network.home}:{server.port}/0" for server in (servers.durable, servers.kv)]
        nodes = []
        for name, space in (("a", network.a), ("b", network.b)):
            node = Node(name, tmp_path, *urls, host=space.outer, listen="0.0.0.0", advertise=space.inner,
                        command=space.within())  # fmt: skip
            stack.callback(node.kill)
            nodes.append(node)
        source, target = (node.ready() for node in nodes)
        store = RedisStore(f"redis://127.0.0.1:{servers.durable.port}/0")
        held = await hold(store, source.client(), "far", 64)
        orphan = Held(await leased(store, "dead", 12), os.urandom(12 * LAYOUT.page_size * LAYOUT.slot_bytes),
                      held.writer, LAYOUT)  # fmt: skip
        worker = multiprocessing.get_context("spawn").Process(
            target=work_and_die, args=(source.address, orphan.lease, orphan.raw)
        )
        worker.start()
        await asyncio.to_thread(worker.join, 30)
        assert worker.exitcode == -signal.SIGKILL
        servers.kv.kill()
        there = attached(target.client())
        lease = await moved(store, orphan)
        assert restored(target.clients[0], lease, orphan, there) == (orphan.positions, ("peer",))

        network.slow("16mbit")  # 4 MiB take two seconds
        before, second = target.metric("tideover_peer_bytes_total", direction="in"), await moved(store, held)
        fetch = asyncio.create_task(asyncio.to_thread(restored, target.clients[0], second, held, there))
        await asyncio.to_thread(
            until, lambda: target.metric("tideover_peer_bytes_total", direction="in") > before + 8 * PAGE
        )
        network.link(up=False)
        assert not fetch.done(), "it is under way"
        await asyncio.sleep(0.5)  # how long the cable is out
        network.link(up=True)
        assert await fetch == (held.positions, ("peer",))
        await store.close()
