"""The real daemon over real servers: a process of its own, gRPC on loopback, kills and corruption."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import grpc
import pytest
import redis
from daemon_rig import LAYOUT, PROMPT, Daemon, Pages, available, lease, mark, raw_slots, restore, start_job, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from store_samples import job_record, spec, worker_status

from context_daemon import kv_slots
from context_daemon.client import ContextClient, NotOwner, UnknownRequest
from context_daemon.daemon import SERVICE
from context_daemon.kv_pages import page_key
from context_daemon.kv_writer import ArenaGone, Attachment, SlotRange
from context_daemon.page_records import Shape
from context_daemon.records import (
    CommitStatus,
    FencingToken,
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
from context_daemon.redis_server import EmbeddedServers, port_is_free
from context_daemon.redis_store import RedisStore
from context_daemon.store import StoreUnavailable


@pytest.fixture
async def store(own_servers: EmbeddedServers) -> Any:
    made = RedisStore(own_servers.durable.url)
    yield made
    await made.close()


async def test_commit_and_restore_over_epochs(
    client: ContextClient, elsewhere: ContextClient, pages: Pages, store: RedisStore
) -> None:
    await start_job(store)
    first = await lease(store, 1, "w1")
    for start, stop in ((0, 4), (4, 8), (8, 10), (10, 11)):
        pages.put(first, start, stop)
    pages.stored(first, 11)
    (result,) = client.commit([TokenCommit(first.key, first.token, 0, (5, 6), mark(11))])
    assert (result.status, result.length) == (CommitStatus.OK, 2)
    await store.requeue("job", 1, [(first.key, first.token)], InterruptionCause.WORKER_DIED)
    second = await lease(store, 1, "w2", epoch=2)
    ways = (
        (client, pages.writer, "arena"),
        (client, None, "arena"),
        (elsewhere, None, "peer"),
        (elsewhere, None, "store"),
    )
    for daemon, arena, source in ways:
        record, raw, positions, sources = restore(
            daemon, second.key, second.token, "w2", LAYOUT, arena=arena, only=source
        )
        assert record.tokens == (5, 6) and positions == 11 == record.watermark
        assert bytes(raw) == raw_slots(0, 11) and sources == (source,)

    # The new owner writes from the open page on; the two sealed pages stay under the first epoch.
    pages.put(second, 8, 13)
    pages.stored(second, 13)
    client.commit([TokenCommit(second.key, second.token, 2, (7, 8), mark(13, first_page=2))])
    for daemon, arena in ((client, pages.writer), (elsewhere, None)):
        record, raw, positions, _ = restore(daemon, second.key, second.token, "w2", LAYOUT, arena=arena)
        assert [(s.epoch, s.first_page) for s in record.segments] == [(1, 0), (3, 2)]
        assert positions == 13 and bytes(raw) == raw_slots(0, 13)


@pytest.mark.parametrize(
    ("page", "damage", "left"),
    [
        (1, "flip", 4), (1, "truncate", 7), (1, "swap", 4), (1, "delete", 4),
        (0, "delete", 0), (2, "flip", 8), (1, "hole", 4),
    ],
)  # fmt: skip
async def test_damaged_pages_are_absent(
    client: ContextClient,
    elsewhere: ContextClient,
    pages: Pages,
    store: RedisStore,
    own_servers: EmbeddedServers,
    page: int,
    damage: str,
    left: int,
) -> None:
    await start_job(store)
    owner = await lease(store, 1, "w1")
    pages.put(owner, 0, 12)
    pages.stored(owner, 12)
    client.commit([TokenCommit(owner.key, owner.token, 0, (5, 6, 7), mark(12))])
    raw_server = redis.Redis.from_url(own_servers.kv.url)
    name = page_key(LAYOUT.fingerprint, owner.key, 1, page)
    value = bytearray(raw_server.get(name) or b"")
    if damage == "flip":
        value[3] ^= 1
    elif damage == "truncate":
        value = value[:-1]
    elif damage == "swap":
        value = bytearray(raw_server.get(page_key(LAYOUT.fingerprint, owner.key, 1, page + 1)) or b"")
    elif damage == "hole":
        value[: kv_slots.framed_size(LAYOUT.slot_bytes)] = bytes(kv_slots.framed_size(LAYOUT.slot_bytes))
    raw_server.delete(name)
    if damage != "delete":
        raw_server.set(name, bytes(value))
    raw_server.close()
    record, raw, positions, _ = restore(elsewhere, owner.key, owner.token, "w1", LAYOUT, only="store")
    assert positions == left and bytes(raw) == raw_slots(0, left)
    assert record.watermark == 12


async def test_restore_never_goes_past_what_is_committed(
    client: ContextClient, elsewhere: ContextClient, pages: Pages, store: RedisStore
) -> None:
    """Slots behind the watermark may belong to tokens that were never committed."""
    await start_job(store)
    owner = await lease(store, 1, "w1")
    pages.put(owner, 0, 20)
    pages.stored(owner, 20)
    client.commit([TokenCommit(owner.key, owner.token, 0, (5,), mark(6))])
    assert restore(elsewhere, owner.key, owner.token, "w1", LAYOUT, only="store").positions == 6
    assert restore(client, owner.key, owner.token, "w1", LAYOUT).positions == PROMPT, "T-1 with one token"


async def test_an_owners_uncommitted_slots_are_no_successors(
    client: ContextClient, pages: Pages, store: RedisStore
) -> None:
    """The first owner ran two tokens past its last commit; the next one's tokens there may be others."""
    await start_job(store)
    first = await lease(store, 1, "w1")
    pages.put(first, 0, 14)
    client.commit([TokenCommit(first.key, first.token, 0, (5, 6))])
    await store.requeue("job", 1, [(first.key, first.token)], InterruptionCause.WORKER_DIED)
    second = await lease(store, 1, "w2", epoch=2)
    client.commit([TokenCommit(second.key, second.token, 2, (7, 8, 9))])
    assert restore(client, second.key, second.token, "w2", LAYOUT, arena=pages.writer).positions == PROMPT + 2


