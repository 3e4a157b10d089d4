from __future__ import annotations

import pytest
from msgspec.structs import replace

from context_daemon.memory_store import MemoryStore
from context_daemon.page_records import Entry, Page, Shape
from context_daemon.page_table import PageTable
from context_daemon.records import (
    Endpoint,
    FencingToken,
    RequestKey,
    RequestRecord,
    RequestSpec,
    RequestState,
    SamplingParams,
)
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


async def test_only_what_is_quiet_is_asked_for_and_what_is_over_is_let_go() -> None:
    freed: list[int] = []
    now = [0.0]
    table = PageTable(freed.append, lambda: now[0])
    table.announce(KEY, SHAPE, 1, 2, 0, [7], 4)
    sweeper = Sweeper(table, MemoryStore(), "here")
    assert await sweeper.sweep(QUIET_S - 1) == 0 and freed == []
    assert await sweeper.sweep(QUIET_S) == 1 and freed == [7], "no job has such a request"
