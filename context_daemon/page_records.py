"""What the page table keeps and hands out: plain records. Pages lie under (request, epoch, page)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from context_daemon.kv_slots import framed_size
from context_daemon.page_holes import Holes
from context_daemon.records import RequestKey


@dataclass(frozen=True, slots=True)
class Shape:
    """How the pages of a layout lie in memory."""

    layout: str  # KVLayout.fingerprint
    slot_bytes: int
    page_size: int

    @property
    def row_bytes(self) -> int:
        return framed_size(self.slot_bytes)

    @property
    def block_bytes(self) -> int:
        return self.row_bytes * self.page_size


@dataclass(slots=True)
class Page:
    """One page under one epoch. Slots `[0, count)` are there, `[0, stored)` in the KV store."""

    epoch: int
    block: int
    count: int = 0
    stored: int = 0
    version: int = 0  # grows as slots that were there are written again
    guest: bool = False  # copied from where its owner runs, for a next owner that has not come yet


@dataclass(slots=True)
class Entry:
    """One request's pages here."""

    key: RequestKey
    shape: Shape
    touched: float
    pages: dict[int, dict[int, Page]] = field(default_factory=dict)  # by page, by epoch
    known: dict[int, int] = field(default_factory=dict)  # positions whose tokens are committed, by epoch
    prompt: int = 0
    first: dict[int, int] = field(default_factory=dict)  # position from which its owner announced, by epoch
    stored: dict[int, int] = field(default_factory=dict)  # positions in the KV store without a hole, by epoch
    unshipped: set[tuple[int, int]] = field(default_factory=set)  # (page, epoch) of which the store lacks something
    sent: set[int] = field(default_factory=set)  # epochs of which something went to the KV store
    holes: Holes = field(default_factory=Holes)
    writer: int = 0  # attachment that wrote last
    owner: int = 0  # epoch that runs on this node; 0: none
    disowned: int = 0  # epochs up to this one are over, whatever is still heard of them

    def all(self) -> Iterator[tuple[int, Page]]:
        for number, by_epoch in self.pages.items():
            for page in by_epoch.values():
                yield number, page


@dataclass(frozen=True, slots=True)
class Held:
    """A page as a restore may use it."""

    number: int
    epoch: int
    block: int
    slots: int


@dataclass(frozen=True, slots=True)
class Due:
    """Slots `[start, stop)` of a page that the KV store does not have."""

    key: RequestKey
    shape: Shape
    number: int
    epoch: int
    block: int
    start: int
    stop: int
    version: int = 0

    @property
    def bytes(self) -> int:
        return (self.stop - self.start) * self.shape.row_bytes
