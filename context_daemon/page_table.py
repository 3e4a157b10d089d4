"""Which pages the arena holds, how far each counts, and what of them is in the KV store. Pure bookkeeping, no bytes.

Pages lie under (request, epoch, page). What an owner announced counts only as far as its tokens were committed through this
daemon: KV of a token that was never committed may be of another token than the one that will be.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

from context_daemon.page_records import Due, Entry, Held, Page, Shape
from context_daemon.pins import Pins
from context_daemon.records import RequestKey

_REMEMBERED = 100_000  # requests: an announcement may come after the end, and a commit before the first of them


class PageTable:
    """`free(block)` is called for each block that nobody needs any more; pinned ones are freed when let go."""

    def __init__(self, free: Callable[[int], None], clock: Callable[[], float]) -> None:
        self.pins = Pins(free)
        self._clock = clock
        self._entries: dict[RequestKey, Entry] = {}
        self._ended: OrderedDict[RequestKey, None] = OrderedDict()
        self._lengths: OrderedDict[tuple[RequestKey, int], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def get(self, key: RequestKey) -> Entry | None:
        return self._entries.get(key)

    def block_of(self, key: RequestKey, shape: Shape, number: int, epoch: int) -> int | None:
        entry = self._entries.get(key)
        page = entry.pages.get(number, {}).get(epoch) if entry and entry.shape == shape else None
        return page.block if page else None

    # -- what owners say --------------------------------------------------------------------------------------------
    def announce(
        self,
        key: RequestKey,
        shape: Shape,
        epoch: int,
        prompt: int,
        start: int,
        blocks: list[int],
        stop: int,
        writer: int = 0,
    ) -> int:
        """Slots of positions `[start, stop)` are written, in one block for each page touched.

        Returns how far the epoch's KV reaches without a hole. Blocks that do not count are freed: those of an ended
        request or of an older layout. Slots behind a hole in their page do not count until it is filled.
        """
        if key in self._ended:
            for block in blocks:
                self.pins.release(block)
            return stop
        entry = self._entry(key, shape)
        if epoch > entry.disowned:
            if epoch >= entry.owner:
                entry.writer = writer
            entry.owner = max(entry.owner, epoch)
        entry.prompt = prompt
        entry.known[epoch] = max(entry.known.get(epoch, 0), prompt + self._lengths.get((key, epoch), 0))
        size = shape.page_size
        self._begin(entry, epoch, start // size * size)
        for index, block in enumerate(blocks):
            number = start // size + index
            first = max(0, start - number * size)
            self._extend(entry, number, epoch, block, first, min(size, stop - number * size))
        return self._reach(entry, epoch, start // size)

    @staticmethod
    def _begin(entry: Entry, epoch: int, first: int) -> None:
        """An owner that goes back before its first page writes anew what is not in the store any more."""
        if first < entry.first.setdefault(epoch, first):
            entry.first[epoch] = entry.stored[epoch] = first
        entry.stored.setdefault(epoch, first)

    def _entry(self, key: RequestKey, shape: Shape) -> Entry:
        entry = self._entries.get(key)
        if entry is not None and entry.shape != shape:
            self._drop(entry)
            entry = None
        if entry is None:
            entry = self._entries[key] = Entry(key, shape, self._clock())
        entry.touched = self._clock()
        return entry

    def _extend(self, entry: Entry, number: int, epoch: int, block: int, first: int, stop: int) -> None:
        by_epoch = entry.pages.setdefault(number, {})
        page = by_epoch.get(epoch)
        if page is None or page.block != block:  # new, or written anew elsewhere
            if page is not None:
                self.pins.release(page.block)
                entry.unshipped.discard((number, epoch))
            page = by_epoch[epoch] = Page(epoch, block)
            entry.holes.written((number, epoch))
        if first <= page.count:
            page.version += first < page.count
            page.stored = min(page.stored, first)  # written again: once more to be shipped
            page.count = max(page.count, stop)
            entry.unshipped.add((number, epoch))

    def _reach(self, entry: Entry, epoch: int, number: int) -> int:
        size = entry.shape.page_size
        reach = number * size
        while (page := entry.pages.get(number, {}).get(epoch)) is not None:
            reach = number * size + page.count
            if page.count < size:
                break
            number += 1
        return reach

    def committed(self, key: RequestKey, epoch: int, tokens: int) -> None:
        """So many generated tokens are durable under `epoch`: the KV of their positions counts."""
        entry = self._entries.get(key)
        if entry is not None and epoch in entry.known:
            entry.known[epoch] = max(entry.known[epoch], entry.prompt + tokens)
        else:
            self._lengths[key, epoch] = max(
                tokens, self._lengths.pop((key, epoch), 0)
            )  # its KV is still to be announced
            while len(self._lengths) > _REMEMBERED:
                self._lengths.popitem(last=False)

    def doubt(self) -> None:
        """The store lost writes: what was over may not be, and of what is still to be announced nothing is known."""
        self._ended.clear()
        self._lengths.clear()

    def cut(self, key: RequestKey, positions: int) -> None:
        """The store knows the tokens of no more positions: KV of those behind may not be of those that will be."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.known = {epoch: min(known, positions) for epoch, known in entry.known.items()}

    def disown(self, key: RequestKey, epoch: int) -> None:
        """The owner under `epoch` is no more; its pages wait for whoever comes next."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.disowned = max(entry.disowned, epoch)
        if entry.owner <= epoch:
            entry.owner = 0
            entry.touched = self._clock()
            if not entry.pages:
                del self._entries[key]

    def end(self, key: RequestKey) -> Entry | None:
        """The request is over: its pages go at once. Returns what there was."""
        self._ended[key] = None
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        entry = self._entries.get(key)
        self.forget(key)
        return entry

    def forget(self, key: RequestKey) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        self._entries.pop(entry.key, None)
        for _, page in entry.all():
            self.pins.release(page.block)

    # -- guests: pages of a request that is about to move here ------------------------------------------------------
    def adopt(self, key: RequestKey, shape: Shape, page: Held) -> bool:
        """A page copied from another node's arena, all of which counts there. False when it is not wanted: the block stays
        the caller's."""
        entry = self._entries.get(key)
        if key in self._ended or (entry is not None and (entry.shape != shape or entry.owner >= page.epoch)):
            return False
        entry = self._entry(key, shape)
        by_epoch = entry.pages.setdefault(page.number, {})
        known = by_epoch.get(page.epoch)
        if known is not None and known.count >= page.slots:
            return False
        if known is not None:
            self.pins.release(known.block)
            entry.unshipped.discard((page.number, page.epoch))
        by_epoch[page.epoch] = Page(page.epoch, page.block, page.slots, guest=True)
        entry.holes.written((page.number, page.epoch))
        reach = page.number * shape.page_size + page.slots
        entry.known[page.epoch] = max(entry.known.get(page.epoch, 0), reach)
        return True

    def settle(self, key: RequestKey) -> int:
        """The next owner came: its guests are pages like others. Returns how many there were."""
        entry = self._entries.get(key)
        guests = [page for _, page in entry.all() if page.guest] if entry else []
        for page in guests:
            page.guest = False
        return len(guests)

    def dismiss(self, key: RequestKey) -> int:
        """Nobody came: its guests go. Returns how many there were."""
        entry = self._entries.get(key)
        guests = [(number, page.epoch) for number, page in entry.all() if page.guest] if entry else []
        return sum(self.evict(key, number, epoch) for number, epoch in guests)

    # -- restores ---------------------------------------------------------------------------------------------------
    def held_page(self, key: RequestKey, layout: str, number: int) -> Held | None:
        entry = self._entries.get(key)
        return self._longest(entry, number) if entry is not None and entry.shape.layout == layout else None

    def prefix(self, key: RequestKey, layout: str) -> int:
        """Positions from the first on that count without a hole."""
        number = reached = 0
        while (held := self.held_page(key, layout, number)) is not None:
            reached += held.slots
            if held.slots < self._entries[key].shape.page_size:
                break
            number += 1
        return reached

    @staticmethod
    def _longest(entry: Entry, number: int) -> Held | None:
        first = number * entry.shape.page_size
        best: Held | None = None
        for page in entry.pages.get(number, {}).values():
            slots = min(page.count, entry.known.get(page.epoch, 0) - first)
            if slots > 0 and (best is None or (slots, page.epoch) > (best.slots, best.epoch)):
                best = Held(number, page.epoch, page.block, slots)
        return best

    # -- the KV store -----------------------------------------------------------------------------------------------
    def due(self, key: RequestKey) -> list[Due]:
        """What the store lacks of a request, in order of position."""
        entry = self._entries.get(key)
        return [self._due(entry, number, epoch) for number, epoch in sorted(entry.unshipped)] if entry else []

    @staticmethod
    def _due(entry: Entry, number: int, epoch: int) -> Due:
        page = entry.pages[number][epoch]
        return Due(entry.key, entry.shape, number, epoch, page.block, page.stored, page.count, page.version)

    def sending(self, due: Due) -> None:
        """These slots are on their way: their block is pinned until it is unpinned."""
        self.pins.pin(due.block)
        entry = self._entries.get(due.key)
        if entry is not None:
            entry.sent.add(due.epoch)

    def mark_stored(self, due: Due) -> None:
        """The store acknowledged these slots, as they were when they were due. A page may be gone since, or written anew."""
        entry = self._entries.get(due.key)
        if entry is None or entry.shape != due.shape:
            return
        page = entry.pages.get(due.number, {}).get(due.epoch)
        if page is None and due.stop == due.shape.page_size:
            entry.holes.landed((due.number, due.epoch))
        if page is not None and page.block == due.block:
            if page.version != due.version or page.stored < due.start:
                return
            page.stored = max(page.stored, due.stop)
            if page.stored >= page.count:
                entry.unshipped.discard((due.number, due.epoch))
        self._advance(entry, due)

    @staticmethod
    def _advance(entry: Entry, due: Due) -> None:
        """Over these slots, and over what was stored behind them before they were."""
        size = entry.shape.page_size
        first, reach = due.number * size, entry.stored.get(due.epoch, -1)
        if not first + due.start <= reach < first + due.stop:
            return
        reach = first + due.stop
        while True:
            if reach % size == 0:
                reach = entry.holes.over(reach // size, due.epoch) * size
            page = entry.pages.get(reach // size, {}).get(due.epoch)
            if page is None or page.stored <= reach % size:
                break
            reach = reach // size * size + page.stored
        entry.stored[due.epoch] = reach

    def mark_lost(self, key: RequestKey) -> None:
        """The store has nothing of this request any more."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.stored = dict.fromkeys(entry.stored, 0)
            entry.holes.clear()  # its owner hears of the loss, and writes all again
            for number, page in entry.all():
                page.stored = 0
                if page.count:
                    entry.unshipped.add((number, page.epoch))

    def unship(self, entry: Entry, epochs: Collection[int]) -> None:
        """Nothing of these epochs is to go to the KV store any more."""
        entry.unshipped = {item for item in entry.unshipped if item[1] not in epochs}

    def stored(self, key: RequestKey, epoch: int) -> int:
        """Positions of this epoch's own pages, from its first page on, that the store acknowledged without a hole."""
        entry = self._entries.get(key)
        return entry.stored.get(epoch, 0) if entry else 0

    def hole(self, key: RequestKey, epoch: int) -> tuple[int, int]:
        """Positions `[start, stop)`, whole pages, that left the arena before the store had them and hold up what is behind.
        An empty range as long as anything of the request is still to be shipped: what fills a hole would push that out."""
        entry = self._entries.get(key)
        if entry is None or entry.unshipped or epoch != entry.owner or epoch not in entry.stored:
            return 0, 0
        size = entry.shape.page_size
        first, last = entry.holes.first(entry.stored[epoch] // size, epoch)
        return first * size, last * size

    # -- room -------------------------------------------------------------------------------------------------------
    def evict(self, key: RequestKey, number: int, epoch: int) -> bool:
        """Forget one page. False if it is gone, or is still being written by its owner."""
        entry = self._entries.get(key)
        page = entry.pages.get(number, {}).get(epoch) if entry else None
        if entry is None or page is None or (epoch == entry.owner and page.count < entry.shape.page_size):
            return False
        del entry.pages[number][epoch]
        entry.unshipped.discard((number, epoch))
        entry.holes.pushed_out((number, epoch), page.stored >= entry.shape.page_size)
        if not entry.pages[number]:
            del entry.pages[number]
        if not entry.pages and not entry.owner:
            del self._entries[key]
        self.pins.release(page.block)
        return True
