"""A worker's way into its node's page arena: blocks to write into, and the word that they are written."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from context_daemon.arena import MappedArena
from context_daemon.kv_slots import Buffer, identity, seal_as
from context_daemon.page_records import Shape
from context_daemon.records import KVLayout, RequestKey
from context_daemon.store import StoreUnavailable

Owned = tuple[RequestKey, int]  # request, epoch


class ArenaGone(StoreUnavailable):
    """The daemon has another arena now: what was written is lost, and is to be written again after `attach`."""


@dataclass(frozen=True, slots=True)
class Attachment:
    arena_id: str
    path: str
    total_bytes: int
    number: int
    granted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots `[start, stop)` of a request's epoch and the block of each page that they touch."""

    key: RequestKey
    epoch: int
    prompt_tokens: int
    start: int
    stop: int
    blocks: tuple[int, ...]
    arena_id: str = ""  # that they were written to; stays in the worker
    grant: int = 0  # the last that had come: a block that was granted again since is another by now


@dataclass(frozen=True, slots=True)
class Progress:
    """`stored` positions are in the KV store. `losses` grows with each time that the request's KV server came back empty,
    from 0 when the epoch's owner began: all that the owner has is then to be written again, from position 0. Positions
    `[hole_start, hole_stop)` left the arena before they were stored: they alone are to be written again."""

    stored: int
    losses: int
    hole_start: int = 0
    hole_stop: int = 0


@dataclass(frozen=True, slots=True)
class Announced:
    """The daemon's answer, with each request's progress; `ships` is whether anything ever goes to the KV store. The blocks
    of a `grant` come with each answer until the worker says that they came: an answer may be lost."""

    progress: dict[Owned, Progress]
    granted: tuple[int, ...]
    ships: bool
    grant: int = 0


class ArenaCalls(Protocol):
    """What of the daemon's service the writer needs. Both raise StoreUnavailable; `announce` ArenaGone, too. What the same
    `writer` attached before is taken back; `grant` is the last one that came."""

    def attach_arena(self, shape: Shape, want_blocks: int, writer: str) -> Attachment: ...

    def announce(
        self,
        attachment: Attachment,
        ranges: Sequence[SlotRange],
        asks: Iterable[Owned],
        want_blocks: int,
        grant: int,
    ) -> Announced: ...


