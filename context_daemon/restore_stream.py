"""A restore as its new owner sees it: the record, what is to come, then page after page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec

from context_daemon.kv_metrics import ABSENT_PAGES
from context_daemon.kv_slots import identity, verify
from context_daemon.kv_writer import KVWriter
from context_daemon.records import KVLayout, RequestRecord
from protos import context_pb2 as pb


@dataclass(frozen=True, slots=True)
class IncomingPage:
    """Slots of positions `[start, stop)`, framed. Rows in the arena are somebody else's once the stream is closed, and then
    may change at any moment: take them first, and check them after. They never become right again."""

    start: int
    stop: int
    rows: memoryview
    source: str
    whose: int
    slot_bytes: int

    def good(self) -> int:
        """How many of the slots, from the first on, are right as they lie there now."""
        slots = self.stop - self.start
        good = verify(self.rows, self.whose, self.start, self.slot_bytes, slots)
        if good.slots < slots:
            ABSENT_PAGES.labels(str(good.reason)).inc()
        return good.slots

    def copied(self) -> IncomingPage:
        """The same in memory of its own."""
        return replace(self, rows=memoryview(bytearray(self.rows)))


class RestoreStream:
    """`record` is at hand at once. Pages of `[fetch_from, fetch_to)` may come, in order; what does not is to be computed.
    `named` turns an error of the call into one that its caller knows."""

    def __init__(
        self,
        layout: KVLayout,
        arena: KVWriter | None,
        parts: Iterator[pb.RestoreResponse],
        named: Callable[[Callable[[], pb.RestoreResponse]], pb.RestoreResponse],
    ) -> None:
        self._layout, self._arena, self._parts, self._named = layout, arena, parts, named
        self.record = msgspec.msgpack.decode(self._next().record, type=RequestRecord)
        planned = self._next().planned
        wanted = len(self.record.spec.prompt_token_ids) + len(self.record.tokens) - 1
        self.fetch_to = max(0, min(planned.fetch_to, wanted))
        self.fetch_from = max(0, min(planned.fetch_from, self.fetch_to))

    def pages(self) -> Iterator[IncomingPage]:
        """Each follows on the one before. Raises StoreUnavailable when the daemon goes away in the middle."""
        reached = self.fetch_from
        while reached < self.fetch_to and (pages := self._next().pages.pages):
            for page in pages:
                incoming = self._incoming(page)
                if incoming.start != reached or incoming.stop <= reached:
                    return
                reached = incoming.stop
                yield incoming

    def _incoming(self, page: pb.RestoredPage) -> IncomingPage:
        layout, start = self._layout, page.page * self._layout.page_size
        stop = min(start + page.count, start + layout.page_size, self.fetch_to)
        whose = identity(self.record.key, page.epoch, layout.fingerprint)
        rows = self._rows(page, max(0, stop - start))
        return IncomingPage(start, stop, rows, page.source, whose, layout.slot_bytes)

    def _rows(self, page: pb.RestoredPage, slots: int) -> memoryview:
        if page.slots or self._arena is None:
            return memoryview(page.slots)[: slots * (len(page.slots) // max(1, page.count))]
        return self._arena.read(page.block, slots)

    def _next(self) -> pb.RestoreResponse:
        return self._named(lambda: next(self._parts, pb.RestoreResponse()))
