"""Pages on their way from the arena to the KV store, past failures, losses and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from flaky_kv import FlakyKV

from context_daemon import shipper as shipper_module
from context_daemon.arena import MIN_BYTES, Arena, slab_bytes
from context_daemon.commit_mode import KVCommit, ShipBudget, ShipPolicy
from context_daemon.kv_service import KVService
from context_daemon.kv_slots import frame, framed_size, identity
from context_daemon.kv_writer import SlotRange
from context_daemon.page_records import Shape
from context_daemon.page_table import PageTable
from context_daemon.records import RequestKey
from context_daemon.shipper import Shipper
from context_daemon.slabs import Slabs

SLOT, SIZE, PROMPT = 48, 4, 6
SHAPE = Shape("lay", SLOT, SIZE)


class Rig:
    def __init__(self, mode: KVCommit = KVCommit.STORE) -> None:
        self.kv = FlakyKV()
        self.arena = Arena(8 * MIN_BYTES)
        self.slabs = Slabs(8 * MIN_BYTES, slab_bytes(8 * MIN_BYTES))
        self.table = PageTable(self.slabs.give, lambda: 0.0)
        self.noticed = False
        policy = ShipPolicy(ShipBudget(mode), 0.0)
        self.shipper = Shipper(self.table, self.arena, self.kv, policy, lambda: self.noticed)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self.shipper.run())

    def put(self, line: int, start: int, stop: int, epoch: int = 1, shape: Shape = SHAPE) -> None:
        """As an owner writes, seals and announces."""
        key, step = RequestKey("job", line), framed_size(shape.slot_bytes)
        blocks = []
        for number in range(start // SIZE, -(-stop // SIZE)):
            known = self.table.block_of(key, shape, number, epoch)
            (block,) = [known] if known is not None else self.slabs.take(shape.block_bytes, 1)
            first, until = max(start, number * SIZE), min(stop, (number + 1) * SIZE)
            at = block + (first - number * SIZE) * step
            self.arena.view[at : at + (until - first) * step] = framed(line, first, until, epoch, shape)
            blocks.append(block)
        self.table.announce(key, shape, epoch, PROMPT, start, blocks, stop)
        self.shipper.due(key)

    async def stored(self, line: int, stop: int, epoch: int = 1, shape: Shape = SHAPE) -> bool:
        pages = [
            await self.kv.memory.read_page(RequestKey("job", line), epoch, shape.layout, number) or b""
            for number in range(-(-stop // SIZE))
        ]
        return b"".join(pages) == framed(line, 0, stop, epoch, shape)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.arena.close()


def framed(line: int, start: int, stop: int, epoch: int = 1, shape: Shape = SHAPE) -> bytes:
    raw = b"".join(bytes([(line + position) % 251]) * shape.slot_bytes for position in range(start, stop))
    return frame(identity(RequestKey("job", line), epoch, shape.layout), start, raw, shape.slot_bytes)


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(shipper_module, "_PAUSE_S", 0.02)
    made = Rig()
    yield made
    await made.stop()


@pytest.fixture
async def grace() -> AsyncIterator[Rig]:
    made = Rig(KVCommit.GRACE)
    yield made
    await made.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - conditions of many kinds
            await asyncio.sleep(0.005)


def nothing_due(rig: Rig) -> bool:
    return not any(rig.table.due(entry.key) for entry in rig.table.entries())


async def test_what_is_due_arrives_byte_for_byte(rig: Rig) -> None:
    ends = dict.fromkeys(range(1, 6), 0)
    for turn in range(30):
        for line in ends:
            count = (turn * line) % 7 + 1 if turn < 3 else 1
            rig.put(line, ends[line], ends[line] + count)
            ends[line] += count
        await asyncio.sleep(0)
    await until(lambda: nothing_due(rig))
    for line, stop in ends.items():
        assert await rig.stored(line, stop) and rig.table.stored(RequestKey("job", line), 1) == stop
    rig.put(1, ends[1] // SIZE * SIZE, ends[1], epoch=3)
    await until(lambda: nothing_due(rig))
    assert rig.table.stored(RequestKey("job", 1), 3) == ends[1]


async def test_a_store_that_comes_back_catches_up_in_order(rig: Rig) -> None:
    rig.kv.away = {"even", "odd"}
    for start in range(0, 60, 3):
        for line in (1, 2, 3):
            rig.put(line, start, start + 3)
        await asyncio.sleep(0.005)
    assert all(rig.table.stored(RequestKey("job", line), 1) == 0 for line in (1, 2, 3))
    rig.kv.away = set()
    await until(lambda: nothing_due(rig))
    for line in (1, 2, 3):
        assert await rig.stored(line, 60)
        starts = [write.start for write in rig.kv.written if write.key.line == line]
        assert starts == sorted(starts)


async def test_what_a_server_refuses_holds_up_no_other_request(rig: Rig) -> None:
    rig.kv.away = {"odd"}
    for line in range(1, 9):
        rig.put(line, 0, 10)
    await until(lambda: all(rig.table.stored(RequestKey("job", line), 1) == 10 for line in (2, 4, 6, 8)))
    rig.put(2, 10, 14)
    await until(lambda: rig.table.stored(RequestKey("job", 2), 1) == 14)
    assert all(rig.table.stored(RequestKey("job", line), 1) == 0 for line in (1, 3, 5, 7))
    rig.kv.away = set()
    await until(lambda: nothing_due(rig))
    assert all([await rig.stored(line, 10) for line in (1, 3, 5, 7)])


async def test_what_the_store_lost_is_written_again(rig: Rig) -> None:
    for line in (1, 2):
        rig.put(line, 0, 10)
    await until(lambda: nothing_due(rig))
    rig.kv.memory.lose_everything()
    for line in (1, 2):
        rig.put(line, 10, 11)
    await until(lambda: nothing_due(rig))
    assert await rig.stored(1, 11) and await rig.stored(2, 11)


async def test_a_request_that_ends_under_way_keeps_its_bytes_until_they_are_sent(rig: Rig) -> None:
    rig.kv.open.clear()
    rig.put(1, 0, 8)
    await rig.kv.asked.wait()
    rig.table.end(RequestKey("job", 1))
    assert rig.slabs.used_bytes == 2 * SHAPE.block_bytes
    rig.kv.open.set()
    rig.put(3, 0, 4)
    await until(lambda: nothing_due(rig) and bool(rig.table.stored(RequestKey("job", 3), 1)))
    assert await rig.stored(1, 8)
    assert rig.slabs.used_bytes == SHAPE.block_bytes


async def test_others_have_their_turn_after_each_batch(rig: Rig) -> None:
    wide = Shape("wide", 10_000, SIZE)
    for line in (1, 3, 5):
        rig.put(line, 0, 60, shape=wide)
    turns, most = 0, 0
    while not nothing_due(rig):
        before = len(rig.kv.batches)
        await asyncio.sleep(0)
        turns, most = turns + 1, max(most, len(rig.kv.batches) - before)
    assert most <= 1
    assert max(rig.kv.batches) <= shipper_module._BATCH_BYTES + wide.block_bytes


async def test_small_batches_leave_others_their_turn_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipper_module, "_BATCH_BYTES", 1)
    for line in range(1, 20):
        rig.put(line, 0, 30)
    while not nothing_due(rig):
        before = len(rig.kv.batches)
        await asyncio.sleep(0)
        assert len(rig.kv.batches) - before <= 2, "one for each server"
    assert len(rig.kv.batches) == 19 * 8


async def test_grace_holds_everything_until_a_notice_and_then_lets_it_go(grace: Rig) -> None:
    for line in range(1, 6):
        grace.put(line, 0, 10 + line)
    await asyncio.sleep(0.2)
    assert grace.kv.written == []
    grace.noticed = True
    await until(lambda: nothing_due(grace))
    assert all([await grace.stored(line, 10 + line) for line in range(1, 6)])
    first = next(write.key.line for write in grace.kv.written)
    assert first in (4, 5), "the longest of a server goes first"


async def test_what_ended_unshipped_is_not_remembered(grace: Rig) -> None:
    for line in range(1, 100):
        grace.put(line, 0, 4)
        grace.table.end(RequestKey("job", line))
    grace.put(100, 0, 4)
    await until(lambda: list(grace.shipper._due) == [RequestKey("job", 100)])


async def test_an_error_that_is_not_the_stores_ends_the_shipping(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: object) -> str:
        raise TypeError("a bug")

    monkeypatch.setattr(rig.kv, "write_slots", broken)
    rig.put(1, 0, 4)
    with pytest.raises(TypeError, match="a bug"):
        await asyncio.wait_for(asyncio.shield(rig.task), 20)


async def test_a_service_closes_while_a_write_hangs() -> None:
    kv = FlakyKV()
    kv.open.clear()
    budget = ShipBudget(KVCommit.STORE)
    service = KVService(kv, here="", arena_bytes=MIN_BYTES, budget=budget, noticed=lambda: False)  # type: ignore[arg-type]
    running = asyncio.create_task(service.shipper.run())
    (block, *_) = service.attach(SHAPE, 1, 4).granted
    ranges = [SlotRange(RequestKey("job", 1), 1, PROMPT, 0, SIZE, (block,))]
    service.announce(service.arena.arena_id, 1, ranges, (), 0)
    await kv.asked.wait()
    running.cancel()
    ended = await asyncio.gather(running, return_exceptions=True)
    await service.close()
    assert isinstance(ended[0], asyncio.CancelledError)
