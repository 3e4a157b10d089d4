"""A daemon's first restore: what it believes of links that nothing came over yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from daemon_rig import restore, until
from transfer_rig import LAYOUT, Node, hold, moved

from context_daemon.kv_cluster import KVCluster
from context_daemon.page_stream import End, receive_pages
from context_daemon.rates import PrefillCost
from context_daemon.records import RequestKey
from context_daemon.redis_server import EmbeddedServers
from context_daemon.redis_store import RedisStore
from worker.bench_links import SlowLink

PAGES = 128  # 8 MiB


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def node(stack: ExitStack, folder: Path, servers: EmbeddedServers, name: str, **where: str) -> Node:
    made = Node(name, folder, servers.durable.url, where.pop("kv_url", servers.kv.url), **where)
    stack.callback(made.kill)
    return made.ready()


@pytest.mark.parametrize(("bytes_per_s", "sources"), [(1e6, ()), (0.0, ("peer",))], ids=["slow", "fast"])
async def test_a_slow_peer_is_not_waited_for(
    stack: ExitStack, tmp_path: Path, servers: EmbeddedServers, durable: RedisStore, bytes_per_s: float,
    sources: tuple[str, ...],
) -> None:  # fmt: skip
    source = node(stack, tmp_path, servers, f"source-{bytes_per_s:.0f}", advertise="127.0.0.2")
    door = source.door(RequestKey("none", 1))[0]
    for port, rate in ((source.port, 0.0), (door, bytes_per_s)):
        stack.callback(SlowLink(("127.0.0.2", port), ("127.0.0.1", port), rate).close)
    target = node(stack, tmp_path, servers, f"target-{bytes_per_s:.0f}")
    held = await hold(durable, source.client(), f"probe-{bytes_per_s:.0f}", PAGES, marked=0)  # the peer alone has it
    lease = await moved(durable, held)
    computed = PrefillCost(0.0, 0.3 / held.positions)  # the link needs 8 s for what can be computed in 0.3
    found = restore(target.client(), lease.key, lease.token, "w2", LAYOUT, prefill=computed)
    assert found.sources == sources


@pytest.mark.parametrize(("bytes_per_s", "sources"), [(1e6, ()), (0.0, ("store",))], ids=["slow", "fast"])
async def test_a_slow_store_is_not_waited_for(
    stack: ExitStack, tmp_path: Path, servers: EmbeddedServers, durable: RedisStore, bytes_per_s: float,
    sources: tuple[str, ...],
) -> None:  # fmt: skip
    source = node(stack, tmp_path, servers, f"owner-{bytes_per_s:.0f}")
    held = await hold(durable, source.client(), f"store-{bytes_per_s:.0f}", PAGES)
    until(held.stored)
    lease = await moved(durable, held)
    source.kill()
    link = SlowLink(("127.0.0.2", 0), (servers.kv.host, servers.kv.port), bytes_per_s)
    stack.callback(link.close)
    target = node(stack, tmp_path, servers, f"next-{bytes_per_s:.0f}", kv_url=f"redis://127.0.0.2:{link.near[1]}/0")
    until(lambda: b"link_probed" in target.log.read_bytes(), 30)
    computed = PrefillCost(0.0, 0.3 / held.positions)
    found = restore(target.client(), lease.key, lease.token, "w2", LAYOUT, prefill=computed)
    assert found.sources == sources


async def test_a_probe_of_the_store_leaves_nothing_there(servers: EmbeddedServers) -> None:
    cluster = KVCluster([servers.kv.url])
    rate = await cluster.probe()
    assert rate is not None and rate.bytes_per_s > 1e6 and rate.setup_s < 1.0
    (kv,) = (item._kv for item in cluster._nodes.values())
    assert await kv._command("KEYS", "kv:probe:*") == []
    await cluster.close()


async def test_a_store_that_is_away_says_nothing(tmp_path: Path) -> None:
    with EmbeddedServers(tmp_path) as gone:
        url = gone.kv.url
    cluster = KVCluster([url])
    assert await cluster.probe() is None
    await cluster.close()


async def test_a_probe_is_as_long_as_it_may_be(stack: ExitStack, tmp_path: Path, servers: EmbeddedServers) -> None:
    """Whoever may read pages must not have a daemon send zeros for ever; with a wrong token none are sent."""
    asked = node(stack, tmp_path, servers, "asked")
    key, room = RequestKey("none", 1), memoryview(bytearray(1 << 20))
    with asked.stream(key, probe=1 << 40) as connection:
        came = 0
        while count := connection.recv_into(room):
            came += count
        assert came == (4 << 20) + 24
    with asked.stream(key, probe=1 << 20, token="wrong") as connection:
        assert receive_pages(connection, [room]) == ([], End.REFUSED)
