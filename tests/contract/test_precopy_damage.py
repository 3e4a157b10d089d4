"""Pages that go ahead of a cut-over, when bytes, connections or processes fail: what came stays, nothing is poisoned."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from daemon_rig import until
from precopy_rig import ABSENT, SHAPE, SIZE, grow, handed_over, prepare, wanted
from transfer_rig import LAYOUT, PAGE, ROW, Node, Pair, attached, hold, moved, restored

from context_daemon.guests import LEASE_S
from context_daemon.kv_writer import KVWriter
from context_daemon.preparation import Preparation
from context_daemon.redis_server import EmbeddedServers
from context_daemon.redis_store import RedisStore
from context_daemon.store import StoreUnavailable


# -- bytes that are not what they were ----------------------------------------------------------------------------------
@pytest.mark.parametrize("stored", [False, True])
async def test_a_page_damaged_at_the_source_does_not_come(
    pair: Pair, there: KVWriter, durable: RedisStore, job: str, stored: bool
) -> None:
    client = pair.source.client()
    held = await hold(durable, client, job, 8, marked=None if stored else 0)
    until(held.stored)
    assert held.writer._arena is not None
    held.writer._arena.view[held.blocks[5] + 2 * ROW + 77] ^= 4
    before = pair.target.metric(ABSENT, reason="mismatch")
    reached = held.positions if stored else 5 * SIZE + 2
    assert prepare(client, pair.target, wanted(held)) == [reached], "the store has it, or nobody"
    assert pair.target.metric(ABSENT, reason="mismatch") >= before + 1
    lease = await handed_over(durable, held, 1)
    positions, sources = restored(pair.target.clients[-1], lease, held, there)
    assert positions == reached and (not stored or "arena" in sources)


async def test_a_page_damaged_at_the_target_is_absent(
    pair: Pair, there: KVWriter, durable: RedisStore, job: str
) -> None:
    client = pair.source.client()
    held = await hold(durable, client, job, 8)
    assert prepare(client, pair.target, wanted(held), last=True) == [held.positions]
    assert there._arena is not None
    sixth = bytes(memoryview(held.raw)[5 * SIZE * LAYOUT.slot_bytes :][: LAYOUT.slot_bytes])
    at = bytes(there._arena.view).find(sixth)
    assert at > 0
    there._arena.view[at + 7] ^= 4
    lease = await handed_over(durable, held, 1)
    assert restored(pair.target.clients[-1], lease, held, there) == (5 * SIZE, ("arena",))


# -- connections and processes that fail --------------------------------------------------------------------------------
async def test_a_connection_that_is_cut_or_stalls_costs_a_turn(
    pair: Pair, there: KVWriter, durable: RedisStore, job: str
) -> None:
    client = pair.source.client()
    held = await hold(durable, client, job, 32)
    pair.proxy.faults = [(9 * PAGE, "cut"), (10 * PAGE + 5, "cut")]
    assert prepare(client, pair.target, wanted(held, 24 * SIZE)) == [24 * SIZE]
    pair.proxy.faults = [(5 * PAGE + 100, "hang")]
    (reached,) = prepare(client, pair.target, wanted(held))
    assert reached >= 28 * SIZE, "what came stays"
    assert prepare(client, pair.target, wanted(held)) == [held.positions]


async def test_a_source_killed_in_the_middle(
    pair: Pair, there: KVWriter, servers: EmbeddedServers, pair_folder: Path, durable: RedisStore, job: str
) -> None:
    mortal = Node("mortal", pair_folder, servers.durable.url, servers.kv.url, fault="peer.pages:kill:3")
    try:
        client = mortal.ready().client()
        held = await hold(durable, client, job, 32)
        until(held.stored)
        used = pair.target.used
        with pytest.raises(StoreUnavailable):
            prepare(client, pair.target, wanted(held))
        assert mortal.process.wait(10) == -signal.SIGKILL
        lease = await moved(durable, held)
        positions, _ = restored(pair.target.clients[-1], lease, held, there)
        assert positions == held.positions
        again = await hold(durable, pair.source.client(), f"again-{job}", 2)
        assert prepare(pair.source.clients[-1], pair.target, wanted(again)) == [again.positions]
        assert pair.target.alive and pair.target.used >= used
    finally:
        mortal.kill()


@pytest.mark.parametrize("fault", ["guests.received:kill:1", "guests.page:kill:5", "guests.taken:kill:1"])
async def test_a_target_killed_in_the_middle(
    pair: Pair, servers: EmbeddedServers, pair_folder: Path, durable: RedisStore, job: str, fault: str
) -> None:
    mortal = Node("doomed", pair_folder, servers.durable.url, servers.kv.url, fault=fault)
    try:
        attached(mortal.ready().client())
        client = pair.source.client()
        held = await hold(durable, client, job, 16)
        with pytest.raises(StoreUnavailable):
            prepare(client, mortal, wanted(held))
        assert mortal.process.wait(10) == -signal.SIGKILL
        grow(held, client, 3)
        assert pair.source.door(held.lease.key)[2] == held.positions, "the source has lost nothing"
    finally:
        mortal.kill()


@pytest.mark.parametrize("fault", ["prepare.received:kill:1", "prepare.answered:kill:1"])
async def test_a_source_daemon_killed_before_and_after_the_answer(
    pair: Pair, there: KVWriter, servers: EmbeddedServers, pair_folder: Path, durable: RedisStore, job: str, fault: str
) -> None:
    mortal = Node("mute", pair_folder, servers.durable.url, servers.kv.url, fault=fault)
    try:
        client = mortal.ready().client()
        held = await hold(durable, client, job, 8)
        used = pair.target.used
        with pytest.raises(StoreUnavailable):
            prepare(client, pair.target, wanted(held))
        until(lambda: pair.target.used == used, LEASE_S + 10)
    finally:
        mortal.kill()


async def test_a_lost_answer_costs_nothing(pair: Pair, there: KVWriter, durable: RedisStore, job: str) -> None:
    """The caller gave up; it asks again, and the pages are there."""
    client = pair.source.client()
    held = await hold(durable, client, job, 32)
    with pytest.raises(StoreUnavailable):
        client.prepare(Preparation(pair.target.address, SHAPE, (wanted(held),)), 0.0005)
    came = len(pair.proxy.carried)
    assert prepare(client, pair.target, wanted(held)) == [held.positions]
    assert prepare(client, pair.target, wanted(held)) == [held.positions]
    assert len(pair.proxy.carried) <= came + 1, "what is there is not asked for again"