async def test_restore_of_another_layout_gives_the_record_only(
    client: ContextClient, pages: Pages, store: RedisStore
) -> None:
    await start_job(store)
    owner = await lease(store, 1, "w1")
    pages.put(owner, 0, 8)
    client.commit([TokenCommit(owner.key, owner.token, 0, (5,), mark(8))])
    other = KVLayout("other", "cpu-1", "float32", 2, 1, 4, 4)
    record, raw, positions, _ = restore(client, owner.key, owner.token, "w1", other)
    assert record.watermark == 8 and positions == 0 and not raw


async def test_only_the_owner_restores(client: ContextClient, store: RedisStore) -> None:
    await start_job(store)
    owner = await lease(store, 1, "w1")
    for token, worker in ((FencingToken(1, 0), "w1"), (FencingToken(2, 1), "w1"), (owner.token, "w2")):
        with pytest.raises(NotOwner):
            restore(client, owner.key, token, worker, LAYOUT)
    with pytest.raises(UnknownRequest):
        restore(client, RequestKey("job", 99), owner.token, "w1", LAYOUT)


async def test_handover_by_client(client: ContextClient, store: RedisStore) -> None:
    await start_job(store)
    owner = await lease(store, 1, "w1")
    client.commit([TokenCommit(owner.key, owner.token, 0, (5, 6))])
    assert client.handover(owner.key, owner.token, 1, None, "w2") is None
    moved = client.handover(owner.key, owner.token, 2, None, "w2")
    assert moved == Lease(owner.key, FencingToken(1, 2), "w2")
    assert client.handover(owner.key, owner.token, 2, None, "w2") == moved  # the reply was lost
    (late,) = client.commit([TokenCommit(owner.key, owner.token, 2, (7,))])
    assert late.status is CommitStatus.FENCED


async def test_heartbeats_carry_only_this_nodes_notices(client: ContextClient, store: RedisStore) -> None:
    mine = Notice("node-1", NoticeKind.TERMINATE, time.time() + 60, "elsewhere")
    await store.put_notice(mine)
    await store.put_notice(Notice("node-2", NoticeKind.TERMINATE, time.time() + 60, "elsewhere"))
    until(lambda: client.heartbeat(worker_status("w1", "node-1")) == [mine])
    assert [status.worker_id for status in await store.workers()] == ["w1"]


