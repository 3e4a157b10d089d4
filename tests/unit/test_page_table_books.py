"""The books of the arena beside a model with one plain record for each page: whatever a daemon does, they agree."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from page_table_rig import BLOCKS, KEYS, OTHER, PROMPT, SHAPE, SIZE, all_held

from context_daemon.page_records import Due, Held, Shape
from context_daemon.page_table import PageTable
from context_daemon.records import RequestKey

Name = tuple[RequestKey, int, int]  # request, page, epoch

keys = st.sampled_from(KEYS)
epochs = st.integers(1, 3)


@dataclass
class Known:
    block: int
    count: int = 0
    stored: int = 0
    guest: bool = False
    shipped_elsewhere: bool = False  # a guest's source sees to it


@dataclass
class Flight:
    due: Due
    torn: bool = False  # its slots were overwritten where they lay while they were read


@dataclass
class Request:
    shape: Shape
    pages: dict[tuple[int, int], Known] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    owner: int = 0
    disowned: int = 0


class Books(RuleBasedStateMachine):
    """The table as its daemon uses it, beside a model that has one plain record for each page."""

    def __init__(self) -> None:
        super().__init__()
        self.free = set(range(BLOCKS))
        self.table = PageTable(self.freed, lambda: 0.0)
        self.requests: dict[RequestKey, Request] = {}
        self.committed_to: dict[tuple[RequestKey, int], int] = {}
        self.acked: dict[tuple[RequestKey, Shape, int], set[int]] = {}
        self.ended: set[RequestKey] = set()
        self.flights: list[Flight] = []
        self.pins: list[int] = []

    def freed(self, block: int) -> None:
        assert block not in self.free, "freed twice"
        assert block not in self.pins, "freed while somebody reads it"
        self.free.add(block)

    @rule(key=keys, epoch=epochs, start=st.integers(0, 14), count=st.integers(1, 9),
          shape=st.sampled_from([SHAPE] * 9 + [OTHER]), fresh=st.lists(st.booleans(), min_size=4, max_size=4))  # fmt: skip
    def announce(self, key: RequestKey, epoch: int, start: int, count: int, shape: Shape, fresh: list[bool]) -> None:
        stop = start + count
        numbers = range(start // SIZE, -(-stop // SIZE))
        if len(self.free) < len(numbers):
            return
        blocks = [self._block(key, shape, number, epoch, new) for number, new in zip(numbers, fresh, strict=False)]
        self.table.announce(key, shape, epoch, PROMPT, start, blocks, stop)
        if key in self.ended:
            assert set(blocks) <= self.free
            return
        request = self._request(key, shape)
        if epoch > request.disowned:
            request.owner = max(request.owner, epoch)
        request.first[epoch] = min(request.first.get(epoch, start // SIZE), start // SIZE)
        for number, block in zip(numbers, blocks, strict=True):
            self._write(request, key, (number, epoch), block, start - number * SIZE, stop - number * SIZE)

    def _block(self, key: RequestKey, shape: Shape, number: int, epoch: int, new: bool) -> int:
        known = self.table.block_of(key, shape, number, epoch)
        if known is not None and not new:
            return known
        block = min(self.free)
        self.free.discard(block)
        return block

    def _request(self, key: RequestKey, shape: Shape) -> Request:
        if key not in self.requests or self.requests[key].shape != shape:
            self.requests[key] = Request(shape)
        return self.requests[key]

    def _write(self, request: Request, key: RequestKey, at: tuple[int, int], block: int, first: int, stop: int) -> None:
        page = request.pages.get(at)
        if page is None or page.block != block:
            page = request.pages[at] = Known(block)
        first, stop = max(0, first), min(SIZE, stop)
        if first > page.count:
            return
        for flight in self.flights:
            overwritten = flight.due.block == block and (flight.due.key, flight.due.number) == (key, at[0])
            flight.torn |= overwritten and first < page.count
        page.stored = min(page.stored, first)
        page.count = max(page.count, stop)
        page.shipped_elsewhere = False

    @precondition(lambda self: self.free)
    @rule(key=keys, epoch=epochs, number=st.integers(0, 4), slots=st.integers(1, SIZE),
          shape=st.sampled_from([SHAPE] * 9 + [OTHER]))  # fmt: skip
    def adopt(self, key: RequestKey, epoch: int, number: int, slots: int, shape: Shape) -> None:
        block, request = min(self.free), self.requests.get(key)
        known = request.pages.get((number, epoch)) if request else None
        refused = request is not None and (request.shape != shape or request.owner >= epoch)
        refused = refused or key in self.ended or (known is not None and known.count >= slots)
        self.free.discard(block)
        assert self.table.adopt(key, shape, Held(number, epoch, block, slots)) is not refused
        if refused:
            self.free.add(block)
            return
        self._request(key, shape).pages[number, epoch] = Known(block, slots, guest=True, shipped_elsewhere=True)
        tokens = number * SIZE + slots - PROMPT
        self.committed_to[key, epoch] = max(tokens, self.committed_to.get((key, epoch), 0))

    @rule(key=keys, comes=st.booleans())
    def next_owner(self, key: RequestKey, comes: bool) -> None:
        request = self.requests.get(key, Request(SHAPE))
        guests = {at: page for at, page in request.pages.items() if page.guest}
        if comes:
            assert self.table.settle(key) == len(guests)
            for page in guests.values():
                page.guest = False
            return
        going = [at for at, page in guests.items() if at[1] != request.owner or page.count == SIZE]
        assert self.table.dismiss(key) == len(going)
        for at in going:
            del request.pages[at]
        if going:
            self._gone_if_empty(key)

    @rule(key=keys, epoch=epochs, tokens=st.integers(0, 12))
    def commit(self, key: RequestKey, epoch: int, tokens: int) -> None:
        self.table.committed(key, epoch, tokens)
        self.committed_to[key, epoch] = max(tokens, self.committed_to.get((key, epoch), 0))

    @rule(key=keys, epoch=epochs)
    def disown(self, key: RequestKey, epoch: int) -> None:
        self.table.disown(key, epoch)
        request = self.requests.get(key)
        if request is not None:
            request.disowned = max(request.disowned, epoch)
            request.owner = 0 if request.owner <= epoch else request.owner
            self._gone_if_empty(key)

    def _gone_if_empty(self, key: RequestKey) -> None:
        if not self.requests[key].pages and not self.requests[key].owner:
            del self.requests[key]

    @rule(key=keys, end=st.integers(0, 5))
    def over(self, key: RequestKey, end: int) -> None:
        if end == 0:
            self.table.end(key)
            self.ended.add(key)
        else:
            self.table.forget(key)
        self.requests.pop(key, None)

    @rule(key=keys)
    def take_due(self, key: RequestKey) -> None:
        self.flights += [Flight(due) for due in self.table.due(key)]

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def stored(self, data: st.DataObject) -> None:
        flight = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        due = flight.due
        self.table.mark_stored(due)
        if flight.torn:
            return
        positions = range(due.number * SIZE + due.start, due.number * SIZE + due.stop)
        self.acked.setdefault((due.key, due.shape, due.epoch), set()).update(positions)
        request = self.requests.get(due.key)
        page = request.pages.get((due.number, due.epoch)) if request and request.shape == due.shape else None
        if page is not None and page.block == due.block and page.stored >= due.start:
            page.stored = max(page.stored, due.stop)

    @rule(key=keys)
    def lose(self, key: RequestKey) -> None:
        self.table.mark_lost(key)
        for (other, _, _), positions in self.acked.items():
            if other == key:
                positions.clear()
        for page in self.requests[key].pages.values() if key in self.requests else ():
            page.stored, page.shipped_elsewhere = 0, False

    @precondition(lambda self: any(request.pages for request in self.requests.values()))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        names = [(key, *at) for key, request in self.requests.items() for at in request.pages]
        key, number, epoch = data.draw(st.sampled_from(names))
        request = self.requests[key]
        writing = epoch == request.owner and request.pages[number, epoch].count < SIZE
        assert self.table.evict(key, number, epoch) is not writing
        if not writing:
            del request.pages[number, epoch]
            self._gone_if_empty(key)
            assert not self.table.evict(key, number, epoch)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        owned = sorted(set(range(BLOCKS)) - self.free)
        if owned:
            block = data.draw(st.sampled_from(owned))
            self.table.pins.pin(block)
            self.pins.append(block)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.table.pins.unpin(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    # -- what must hold ---------------------------------------------------------------------------------------------
    @invariant()
    def the_table_has_what_the_model_has(self) -> None:
        found = {
            (entry.key, number, page.epoch): (page.block, page.count, page.stored)
            for entry in self.table.entries()
            for number, page in entry.all()
        }
        expected = {
            (key, *at): (page.block, page.count, page.stored)
            for key, request in self.requests.items()
            for at, page in request.pages.items()
        }
        assert found == expected
        assert {entry.key: entry.owner for entry in self.table.entries()} == {
            key: request.owner for key, request in self.requests.items()
        }

    @invariant()
    def every_block_is_one_pages_or_free_or_being_read(self) -> None:
        owned = [page.block for request in self.requests.values() for page in request.pages.values()]
        assert len(set(owned)) == len(owned) and not self.free & set(owned)
        assert self.free | set(owned) | set(self.pins) == set(range(BLOCKS))

    @invariant()
    def what_is_due_is_what_the_store_lacks(self) -> None:
        for key in KEYS:
            due = [(d.number, d.epoch, d.block, d.start, d.stop) for d in self.table.due(key)]
            pages = self.requests[key].pages.items() if key in self.requests else ()
            lacking = [
                (*at, page.block, page.stored, page.count)
                for at, page in sorted(pages, key=lambda item: item[0])
                if page.stored < page.count and not page.shipped_elsewhere
            ]
            assert due == lacking

    @invariant()
    def nothing_is_held_past_what_is_committed(self) -> None:
        for key, request in self.requests.items():
            assert all_held(self.table, key, OTHER.layout if request.shape is SHAPE else SHAPE.layout) == {}
            for number, held in all_held(self.table, key, request.shape.layout).items():
                page = request.pages[number, held.epoch]
                assert held.block == page.block and 0 < held.slots <= page.count
                known = PROMPT + self.committed_to.get((key, held.epoch), 0)
                assert number * SIZE + held.slots <= known

    @invariant()
    def stored_has_no_hole(self) -> None:
        for key, request in self.requests.items():
            for epoch, first in request.first.items():
                acked = self.acked.get((key, request.shape, epoch), set())
                assert set(range(first * SIZE, self.table.stored(key, epoch))) <= acked

    def teardown(self) -> None:
        for key in KEYS:
            self.table.end(key)
        while self.pins:
            self.table.pins.unpin(self.pins.pop())
        assert self.free == set(range(BLOCKS)), "leaked"
        assert len(self.table) == 0


Books.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBooks = Books.TestCase
