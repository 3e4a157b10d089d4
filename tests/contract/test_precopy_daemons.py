"""Pages that go ahead of a cut-over, from one real daemon's arena into another's, and all that becomes of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import netns
import pytest
import redis
from daemon_rig import until
from precopy_rig import GUESTS, REFUSED, SHAPE, SIZE, grow, handed_over, prepare, wanted
from transfer_rig import LAYOUT, PAGE, ROW, Held, Node, Pair, attached, hold, moved, restored

from context_daemon import wire
from context_daemon.guests import LEASE_S
from context_daemon.kv_writer import KVWriter
from context_daemon.page_records import Shape
from context_daemon.preparation import Preparation, Wanted
from context_daemon.records import FencingToken, RequestKey
from context_daemon.redis_server import EmbeddedServers
from context_daemon.redis_store import RedisStore
from protos import context_pb2 as pb
from protos.context_pb2_grpc import ContextServiceStub


# -- two machines -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def network() -> Iterator[netns.TwoNamespaces]:
    if reason := netns.why_not():
        pytest.skip(reason)
    with netns.TwoNamespaces() as made:
        yield made


async def test_two_machines_one_of_which_goes_after_the_cut_over(network: netns.TwoNamespaces, tmp_path: Path) -> None:
    """All KV is at the target when the source's machine and the KV store are gone."""
    with ExitStack() as stack:
        servers = stack.enter_context(EmbeddedServers(tmp_path, host="0.0.0.0"))
        for server in (servers.durable, servers.kv):  # not to the whole world, and without a password
            with redis.Redis(port=server.port) as raw_server:
                raw_server.config_set("protected-mode", "no")
                raw_server.config_set("bind", f"127.0.0.1 {network.home}")
        urls = [f"redis://{network.home}:{server.port}/0" for server in (servers.durable, servers.kv)]
        nodes, inner = [], []
        for name, space in (("a", network.a), ("b", network.b)):
            node = Node(name, tmp_path, *urls, host=space.outer, listen="0.0.0.0", advertise=space.inner,
                        command=space.within())  # fmt: skip
            stack.callback(node.kill)
            nodes.append(node.ready())
            inner.append(f"{space.inner}:{node.port}")
        source, target = nodes
        store = RedisStore(f"redis://127.0.0.1:{servers.durable.port}/0")
        client = source.client()
        held = await hold(store, client, "far", 24)
        arena = attached(target.client())
        assert prepare(client, inner[1], wanted(held, 20 * SIZE)) == [20 * SIZE]
        grow(held, client, SIZE + 3)
        assert prepare(client, inner[1], wanted(held, 25 * SIZE)) == [25 * SIZE], "it keeps up"
        came = target.metric("tideover_peer_bytes_total", direction="in")
        assert came == 25 * PAGE, "each page once"
        assert prepare(client, inner[1], wanted(held), last=True) == [held.positions]
        assert target.metric("tideover_peer_bytes_total", direction="in") == came + 3 * ROW, "the open page alone"
        lease = await handed_over(store, held, SIZE + 4)
        network.link(up=False)
        servers.kv.kill()
        source.kill()
        assert restored(target.clients[0], lease, held, arena) == (held.positions, ("arena",))
        assert target.metric("tideover_peer_failures_total", reason="away") == 0, (
            "a source that is gone is not waited for"
        )
        assert target.metric(GUESTS, fate="claimed") == target.metric(GUESTS, fate="taken") == 26
        await asyncio.sleep(LEASE_S + 1)  # they are nobody's guests any more
        assert restored(target.clients[0], lease, held, arena) == (held.positions, ("arena",))
        await store.close()


# -- what becomes of guests ---------------------------------------------------------------------------------------------
async def test_blocks_come_back_when_nobody_comes(pair: Pair, there: KVWriter, durable: RedisStore, job: str) -> None:
    client = pair.source.client()
    held = await hold(durable, client, job, 16)
    used, before = pair.target.used, pair.target.metric(GUESTS, fate="dismissed")
    for _ in range(6):  # as long as it is renewed
        assert prepare(client, pair.target, wanted(held)) == [held.positions]
        assert pair.target.used == used + 16 * PAGE
        await asyncio.sleep(LEASE_S / 4)
    until(lambda: pair.target.used == used, LEASE_S + 10)
    assert pair.target.metric(GUESTS, fate="dismissed") == before + 16
    assert pair.target.door(held.lease.key)[2] == 0
    assert prepare(client, pair.target, wanted(held), last=True) == [held.positions], "it may begin anew"
    lease = await handed_over(durable, held, 1)
    assert restored(pair.target.clients[-1], lease, held, there) == (held.positions, ("arena",))


async def test_a_target_without_room_keeps_what_is_its_own(
    pair: Pair, servers: EmbeddedServers, pair_folder: Path, durable: RedisStore, job: str
) -> None:
    small = Node(
        "small", pair_folder, servers.durable.url, servers.kv.url, "--arena-bytes", "4MiB", "--kv-commit", "arena"
    )
    try:
        own_client, client = small.ready().client(), pair.source.client()
        own = await hold(durable, own_client, f"own-{job}", 20)
        held = await hold(durable, client, job, 40, marked=0)
        used = small.used
        (reached,) = prepare(client, small, wanted(held))
        assert 0 < reached < held.positions and reached % SIZE == 0
        assert small.door(own.lease.key)[2] == own.positions, "what it runs itself stays"
        assert small.metric("tideover_arena_evicted_pages_total") == 0
        assert small.used <= (4 << 20) * 7 / 8, "an eighth is left to its own workers"
        assert small.metric(REFUSED, reason="full") >= 1
        assert prepare(client, small, wanted(held), last=True) == [reached], "again: no more, and no less"
        grow(own, own_client, 5 * SIZE)  # its own need comes first
        assert small.door(own.lease.key)[2] == own.positions
        lease = await handed_over(durable, held, 1)
        positions, sources = restored(small.clients[0], lease, held, attached(own_client))
        assert (positions, sources) == (held.positions, ("peer",)), "there is more at the source"
        assert small.used <= used + 40 * PAGE
    finally:
        small.kill()