async def test_a_finished_request_leaves_no_pages(
    client: ContextClient, pages: Pages, store: RedisStore, own_servers: EmbeddedServers
) -> None:
    await start_job(store)
    owner = await lease(store, 1, "w1")
    pages.put(owner, 0, 11)
    pages.stored(owner, 11)
    client.commit([TokenCommit(owner.key, owner.token, 0, (5, 6), mark(11))])
    client.commit([TokenCommit(owner.key, owner.token, 2, (7,), finish=Finish(True, b"{}"))])
    raw_server = redis.Redis.from_url(own_servers.kv.url)
    until(lambda: not raw_server.keys("kv:*:job:*"))
    raw_server.close()


async def test_daemon_killed_and_started_again(client: ContextClient, daemon: Daemon, store: RedisStore) -> None:
    await start_job(store)
    owner = await lease(store, 1, "w1")
    client.commit([TokenCommit(owner.key, owner.token, 0, (5,))])
    daemon.end(signal.SIGKILL)
    with pytest.raises(StoreUnavailable):
        client.commit([TokenCommit(owner.key, owner.token, 1, (6,))])
    daemon.start()
    (result,) = available(lambda: client.commit([TokenCommit(owner.key, owner.token, 1, (6,))]))
    assert result.length == 2
    assert daemon.end(signal.SIGTERM) == 0
    assert port_is_free("127.0.0.1", daemon.port)


def test_health_and_a_port_in_use(daemon: Daemon, own_servers: EmbeddedServers) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{daemon.port}") as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    second = Daemon(own_servers)
    command = [str(daemon.port).join(part.split(str(second.port))) for part in second._command]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False, env=dict(os.environ))
    assert ended.returncode != 0 and f"cannot listen on 127.0.0.1:{daemon.port}" in ended.stderr.decode()


async def test_large_writes_are_read_back_whole(
    client: ContextClient, elsewhere: ContextClient, store: RedisStore
) -> None:
    wide = KVLayout("wide", "cpu-1", "float32", num_layers=16, num_kv_heads=8, head_dim=64, page_size=4)
    await store.create_job(job_record("job"))
    await store.add_requests("job", [spec(1, 80)])
    await store.start_job("job", 1)
    owner = await lease(store, 1, "w1")
    raw = os.urandom(75 * wide.slot_bytes)
    pages = Pages(client, wide)
    pages.put(owner, 0, 2, raw[: 2 * wide.slot_bytes])
    pages.put(owner, 2, 75, raw[2 * wide.slot_bytes :])
    pages.stored(owner, 75)
    client.commit([TokenCommit(owner.key, owner.token, 0, (1,), KVWatermark(75, 0, wide.fingerprint))])
    there = Pages(elsewhere, wide)
    for daemon, arena in ((elsewhere, None), (elsewhere, there.writer), (client, pages.writer)):
        _, got, positions, _ = restore(daemon, owner.key, owner.token, "w1", wide, arena=arena)
        assert positions == 75 and bytes(got) == raw


def test_bad_messages_are_refused_by_name(client: ContextClient, pages: Pages) -> None:
    stranger = SlotRange(RequestKey("job", 1), 1, 10, 0, 4, (1 << 20,))
    with pytest.raises(ValueError, match="was not granted"):
        pages.writer._calls.announce(pages.writer._attachment, [stranger], (), 0)  # type: ignore[arg-type]
    short = SlotRange(RequestKey("job", 1), 1, 10, 0, 9, (0,))
    with pytest.raises(ValueError, match="3 pages"):
        pages.writer._calls.announce(pages.writer._attachment, [short], (), 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="do not fit the arena"):
        client.attach_arena(Shape("huge", 1 << 40, 16), 1)
    with pytest.raises(ArenaGone, match="attach again"):
        client.announce(Attachment("another", "", 0, 1, ()), [], (), 0)
    with pytest.raises(ValueError, match="job id"):
        client.commit([TokenCommit(RequestKey("a}{b", 1), FencingToken(1, 1), 0, (1,))])
