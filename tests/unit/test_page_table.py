"""The books of the arena: whose each block is, what counts of it, what of it is in the KV store."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_table_rig import KEYS, PROMPT, SHAPE, all_held

from context_daemon import page_table
from context_daemon.page_records import Held
from context_daemon.page_table import PageTable
from context_daemon.records import RequestKey


@pytest.fixture
def freed() -> list[int]:
    return []


@pytest.fixture
def table(freed: list[int]) -> PageTable:
    return PageTable(freed.append, lambda: 0.0)


def put(table: PageTable, start: int, stop: int, blocks: list[int], epoch: int = 1) -> int:
    return table.announce(KEYS[0], SHAPE, epoch, PROMPT, start, blocks, stop)


def slots(table: PageTable) -> list[tuple[int, int, int]]:
    return sorted((h.number, h.epoch, h.slots) for h in all_held(table, KEYS[0], "lay").values())


@pytest.mark.parametrize("before", [True, False])
def test_a_commit_counts_before_and_after_its_announcement(table: PageTable, before: bool) -> None:
    if before:
        table.committed(KEYS[0], 1, 4)
    assert put(table, 0, 12, [1, 2, 3]) == 12
    if not before:
        assert slots(table) == [(0, 1, 4), (1, 1, 2)], "the prompt counts at once"
        table.committed(KEYS[0], 1, 4)
    table.committed(KEYS[0], 1, 2)  # a late word
    table.committed(KEYS[0], 2, 9)  # another epoch's
    assert slots(table) == [(0, 1, 4), (1, 1, 4), (2, 1, 2)]


def test_of_two_epochs_the_longer_page_is_held_and_then_the_later(table: PageTable) -> None:
    put(table, 0, 6, [1, 2], epoch=1)
    put(table, 4, 5, [3], epoch=3)
    assert slots(table) == [(0, 1, 4), (1, 1, 2)]
    put(table, 5, 6, [3], epoch=3)
    assert slots(table) == [(0, 1, 4), (1, 3, 2)]


def test_reach_ends_at_a_hole_and_goes_on_when_it_is_filled(table: PageTable, freed: list[int]) -> None:
    assert put(table, 0, 4, [1]) == 4
    assert put(table, 8, 10, [3]) == 10
    assert put(table, 6, 8, [2]) == 4, "page 1 has no beginning"
    assert put(table, 4, 8, [2]) == 10
    assert freed == []


def test_pages_stored_out_of_order_count_once_the_hole_is_filled(table: PageTable) -> None:
    """A first range that found no room is written after the second."""
    put(table, 4, 8, [2])
    (late,) = table.due(KEYS[0])
    put(table, 0, 4, [1])
    table.mark_stored(late)
    assert table.stored(KEYS[0], 1) == 0
    (first,) = table.due(KEYS[0])
    table.mark_stored(first)
    assert table.stored(KEYS[0], 1) == 8


def test_a_page_evicted_on_its_way_to_the_store_is_stored_all_the_same(table: PageTable) -> None:
    put(table, 0, 8, [1, 2])
    first, second = table.due(KEYS[0])
    assert table.evict(KEYS[0], 0, 1)
    table.mark_stored(first)
    table.mark_stored(second)
    assert table.stored(KEYS[0], 1) == 8


def test_slots_overwritten_on_their_way_are_shipped_again(table: PageTable) -> None:
    put(table, 0, 4, [1])
    (under_way,) = table.due(KEYS[0])
    put(table, 2, 4, [1])
    table.mark_stored(under_way)
    assert table.stored(KEYS[0], 1) == 0
    assert [(due.start, due.stop) for due in table.due(KEYS[0])] == [(0, 4)]


def test_a_late_word_of_a_disowned_epoch_keeps_nothing_from_eviction(table: PageTable, freed: list[int]) -> None:
    put(table, 0, 2, [1])
    table.disown(KEYS[0], 1)
    put(table, 2, 3, [1])
    assert table.evict(KEYS[0], 0, 1) and freed == [1]
    assert len(table) == 0


def test_an_owners_entry_goes_with_its_last_page_and_its_owner(table: PageTable) -> None:
    put(table, 0, 4, [1])
    assert table.evict(KEYS[0], 0, 1) and len(table) == 1, "its owner writes on"
    table.disown(KEYS[0], 1)
    assert len(table) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=100))
def test_memories_are_bounded_and_keep_the_latest(words: list[tuple[bool, int]]) -> None:
    with mock.patch.object(page_table, "_REMEMBERED", 5):
        table = PageTable(lambda _: None, lambda: 0.0)
        for ended, line in words:
            if ended:
                table.end(RequestKey("job", line))
            else:
                table.committed(RequestKey("job", line), 1, line)
    latest = {memory: [line for ended, line in words if ended is memory][-1:] for memory in (True, False)}
    assert len(table._ended) <= 5 and len(table._lengths) <= 5
    assert {key.line for key in table._ended} >= set(latest[True])
    assert {key.line for key, _ in table._lengths} >= set(latest[False])


def ship(table: PageTable, count: int = 100) -> None:
    for due in table.due(KEYS[0])[:count]:
        table.mark_stored(due)


def test_an_owner_that_goes_back_before_its_first_page_has_nothing_stored_until_that_is_there(table: PageTable) -> None:
    """Its older pages were lost before it first announced: what it stored from its first page on is behind a hole."""
    put(table, 8, 14, [0, 1], epoch=2)
    ship(table)
    assert table.stored(KEYS[0], 2) == 14
    put(table, 0, 14, [2, 3, 4, 5], epoch=2)
    assert table.stored(KEYS[0], 2) == 0
    ship(table, 2)
    assert table.stored(KEYS[0], 2) == 8
    ship(table)
    assert table.stored(KEYS[0], 2) == 14


def test_what_is_lost_is_due_again_from_the_first_slot_on(table: PageTable) -> None:
    put(table, 0, 6, [0, 1])
    ship(table, 1)
    under_way = table.due(KEYS[0])
    table.mark_lost(KEYS[0])
    assert table.stored(KEYS[0], 1) == 0 and [(d.start, d.stop) for d in table.due(KEYS[0])] == [(0, 4), (0, 2)]
    put(table, 6, 7, [1])
    ship(table, 1)
    assert table.stored(KEYS[0], 1) == 4
    for due in under_way:  # went to the new server: it has these two, and not the third
        table.mark_stored(due)
    assert table.stored(KEYS[0], 1) == 6 and [(d.start, d.stop) for d in table.due(KEYS[0])] == [(2, 3)]


def test_a_page_pushed_out_unshipped_is_a_hole_until_it_is_there_again(table: PageTable) -> None:
    put(table, 0, 16, [1, 2, 3, 4])
    first, second, third, fourth = table.due(KEYS[0])
    assert table.evict(KEYS[0], 1, 1) and second.number == 1
    assert table.hole(KEYS[0], 1) == (0, 0), "others are still to be shipped"
    for due in (first, third, fourth):
        table.mark_stored(due)
    assert table.evict(KEYS[0], 2, 1), "in the store"
    assert (table.stored(KEYS[0], 1), table.hole(KEYS[0], 1)) == (4, (4, 8))
    put(table, 4, 8, [5])
    assert table.hole(KEYS[0], 1) == (0, 0)
    table.mark_stored(*table.due(KEYS[0]))
    assert table.stored(KEYS[0], 1) == 16, "over what was stored behind it and has left since"


def test_a_guest_fills_the_hole_that_its_page_left(table: PageTable) -> None:
    """Pushed out unshipped, then copied back from where its request ran on."""
    put(table, 0, 8, [1, 2])
    table.committed(KEYS[0], 1, 2)
    assert table.evict(KEYS[0], 0, 1)
    entry = table.get(KEYS[0])
    assert entry is not None and entry.holes.missing == {(0, 1)}
    table.disown(KEYS[0], 1)
    assert table.adopt(KEYS[0], SHAPE, Held(0, 1, 3, 4))
    assert entry.holes.missing == set()
    assert slots(table) == [(0, 1, 4), (1, 1, 4)]
