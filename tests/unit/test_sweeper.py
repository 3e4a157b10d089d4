from __future__ import annotations

import pytest
from msgspec.structs import replace

from context_daemon.kv_garbage import Why, why_garbage
from context_daemon.memory_kv import MemoryKV
from context_daemon.page_drop import PageDrop
from context_daemon.page_records import Entry, Page, Shape
from context_daemon.page_table import PageTable
from context_daemon.records import (
    Endpoint,
    FencingToken,
    KVSegment,
    RequestKey,
    RequestRecord,
    RequestSpec,
    RequestState,
    SamplingParams,
)
from context_daemon.store import SlotWrite, StoredPage
from context_daemon.sweeper import QUIET_S, Fate, Sweeper, fate

KEY, SHAPE = RequestKey("job", 1), Shape("lay", 8, 4)
SPEC = RequestSpec(1, "c1", Endpoint.COMPLETIONS, (1, 2), SamplingParams(seed=1, max_tokens=4))
RECORD = RequestRecord(
    key=KEY, spec=SPEC, state=RequestState.LEASED, token=FencingToken(1, 3), worker_id="w", tokens=(), watermark=0,
    layout="", segments=(), numerics_class="", exact=True, attempts=0, interruptions=0, kv_at="here",
)  # fmt: skip


def entry(epoch: int, owner: int) -> Entry:
    return Entry(KEY, SHAPE, 0.0, pages={0: {epoch: Page(epoch, 0, 4)}}, owner=owner)


@pytest.mark.parametrize(
    ("held", "record", "expected"),
    [
        (entry(3, 3), RECORD, Fate.KEEP),
        (entry(1, 1), RECORD, Fate.DISOWN),  # its lease ran out
        (entry(1, 0), RECORD, Fate.KEEP),  # whoever has it now may still come
        (entry(1, 0), replace(RECORD, state=RequestState.READY), Fate.KEEP),
        (entry(1, 0), replace(RECORD, kv_at="elsewhere"), Fate.FORGET),
        (entry(3, 3), replace(RECORD, kv_at="elsewhere"), Fate.KEEP),  # it has not committed here yet
        (entry(3, 3), replace(RECORD, state=RequestState.COMPLETED), Fate.END),
        (entry(3, 3), replace(RECORD, state=RequestState.CANCELLED), Fate.END),
        (entry(3, 3), None, Fate.END),
    ],
)
def test_what_the_store_says_decides(held: Entry, record: RequestRecord | None, expected: Fate) -> None:
    assert fate(held, record, "here") is expected


class Kept:
    """A store with one request, a KV store, and what of a KVService a sweeper meets."""

    def __init__(self, record: RequestRecord | None) -> None:
        self.now, self.freed, self.reaped = 0.0, list[int](), 0
        self.table = PageTable(self.freed.append, lambda: self.now)
        self.kv, self.record, self.shipper = MemoryKV(), record, self
        drop = PageDrop(self, self.kv, self)  # type: ignore[arg-type]
        self.sweeper = Sweeper(self.table, self, "here", drop, lambda: 0)  # type: ignore[arg-type]

    async def get_request(self, key: RequestKey) -> RequestRecord | None:
        return self.record

    async def landed(self, key: RequestKey) -> None: ...

    def page_size(self, layout: str) -> int:
        return SHAPE.page_size

    async def shipped(self, epoch: int, block: int) -> None:
        """A page of the request, in the arena and in the KV store."""
        self.table.announce(KEY, SHAPE, epoch, 2, 0, [block], 4)
        for due in self.table.due(KEY):
            self.table.sending(due)
            self.table.mark_stored(due)
            self.table.pins.unpin(due.block)
        data = bytes(4 * SHAPE.row_bytes)
        await self.kv.write_slots([SlotWrite(KEY, epoch, "lay", 0, 4, 8, 4, data)])

    async def stored_epochs(self) -> set[int]:
        return {page.epoch async for batch in self.kv.list_pages() for page in batch}


async def test_only_what_is_quiet_is_asked_for_and_what_is_over_is_let_go() -> None:
    kept = Kept(None)
    kept.table.announce(KEY, SHAPE, 1, 2, 0, [7], 4)
    assert await kept.sweeper.sweep(QUIET_S - 1) == 0 and kept.freed == []
    assert await kept.sweeper.sweep(QUIET_S) == 1 and kept.freed == [7], "no job has such a request"


async def test_what_is_over_leaves_the_kv_store_too() -> None:
    kept = Kept(replace(RECORD, state=RequestState.CANCELLED))
    await kept.shipped(1, 7)
    assert await kept.sweeper.sweep(QUIET_S) == 1
    assert await kept.stored_epochs() == set(), "the page reaches further than the two tokens of the record"


async def test_of_what_is_not_over_go_the_epochs_that_no_watermark_ever_named() -> None:
    named = replace(RECORD, layout="lay", segments=(KVSegment(2, 0),))
    kept = Kept(named)
    for epoch in (1, 2, 3):
        await kept.shipped(epoch, 10 + epoch)
    kept.table.announce(KEY, SHAPE, 1, 2, 4, [20], 6)  # of a dead owner, and not shipped
    await kept.sweeper.sweep(QUIET_S)
    assert await kept.stored_epochs() == {2, 3}, "3 owns it, and its watermark may be under way"
    assert kept.table.due(KEY) == [] and kept.freed == [], "what is in the arena stays"


@pytest.mark.parametrize(
    ("page_layout", "epoch", "record", "expected"),
    [
        ("lay", 1, None, Why.UNKNOWN),
        ("lay", 3, replace(RECORD, state=RequestState.FAILED), Why.OVER),
        ("lay", 3, RECORD, Why.NEEDED),
        ("other", 3, RECORD, Why.NEEDED),
        ("lay", 4, RECORD, Why.NEEDED),  # taken over since the record was read
        ("lay", 2, RECORD, Why.UNNAMED),
        ("lay", 2, replace(RECORD, layout="lay", segments=(KVSegment(2, 0),)), Why.NEEDED),
        ("other", 2, replace(RECORD, layout="lay", segments=(KVSegment(2, 0),)), Why.UNNAMED),
        ("lay", 2, replace(RECORD, state=RequestState.READY), Why.UNNAMED),
        ("lay", 3, replace(RECORD, state=RequestState.READY), Why.NEEDED),
    ],
)
def test_which_pages_nobody_will_come_for(
    page_layout: str, epoch: int, record: RequestRecord | None, expected: Why
) -> None:
    assert why_garbage(StoredPage(KEY, page_layout, epoch, 0, 9), record) is expected