class KVWriter:
    """`write` in the engine's thread, `announce` in the committer's. What finds no block is refused, not waited for."""

    def __init__(self, calls: ArenaCalls, layout: KVLayout, spare_blocks: int) -> None:
        self._calls = calls
        self.shape = Shape(layout.fingerprint, layout.slot_bytes, layout.page_size)
        self._spare = spare_blocks
        self._name = secrets.token_hex(8)
        self._grant = 0  # the last that came
        self._lock = threading.Lock()
        self._attachment: Attachment | None = None
        self._arena: MappedArena | None = None
        self._free: list[int] = []
        self._warm: set[int] = set()  # blocks with memory behind them
        self._owned: dict[Owned, dict[int, int]] = {}  # blocks by page, of pages that are not full

    @property
    def attached(self) -> bool:
        return self._attachment is not None

    def attach(self) -> None:
        """Map the daemon's arena; whatever was written to another before is forgotten."""
        attachment = self._calls.attach_arena(self.shape, self._spare, self._name)
        try:
            arena = MappedArena(attachment.path, attachment.total_bytes)
        except OSError as error:
            raise StoreUnavailable(
                f"the context daemon's arena at {attachment.path} cannot be mapped: {error}. The worker must run on the "
                "daemon's machine, as the same user and in the same PID namespace"
            ) from error
        self._warm.clear()
        self._warm_up(arena, attachment.granted)
        with self._lock:
            self._attachment, self._arena = attachment, arena
            self._owned.clear()
            self._free, self._grant = list(attachment.granted), 0

    def detach(self) -> None:
        """The arena is no use any more: nothing is written until the next `attach`."""
        with self._lock:
            self._attachment = None

    def write(self, key: RequestKey, epoch: int, prompt_tokens: int, start: int, raw: Buffer) -> SlotRange | None:
        """Copy raw consecutive slots into their blocks and seal them. None when there is no room."""
        stop = start + len(raw) // self.shape.slot_bytes
        with self._lock:
            arena_id, arena = self.arena_id, self._arena if self._attachment is not None else None
            blocks, grant = self._blocks(key, epoch, start, stop) if arena is not None else None, self._grant
        if blocks is None or arena is None:
            return None
        self._fill(arena, identity(key, epoch, self.shape.layout), start, stop, memoryview(raw), blocks)
        return SlotRange(key, epoch, prompt_tokens, start, stop, blocks, arena_id, grant)

    def announce(self, ranges: Sequence[SlotRange], asks: Iterable[Owned] = ()) -> Announced:
        """Tell the daemon what was written; idempotent. Raises StoreUnavailable, or ArenaGone."""
        with self._lock:
            attachment, arena, grant = self._attachment, self._arena, self._grant
            want = max(0, self._spare - len(self._free))
        if attachment is None or arena is None:
            raise ArenaGone("no arena is attached")
        answer = self._calls.announce(attachment, ranges, asks, want, grant)
        self._warm_up(arena, answer.granted)
        with self._lock:
            if self._attachment is attachment and answer.grant > self._grant:
                self._free.extend(answer.granted)
                self._grant = answer.grant
        return answer

    def _warm_up(self, arena: MappedArena, blocks: Iterable[int]) -> None:
        """In the committer's thread, so that the engine's never waits for memory."""
        for block in blocks:
            if block not in self._warm:
                self._warm.add(block)
                arena.populate(block, self.shape.block_bytes)

    def forget(self, key: RequestKey, epoch: int) -> None:
        """Nothing more is written under this epoch. Its blocks are the daemon's, or will be when they are announced."""
        with self._lock:
            self._owned.pop((key, epoch), None)

    def rewrite(self, lost: Iterable[Owned]) -> None:
        """What is written of these from now on goes to new blocks: the old ones may be shipped or evicted at any moment."""
        with self._lock:
            for owned in lost:
                self._owned.pop(owned, None)

    def read(self, block: int, slots: int) -> memoryview:
        """A page's framed slots, as they are now."""
        if self._arena is None:
            raise ArenaGone("no arena is attached")
        return self._arena.view[block : block + slots * self.shape.row_bytes]

    @property
    def arena_id(self) -> str:
        return self._attachment.arena_id if self._attachment else ""

    def _blocks(self, key: RequestKey, epoch: int, start: int, stop: int) -> tuple[int, ...] | None:
        owned = self._owned.setdefault((key, epoch), {})
        pages = range(start // self.shape.page_size, -(-stop // self.shape.page_size))
        missing = [page for page in pages if page not in owned]
        if len(missing) > len(self._free):
            return None
        for page in missing:
            owned[page] = self._free.pop()  # the warmest
        blocks = tuple(owned[page] for page in pages)
        for page in range(start // self.shape.page_size, stop // self.shape.page_size):
            del owned[
                page
            ]  # full: the daemon may evict it at any moment, and whoever writes it again does so elsewhere
        return blocks

    def _parts(self, start: int, stop: int, blocks: Sequence[int]) -> Iterable[tuple[int, int, int]]:
        """(first position, until, byte offset in the arena) of each page's part."""
        size = self.shape.page_size
        for index, block in enumerate(blocks):
            page = start // size + index
            first, until = max(start, page * size), min(stop, (page + 1) * size)
            yield first, until, block + (first - page * size) * self.shape.row_bytes

    def _fill(
        self, arena: MappedArena, whose: int, start: int, stop: int, raw: memoryview, blocks: Sequence[int]
    ) -> None:
        slot, step = self.shape.slot_bytes, self.shape.row_bytes
        for first, until, at in self._parts(start, stop, blocks):
            count, part = until - first, raw[(first - start) * slot : (until - start) * slot]
            rows = np.ndarray((count, slot), np.uint8, arena.view, at, (step, 1))
            rows[:] = np.frombuffer(part, np.uint8).reshape(count, slot)
            seal_as(arena.view[at : at + count * step], part, whose, first, slot)
