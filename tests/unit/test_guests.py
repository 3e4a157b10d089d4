"""What a target makes of a source's word, before it asks anybody else."""

from __future__ import annotations

import pytest
from page_table_rig import KEYS, SHAPE

from context_daemon.guests import Guests
from context_daemon.memory_store import MemoryStore
from context_daemon.page_records import Held
from context_daemon.page_table import PageTable
from context_daemon.preparation import Preparation, Wanted
from context_daemon.records import FencingToken, RequestKey, RequestRecord
from context_daemon.store import StoreUnavailable


class Away(MemoryStore):
    async def get_request(self, key: RequestKey) -> RequestRecord | None:
        raise StoreUnavailable("the durable server does not answer")


class Rooms:
    """A node with a worker and room; nothing may be fetched here."""

    def __init__(self) -> None:
        self.table = PageTable(lambda block: None, lambda: 0.0)

    def takes_guests(self, shape: object) -> bool:
        return True

    def room_for_guests(self, shape: object) -> bool:
        return True


def asked(epoch: int) -> Preparation:
    return Preparation("10.0.0.2:7070", SHAPE, (Wanted(KEYS[0], FencingToken(1, epoch), 8),))


@pytest.mark.parametrize(("epoch", "refused"), [(1, True), (2, True), (3, False)])
async def test_who_runs_here_already_is_known_without_the_store(epoch: int, refused: bool) -> None:
    """A source that froze speaks of a request whose next owner is here: its word ends at once, whatever else is away."""
    rooms = Rooms()
    rooms.table.announce(KEYS[0], SHAPE, 2, 6, 0, [1], 4)
    guests = Guests(rooms, None, Away(), lambda: 0.0)  # type: ignore[arg-type] - no peer is to be asked
    if refused:
        assert await guests.take(asked(epoch), "10.0.0.1:7070") == [0]
        return
    with pytest.raises(StoreUnavailable, match="does not answer"):
        await guests.take(asked(epoch), "10.0.0.1:7070")


async def test_what_lies_here_is_not_asked_for() -> None:
    rooms = Rooms()
    for page in (0, 1):
        assert rooms.table.adopt(KEYS[0], SHAPE, Held(page, 1, page + 1, SHAPE.page_size))
    guests = Guests(rooms, None, Away(), lambda: 0.0)  # type: ignore[arg-type]
    assert await guests.take(asked(1), "10.0.0.1:7070") == [8]
