"""The arena of a real daemon: workers and daemons killed, no room, and what leaves the node in each commit mode."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from arena_rig import Node
from daemon_rig import LAYOUT, PROMPT, Pages, available, lease, mark, raw_slots, restore, start_job, until

from context_daemon.client import ContextClient
from context_daemon.kv_slots import frame, framed_size, identity
from context_daemon.kv_writer import ArenaGone, KVWriter, SlotRange
from context_daemon.page_records import Shape
from context_daemon.records import (
    CommitStatus,
    Finish,
    InterruptionCause,
    KVLayout,
    KVWatermark,
    Lease,
    Notice,
    NoticeKind,
    RequestKey,
    TokenCommit,
)
from context_daemon.redis_store import RedisStore
from context_daemon.store import LeaseRequest, StoreUnavailable

BLOCK = Shape("", LAYOUT.slot_bytes, LAYOUT.page_size).block_bytes
WIDE = KVLayout("wide", "cpu-1", "float32", num_layers=4, num_kv_heads=1, head_dim=256, page_size=4)  # 16 in 1 MiB

WORKER = """
import sys
sys.path.insert(0, "tests/contract")
from daemon_rig import LAYOUT, PROMPT, Pages, raw_slots
from context_daemon.client import ContextClient
from context_daemon.records import FencingToken, KVWatermark, Lease, RequestKey, TokenCommit
client = ContextClient("127.0.0.1:" + sys.argv[1])
pages, key = Pages(client), RequestKey("job", 1)
pages.put(Lease(key, FencingToken(1, 1), "w1"), 0, 11)
client.commit([TokenCommit(key, FencingToken(1, 1), 0, (5, 6))])
pages.writer.write(key, 1, PROMPT, 11, raw_slots(11, 40))
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.stop()


@pytest.fixture
async def store(node: Node) -> AsyncIterator[RedisStore]:
    made = RedisStore(node.servers.durable.url)
    yield made
    await made.close()


