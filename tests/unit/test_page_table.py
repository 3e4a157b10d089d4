from __future__ import annotations

from context_daemon.page_table import PageTable, Shape
from context_daemon.records import RequestKey

KEY, SHAPE = RequestKey("job", 1), Shape("lay", 8, 4)


def ship(table: PageTable, count: int = 100) -> None:
    for due in table.due(KEY)[:count]:
        table.mark_stored(due)


def test_an_owner_that_goes_back_before_its_first_page_has_nothing_stored_until_that_is_there() -> None:
    """Its older pages were lost before it first announced: what it stored from its first page on is behind a hole."""
    table = PageTable(lambda block: None, lambda: 0.0)
    table.announce(KEY, SHAPE, 2, 20, 8, [0, 1], 14)
    ship(table)
    assert table.stored(KEY, 2) == 14
    table.announce(KEY, SHAPE, 2, 20, 0, [2, 3, 4, 5], 14)
    assert table.stored(KEY, 2) == 0
    ship(table, 2)
    assert table.stored(KEY, 2) == 8
    ship(table)
    assert table.stored(KEY, 2) == 14


def test_what_is_lost_is_due_again_from_the_first_slot_on() -> None:
    table = PageTable(lambda block: None, lambda: 0.0)
    table.announce(KEY, SHAPE, 1, 20, 0, [0, 1], 6)
    ship(table, 1)
    under_way = table.due(KEY)
    table.mark_lost(KEY)
    assert table.stored(KEY, 1) == 0 and [(due.start, due.stop) for due in table.due(KEY)] == [(0, 4), (0, 2)]
    table.announce(KEY, SHAPE, 1, 20, 6, [1], 7)
    ship(table, 1)
    assert table.stored(KEY, 1) == 4
    for due in under_way:  # went to the new server: it has these two, and not the third
        table.mark_stored(due)
    assert table.stored(KEY, 1) == 6 and [(due.start, due.stop) for due in table.due(KEY)] == [(2, 3)]