async def test_a_stale_owner_brings_nothing(pair: Pair, there: KVWriter, durable: RedisStore, job: str) -> None:
    client = pair.source.client()
    held = await hold(durable, client, job, 8)
    other = await hold(durable, client, f"other-{job}", 4)
    used, before = pair.target.used, pair.target.metric(REFUSED, reason="not_owner")
    await moved(durable, held)
    assert prepare(client, pair.target, wanted(held), wanted(other)) == [0, other.positions]
    future = FencingToken(held.lease.token.incarnation, 9)
    assert prepare(client, pair.target, wanted(held, token=future)) == [0]
    assert pair.target.used == used + 4 * PAGE
    assert pair.target.metric(REFUSED, reason="not_owner") == before + 2


async def test_a_stale_word_after_the_next_owner_began(
    pair: Pair, there: KVWriter, durable: RedisStore, job: str
) -> None:
    """The source was frozen, its request runs at the target by now: what it still says there changes nothing."""
    client = pair.source.client()
    held = await hold(durable, client, job, 8, marked=0)
    assert prepare(client, pair.target, wanted(held, 4 * SIZE)) == [4 * SIZE]
    lease = await moved(durable, held)
    assert restored(pair.target.clients[-1], lease, held, there) == (held.positions, ("peer",))
    row = memoryview(os.urandom(LAYOUT.slot_bytes))
    written = there.write(lease.key, lease.token.epoch, held.positions, held.positions, row)
    assert written is not None
    there.announce([written])
    came = pair.target.metric(GUESTS, fate="taken")
    assert prepare(client, pair.target, wanted(held)) == [0]
    await asyncio.sleep(LEASE_S + 1)
    assert pair.target.metric(GUESTS, fate="taken") == came
    assert pair.target.door(lease.key)[2] == 4 * SIZE, "the first four are not guests any more"


async def test_a_layout_that_nobody_there_can_use(pair: Pair, there: KVWriter, durable: RedisStore, job: str) -> None:
    client = pair.source.client()
    held = await hold(durable, client, job, 4)
    used = pair.target.used
    for shape in (Shape("other", SHAPE.slot_bytes, SIZE), Shape(SHAPE.layout, 8, SIZE), Shape(SHAPE.layout, 8, 0)):
        assert prepare(client, pair.target, wanted(held), shape=shape) == [0]
    assert pair.target.used == used and pair.target.alive


async def test_a_target_on_the_same_node_has_it_already(
    pair: Pair, there: KVWriter, durable: RedisStore, job: str
) -> None:
    client = pair.target.client()
    held = await hold(durable, client, job, 4)
    used = pair.target.used
    assert prepare(client, pair.target, wanted(held), last=True) == [held.positions]
    assert pair.target.used == used


@pytest.mark.parametrize(("source", "port"), [("nowhere", 7), ("127.0.0.1:7", 0), ("127.0.0.1:7", 1 << 16), ("", 7)])
def test_wrong_places_are_refused_by_name(pair: Pair, source: str, port: int) -> None:
    with grpc.insecure_channel(pair.target.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        request = pb.TakePagesRequest(source=source, port=port, token="x")
        with pytest.raises(grpc.RpcError, match="cannot be read at"):
            ContextServiceStub(channel).TakePages(request, timeout=10)


def test_a_key_that_is_none_is_refused(pair: Pair, there: KVWriter) -> None:
    asked = Preparation(pair.target.address, SHAPE, (Wanted(RequestKey("no such{job}", 1), FencingToken(1, 1), 4),))
    request = pb.TakePagesRequest(prepare=wire.preparation_to_pb(asked), source="127.0.0.1:7", port=7, token="x")
    channel = grpc.insecure_channel(pair.target.address, options=[("grpc.enable_http_proxy", 0)])
    with channel, pytest.raises(grpc.RpcError) as refused:
        ContextServiceStub(channel).TakePages(request, timeout=10)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


# -- several owners before this one -------------------------------------------------------------------------------------
async def test_what_the_source_found_in_the_store_comes_from_there(
    pair: Pair, there: KVWriter, servers: EmbeddedServers, pair_folder: Path, durable: RedisStore, job: str
) -> None:
    """The source took over after a crash: its arena has only what it wrote itself."""
    first, client = pair.target.client(), pair.source.client()
    held = await hold(durable, first, job, 12)
    until(held.stored)
    writer = KVWriter(client, LAYOUT, spare_blocks=64)
    writer.attach()
    grown = Held(await moved(durable, held), held.raw, writer, LAYOUT, blocks=held.blocks)
    grow(grown, client, 2 * SIZE + 1)
    assert pair.source.door(grown.lease.key)[2] == 0, "its first page is not there"
    fresh = Node("fresh", pair_folder, servers.durable.url, servers.kv.url)
    try:
        arena = attached(fresh.ready().client())
        assert prepare(client, fresh, wanted(grown, 14 * SIZE)) == [14 * SIZE]
        assert prepare(client, fresh, wanted(grown), last=True) == [grown.positions]
        lease = await handed_over(durable, grown, 1 + 2 * SIZE + 1)
        assert restored(fresh.clients[0], lease, grown, arena) == (grown.positions, ("arena",))
    finally:
        fresh.kill()