def killed_later(node: Node) -> subprocess.Popen[str]:
    """A worker that has written what it will."""
    command = [sys.executable, "-c", WORKER, str(node.daemon.port)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None and worker.stdout.readline() == "written\n"
    return worker


async def test_a_killed_workers_pages_are_restored_without_the_kv_store_and_its_blocks_come_back(
    node: Node, store: RedisStore
) -> None:
    client = node.start()
    node.servers.kv.kill()
    await start_job(store)
    first = await lease(store, 1, "w1")
    worker = killed_later(node)
    assert node.metric("tideover_arena_used_bytes") == (64 + 3) * BLOCK, "three of its 64 were granted anew"
    worker.kill()
    worker.communicate()
    await store.requeue("job", 1, [(first.key, first.token)], InterruptionCause.WORKER_DIED)
    second = await lease(store, 1, "w2", epoch=2)
    pages = Pages(client)
    restored = restore(client, second.key, second.token, "w2", LAYOUT, arena=pages.writer)
    assert restored.record.tokens == (5, 6) and restored.sources == ("arena",)
    assert restored.positions == 11 and bytes(restored.kv) == raw_slots(0, 11)
    assert node.metric("tideover_arena_used_bytes") == (64 + 3) * BLOCK, "the new worker's, and what was announced"


async def test_a_killed_daemons_mapping_stays_readable_and_its_successor_is_attached_to(
    node: Node, store: RedisStore
) -> None:
    client = node.start()
    await start_job(store)
    owner = await lease(store, 1, "w1")
    pages = Pages(client)
    pages.put(owner, 0, 8)
    before = pages.writer.write(owner.key, 1, PROMPT, 8, raw_slots(8, 11))
    assert before is not None
    old, read = pages.writer.arena_id, pages.writer.read(before.blocks[0], 3)
    node.daemon.end(signal.SIGKILL)
    framed = frame(identity(owner.key, 1, LAYOUT.fingerprint), 8, raw_slots(8, 11), LAYOUT.slot_bytes)
    assert bytes(read) == framed
    assert left_behind() == []
    node.daemon.start()
    until(lambda: refused(pages.writer, before))
    pages.writer.detach()
    pages.writer.attach()
    assert pages.writer.arena_id != old and bytes(read) == framed
    pages.put(owner, 0, 11)
    available(lambda: client.commit([TokenCommit(owner.key, owner.token, 0, (5, 6))]))
    restored = restore(client, owner.key, owner.token, "w1", LAYOUT, arena=pages.writer)
    assert restored.positions == 11 and bytes(restored.kv) == raw_slots(0, 11)


def left_behind() -> list[Path]:
    return list(Path("/dev/shm").glob("*tideover*"))


def refused(writer: KVWriter, written: SlotRange) -> bool:
    """False as long as no daemon answers."""
    try:
        writer.announce([written])
    except ArenaGone:
        return True
    except StoreUnavailable:
        return False
    raise AssertionError("another arena's slots were taken in")


async def test_in_a_full_arena_kv_makes_room_or_is_refused_and_tokens_go_on(node: Node, store: RedisStore) -> None:
    client = node.start("--arena-bytes", str(1 << 20), "--kv-commit", "arena")
    await start_job(store, 60)
    writer = KVWriter(client, WIDE, spare_blocks=4)
    writer.attach()

    def step(owner: Lease, stop: int) -> bool:
        """As a worker does; whether the KV found room."""
        raw = os.urandom(stop * WIDE.slot_bytes)
        written = writer.write(owner.key, owner.token.epoch, PROMPT, 0, raw)
        writer.announce([written] if written else [])
        (result,) = client.commit([TokenCommit(owner.key, owner.token, 0, (5,))])
        assert (result.status, result.length) == (CommitStatus.OK, 1)
        return written is not None

    owners = [await lease(store, line, "w1") for line in range(1, 31)]
    assert all(step(owner, 4) for owner in owners)
    assert node.metric("tideover_arena_evicted_pages_total") >= 30 - 16
    running = [await lease(store, line, "w1") for line in range(31, 61)]
    found = [step(owner, 3) for owner in running]
    assert 12 <= sum(found) <= 16, "the open pages of running owners are not given up"
    assert found[:12] == [True] * 12 and not found[-1]
    finish = Finish(True, b"{}")
    client.commit([TokenCommit(owner.key, owner.token, 1, (6,), finish=finish) for owner in running])
    writer.announce([])
    assert step(owners[0], 4)


@pytest.mark.parametrize(
    ("mode", "flags"),
    [("store", ()), ("arena", ()), ("grace", ()), ("auto", ("--kv-bandwidth", "8000")),
     ("auto", ("--kv-cost-budget", "0.576", "--kv-price-per-gb", "20"))],
)  # fmt: skip
async def test_what_leaves_the_node_before_and_after_a_notice(
    node: Node, store: RedisStore, mode: str, flags: tuple[str, ...]
) -> None:
    client = node.start("--kv-commit", mode, *flags)
    await start_job(store)
    began = time.monotonic()
    owner, pages = await lease(store, 1, "w1"), Pages(client)
    for start in range(0, 1200, 24):
        pages.put(owner, start, start + 24)
    whole = 1200 * framed_size(LAYOUT.slot_bytes)

    def stored() -> int:
        """Never more than 8000 bytes/s, a bucket of one second and a page, however slow this machine is."""
        count = node.stored_bytes()
        assert mode != "auto" or count <= 8000 * (time.monotonic() - began + 1) + BLOCK
        return count

    if mode == "store":
        until(lambda: stored() == whole)
    elif mode == "auto":
        until(lambda: stored() > 8000)
        assert stored() < whole
    else:
        await asyncio.sleep(0.5)
        assert stored() == 0
    client.raise_notice(Notice("node-1", NoticeKind.TERMINATE, time.time() + 60, "test"))
    if mode == "arena":
        await asyncio.sleep(0.5)
        assert node.stored_bytes() == 0
    else:
        until(lambda: node.stored_bytes() == whole)


async def test_a_hint_lets_go_what_grace_holds(node: Node, store: RedisStore) -> None:
    client = node.start("--kv-commit", "grace")
    await start_job(store)
    owner, pages = await lease(store, 1, "w1"), Pages(client)
    pages.put(owner, 0, 24)
    await asyncio.sleep(0.5)
    assert node.stored_bytes() == 0
    client.raise_notice(Notice("node-1", NoticeKind.REBALANCE, time.time() + 60, "test"))
    pages.stored(owner, 24)


async def test_what_was_pushed_out_unshipped_is_filled_in_when_the_kv_server_is_back(
    node: Node, store: RedisStore
) -> None:
    """Forty pages through an arena of sixteen while the KV server hangs: it comes back as it was, and lacks most of them."""
    client, size, pages = node.start("--arena-bytes", str(1 << 20)), WIDE.page_size, 40
    await start_job(store)
    owner = await lease(store, 1, "w1")
    owned = (owner.key, owner.token.epoch)
    writer = KVWriter(client, WIDE, spare_blocks=4)
    writer.attach()

    def put(page: int) -> None:
        raw = bytes([page + 1]) * (size * WIDE.slot_bytes)
        written = writer.write(owner.key, 1, PROMPT, page * size, raw)
        writer.announce([written] if written else [])

    def caught_up() -> bool:
        told = writer.announce([], [owned]).progress[owned]
        for start in range(told.hole_start, told.hole_stop, size):
            put(start // size)
        return told.stored == pages * size

    node.servers.kv.pause()
    for page in range(pages):
        put(page)
    assert node.metric("tideover_arena_evicted_pages_total") >= pages - 16
    node.servers.kv.resume()
    until(caught_up, 60)
    known = pages * size
    tokens = tuple(range(known + 1 - PROMPT))
    client.commit([TokenCommit(owner.key, owner.token, 0, tokens, KVWatermark(known, 0, WIDE.fingerprint))])
    node.daemon.end(signal.SIGKILL)
    node.daemon.start()
    await store.requeue("job", 1, [(owner.key, owner.token)], InterruptionCause.WORKER_DIED)
    second = await lease(store, 1, "w2", epoch=2)
    restored = available(lambda: restore(client, second.key, second.token, "w2", WIDE))
    assert (restored.record.watermark, restored.positions, restored.sources) == (known, known, ("store",))
    whole = b"".join(bytes([page + 1]) * (size * WIDE.slot_bytes) for page in range(pages))
    assert bytes(restored.kv) == whole


async def test_what_its_kv_costs_is_shown_and_what_is_not_known_is_not(node: Node, store: RedisStore) -> None:
    client = node.start("--kv-price-per-gb", "1000000", "--instance-price", "1.5", "--nic-bandwidth", "1MB")
    await start_job(store)
    owner, pages = await lease(store, 1, "w1"), Pages(client)
    for start in range(0, 400, 40):
        pages.put(owner, start, start + 40)
    pages.stored(owner, 400)
    out = '{direction="out",place="store"}'
    until(lambda: node.metric(f"tideover_kv_traffic_bytes_per_second{out}") > 0)
    until(lambda: node.metric(f"tideover_kv_nic_share{out}") > 0)
    assert node.metric('tideover_money_per_hour{what="store"}') > 0
    assert node.metric('tideover_money_per_hour{what="instance"}') == 1.5
    with pytest.raises(AssertionError):
        node.metric('tideover_money_per_hour{what="peer"}')


async def test_a_daemon_ends_in_order_while_its_kv_store_hangs(node: Node, store: RedisStore) -> None:
    client = node.start()
    await start_job(store)
    owner, pages = await lease(store, 1, "w1"), Pages(client)
    pages.put(owner, 0, 40)
    pages.stored(owner, 40)
    node.servers.kv.pause()
    for position in range(40, 44):
        pages.put(owner, position, position + 1)
    assert node.daemon.end(signal.SIGTERM) == 0
    node.servers.kv.resume()


async def test_hundreds_of_requests_later_nothing_is_left(node: Node, store: RedisStore) -> None:
    """Requests that end, are crashed out of and go on, each with KV under way. Those that never end are the sweeper's."""
    client, draw, lines = node.start(), random.Random(5), 500
    await start_job(store, lines)
    pages = Pages(client)
    descriptors = 0
    for first in range(1, lines + 1, 50):
        batch = list(range(first, first + 50))
        leases = await store.lease("job", 1, [LeaseRequest(RequestKey("job", n), 0, "w1", "cpu-1") for n in batch])
        _run(client, pages, leases, draw)
        crashed = [one for one in leases if draw.random() < 0.4]
        await store.requeue("job", 1, [(one.key, one.token) for one in crashed], InterruptionCause.WORKER_DIED)
        if draw.random() < 0.5:
            pages.writer.attach()  # as the crashed worker's successor
        again = await store.lease("job", 1, [LeaseRequest(one.key, 2, "w2", "cpu-1") for one in crashed])
        _run(client, pages, again, draw)
        _finish(client, pages, [one for one in leases if one not in crashed] + again, draw)
        descriptors = descriptors or node.descriptors()
    await store.finish_job("job", 1)
    until(lambda: node.stored_bytes() == 0)
    pages.writer.announce([])
    assert node.metric("tideover_arena_used_bytes") == 64 * BLOCK, "granted to the worker"
    assert node.descriptors() <= descriptors + 4
    job = await store.get_job("job")
    assert job is not None and job.completed == lines


def _run(client: ContextClient, pages: Pages, leases: list[Lease], draw: random.Random) -> None:
    ends = {one.key: draw.randint(1, 3 * LAYOUT.page_size) for one in leases}
    for one in leases:
        pages.put(one, 0, ends[one.key])
    mine = [one for one in leases if one.token.epoch == 1]
    client.commit([TokenCommit(one.key, one.token, 0, (5, 6), draw.choice([None, mark(4)])) for one in mine])
    for one in leases:
        pages.put(one, ends[one.key], ends[one.key] + 1)


def _finish(client: ContextClient, pages: Pages, leases: list[Lease], draw: random.Random) -> None:
    """The last KV is announced before or after the end, or is on its way to the KV store with it."""
    draw.shuffle(leases)
    for at in range(0, len(leases), 5):
        group = leases[at : at + 5]
        last = [pages.writer.write(one.key, one.token.epoch, PROMPT, 0, raw_slots(0, 5)) for one in group]
        known = [item for item in last if item is not None]
        count = draw.randint(0, len(known))
        pages.writer.announce(known[:count])
        ends = [TokenCommit(one.key, one.token, 2, (7,), finish=Finish(True, b"{}")) for one in group]
        assert {result.status for result in client.commit(ends)} == {CommitStatus.OK}
        pages.writer.announce(known[count:])
        for one in group:
            pages.writer.forget(one.key, one.token.epoch)
