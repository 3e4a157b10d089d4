"""Which pages leave a full arena first."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from context_daemon.eviction import Victim, victims
from context_daemon.page_records import Entry, Page, Shape
from context_daemon.records import RequestKey

SIZE = 4


def entry(line: int, *, owner: int = 0, stored: bool = False, touched: float = 0.0, pages: int = 1) -> Entry:
    made = Entry(RequestKey("job", line), Shape("lay", 24, SIZE), touched, owner=owner)
    for number in range(pages):
        made.pages[number] = {1: Page(1, block=line * 100 + number, count=SIZE, stored=SIZE if stored else 0)}
    return made


def lines(chosen: list[Victim]) -> list[int]:
    return [key.line for key, _, _ in chosen]


def test_what_is_lost_to_nobody_goes_first_and_what_is_needed_for_certain_last() -> None:
    in_store_owned, in_store, owned, waiting = (
        entry(1, owner=1, stored=True), entry(2, stored=True), entry(3, owner=1), entry(4),
    )  # fmt: skip
    everyone = [waiting, owned, in_store, in_store_owned]
    assert lines(victims(everyone, 10)) == [1, 2, 3, 4]
    assert lines(victims(everyone, 2)) == [1, 2]
    assert victims(everyone, 0) == [] == victims([], 3)


def test_a_page_copied_ahead_goes_before_what_runs_here_and_is_nowhere_else() -> None:
    guest, owned, in_store = entry(1, touched=9.0), entry(2, owner=1), entry(3, stored=True)
    guest.pages[0][1].guest = True
    assert lines(victims([owned, guest, in_store], 3)) == [3, 1, 2]


def test_of_equal_worth_the_one_touched_longest_ago_goes_first() -> None:
    assert lines(victims([entry(1, touched=3.0), entry(2, touched=1.0), entry(3, touched=2.0)], 2)) == [2, 3]


def test_within_a_request_the_last_page_goes_first() -> None:
    assert [number for _, number, _ in victims([entry(1, pages=4)], 3)] == [3, 2, 1]


def test_half_a_page_in_the_store_is_not_in_the_store() -> None:
    half = entry(1)
    half.pages[0][1].stored = SIZE - 1
    assert lines(victims([half, entry(2, stored=True)], 1)) == [2]


def test_the_open_page_of_a_running_owner_stays_and_one_left_behind_goes() -> None:
    running, left = entry(1, owner=2, pages=2), entry(2, pages=2)
    for item in (running, left):
        item.pages[1] = {1: Page(1, 7, count=2), 2: Page(2, 8, count=2)}
    assert (RequestKey("job", 1), 1, 2) not in victims([running, left], 10)
    assert len(victims([running, left], 10)) == 5


drawn_pages = st.lists(st.tuples(st.integers(1, 2), st.integers(0, SIZE), st.integers(0, SIZE)), max_size=6)
drawn_entries = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0]), drawn_pages), max_size=6)


@given(drawn_entries, st.integers(0, 40))
def test_the_order_does_not_depend_on_where_a_page_is_listed(
    drawn: list[tuple[int, float, list[tuple[int, int, int]]]], count: int
) -> None:
    entries = []
    for line, (owner, touched, pages) in enumerate(drawn):
        made = Entry(RequestKey("job", line), Shape("lay", 24, SIZE), touched, owner=owner)
        for number, (epoch, slots, stored) in enumerate(pages):
            made.pages[number] = {epoch: Page(epoch, number, slots, min(slots, stored))}
        entries.append(made)
    chosen = victims(entries, count)
    evictable = sum(p.epoch != e.owner or p.count == SIZE for e in entries for _, p in e.all())
    assert len(set(chosen)) == len(chosen) == min(count, evictable)
    assert set(chosen) <= set(victims(entries, count + 1))
    by_key = {item.key: item for item in entries}
    for key, number, epoch in chosen:
        page = by_key[key].pages[number][epoch]
        assert page.count == SIZE or epoch != by_key[key].owner
    ranks = [_rank(by_key[key], number, epoch) for key, number, epoch in chosen]
    assert ranks == sorted(ranks)
    random.Random(count).shuffle(entries)
    assert [_rank(by_key[key], number, epoch) for key, number, epoch in victims(entries, count)] == ranks


def _rank(item: Entry, number: int, epoch: int) -> tuple[bool, bool, float, int]:
    """Not in the store, not owned, touched, from the end."""
    page = item.pages[number][epoch]
    return page.stored < page.count, item.owner == 0, item.touched, -number
