"""The KV half of a context daemon: arena, page table and shipping, behind plain methods. One event loop calls it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import psutil

from context_daemon import eviction, metrics
from context_daemon.arena import Arena, slab_bytes
from context_daemon.commit_mode import ShipBudget, ShipPolicy
from context_daemon.kv_cluster import KVCluster
from context_daemon.kv_writer import Announced, ArenaGone, Attachment, Owned, Progress, SlotRange
from context_daemon.landing import Keep, Landing
from context_daemon.links import links_of
from context_daemon.observability import get_logger
from context_daemon.page_records import Entry, Held, Shape
from context_daemon.page_server import PageServer
from context_daemon.page_table import PageTable
from context_daemon.peer_client import PeerClient
from context_daemon.pieces import Piece
from context_daemon.records import PAGE_SIZE, CommitResult, CommitStatus, RequestKey, RequestRecord, TokenCommit
from context_daemon.restorer import Choice, Restorer, Wish
from context_daemon.shipper import Shipper
from context_daemon.slabs import Slabs

log = get_logger()

_OWN_SHARE = 8  # of the arena, that pages copied ahead of a cut-over leave free
_GRANT_SHARE = 4  # of the arena, at most a quarter may be granted to one worker without being announced


class ArenaFull(Exception):
    """Not even one page of this layout fits; the message says what to do."""


@dataclass(slots=True)
class _Attached:
    number: int
    shape: Shape
    pid: int
    started: float  # of the process: its pid may be another's later
    writer: str
    granted: dict[int, int] = field(default_factory=dict)  # blocks not announced so far, and with which grant they went
    ever: set[int] = field(default_factory=set)
    grant: int = 0  # the last
    last: tuple[int, ...] = ()  # its blocks


class KVService:
    """`shipper.run` is its background work. Everything here is soft: what is lost is computed again."""

    def __init__(
        self,
        kv: KVCluster,
        *,
        here: str,
        arena_bytes: int,
        budget: ShipBudget,
        noticed: Callable[[], bool],
        max_peer_streams: int = 8,
    ) -> None:
        self.arena = Arena(arena_bytes)
        self._slabs = Slabs(arena_bytes, slab_bytes(arena_bytes))
        metrics.ARENA_BYTES.set_function(lambda: self._slabs.used_bytes)
        self.table = PageTable(self._slabs.give, time.monotonic)
        self.shipper = Shipper(self.table, self.arena, kv, ShipPolicy(budget, time.monotonic()), noticed)
        self.page_server = PageServer(self.table, self.arena, max_peer_streams)
        self.landing = Landing(self.arena, self._slabs)
        self.peers = PeerClient(self.landing)
        self.links = links_of(self.arena)
        self.restorer = Restorer(self.table, self._lend, kv, self.peers, self.links, here)
        self._attached: dict[int, _Attached] = {}
        self.page_sizes: dict[str, int] = {}  # by layout, of those that were ever written here
        self._attachments = 0

    async def close(self) -> None:
        await self.page_server.close()
        await self.peers.close()
        self.arena.close()

    @property
    def used_bytes(self) -> int:
        """Of the arena: granted to workers, or holding pages."""
        return self._slabs.used_bytes

    # -- a worker writes --------------------------------------------------------------------------------------------
    def attach(self, shape: Shape, pid: int, want: int, writer: str = "") -> Attachment:
        """Raises ArenaFull when pages of this layout do not fit at all."""
        former = [one for one in self._attached.values() if not _lives(one) or (writer and one.writer == writer)]
        self._take_back(former)
        if self._slabs.blocks_of(shape.block_bytes) < _GRANT_SHARE:
            raise ArenaFull(
                f"pages of {shape.block_bytes} bytes do not fit the arena of {self.arena.total_bytes}: "
                "give the context daemon a larger --arena-bytes"
            )
        self._attachments += 1
        attached = self._attached[self._attachments] = _Attached(self._attachments, shape, pid, _started(pid), writer)
        self.page_sizes[shape.layout] = shape.page_size
        granted = self._grant(attached, want)
        log.info("arena_attached", attachment=attached.number, pid=pid, layout=shape.layout, blocks=len(granted))
        return Attachment(self.arena.arena_id, self.arena.path, self.arena.total_bytes, attached.number, granted)

    def reap(self, dry_run: bool = False) -> int:
        """Take back what was granted to processes that are gone. Returns how many blocks that are."""
        return self._take_back([one for one in self._attached.values() if not _lives(one)], dry_run)

    def _take_back(self, gone: Iterable[_Attached], dry_run: bool = False) -> int:
        count = 0
        for attached in gone:
            count += len(attached.granted)
            if not dry_run:
                self._disown(attached)
                for block in attached.granted:
                    self._slabs.give(block)
                del self._attached[attached.number]
                log.info("arena_detached", attachment=attached.number, pid=attached.pid, blocks=len(attached.granted))
        return count

    def _disown(self, gone: _Attached) -> None:
        """What a dead process wrote on in is open no more, and goes by worth like what any waiting request has here."""
        for entry in () if _lives(gone) else self.table.entries():
            if entry.writer == gone.number and entry.owner:
                self.table.disown(entry.key, entry.owner)

    def _grant(self, attached: _Attached, want: int) -> tuple[int, ...]:
        most = max(1, self._slabs.blocks_of(attached.shape.block_bytes) // _GRANT_SHARE)
        blocks = self._take(attached.shape, min(want, most - len(attached.granted)))
        attached.granted |= dict.fromkeys(blocks, attached.grant)
        attached.ever.update(blocks)
        return tuple(blocks)

    def _grant_after(self, attached: _Attached, want: int, heard: int) -> tuple[int, ...]:
        """Another grant once the last one came; until then the last one again."""
        if heard >= attached.grant:
            attached.grant += 1
            attached.last = self._grant(attached, want)
        return attached.last

    def _take(self, shape: Shape, count: int) -> list[int]:
        """Free blocks; when there are too few, pages that are worth least make room."""
        if count <= 0:
            return []
        blocks = self._slabs.take(shape.block_bytes, count)
        if len(blocks) < count:
            self._make_room(shape, count - len(blocks))
            blocks += self._slabs.take(shape.block_bytes, count - len(blocks))
        return blocks

    def _make_room(self, shape: Shape, count: int) -> None:
        """Only pages of the same size do at once; of other sizes a whole slab must go."""
        entries = self.table.entries()
        alike = [entry for entry in entries if entry.shape.block_bytes == shape.block_bytes]
        for victim in eviction.victims(alike, count) or eviction.victims(entries, count):
            metrics.EVICTED_PAGES.inc(self.table.evict(*victim))

    def announce(
        self,
        arena_id: str,
        number: int,
        ranges: Sequence[SlotRange],
        asks: Iterable[Owned],
        want: int,
        grant: int = 0,
    ) -> Announced:
        """Take in what a worker wrote that has heard of all grants up to `grant`. Idempotent. Raises ArenaGone for another
        arena's blocks, ValueError for what was not granted."""
        attached = self._attached.get(number)
        if attached is None or arena_id != self.arena.arena_id:
            raise ArenaGone(
                f"arena {arena_id or '(none)'} under attachment {number} is not this daemon's: attach again"
            )
        for item in ranges:
            self._take_in(attached, item)
        owned = [(item.key, item.epoch) for item in ranges]
        return Announced(
            progress={item: self._progress(*item) for item in (*owned, *asks)},
            granted=self._grant_after(attached, want, grant),
            ships=self.shipper.policy.ships,
            grant=attached.grant,
        )

    def _progress(self, key: RequestKey, epoch: int) -> Progress:
        hole = self.table.hole(key, epoch) if self.shipper.policy.ships else (0, 0)
        return Progress(self.table.stored(key, epoch), self.shipper.losses.count(key, epoch), *hole)

    def _take_in(self, attached: _Attached, item: SlotRange) -> None:
        shape, size = attached.shape, attached.shape.page_size
        pages = -(-item.stop // size) - item.start // size
        if not 0 <= item.start < item.stop or len(set(item.blocks)) != pages or len(item.blocks) != pages:
            raise ValueError(
                f"slots [{item.start}, {item.stop}) of {item.key} in {len(set(item.blocks))} blocks: {pages} pages"
            )
        for number, block in enumerate(item.blocks, item.start // size):
            if attached.granted.get(block, item.grant + 1) <= item.grant:
                del attached.granted[block]
            elif block != self.table.block_of(item.key, shape, number, item.epoch):
                if block not in attached.ever:
                    raise ValueError(f"block {block} of {item.key} was not granted to attachment {attached.number}")
                continue  # a late or a repeated word: the request ended, or the page was evicted meanwhile
            start, stop = max(item.start, number * size), min(item.stop, (number + 1) * size)
            self.table.announce(item.key, shape, item.epoch, item.prompt_tokens, start, [block], stop, attached.number)
        metrics.ARENA_SLOTS.inc(item.stop - item.start)
        self.shipper.due(item.key)

    def page_size(self, layout: str) -> int:
        """Of a layout that was ever written here; KVLayout's default for any other."""
        return self.page_sizes.get(layout, PAGE_SIZE)

    def takes_guests(self, shape: Shape) -> bool:
        """There is a worker here that can use such pages."""
        return any(item.shape == shape for item in self._attached.values())

    def room_for_guests(self, shape: Shape) -> bool:
        """Enough is free beside what is in use, a page that has just landed included, for this node's own workers."""
        most = self._slabs.blocks_of(shape.block_bytes) * shape.block_bytes
        return self._slabs.used_bytes <= most - most // _OWN_SHARE

    # -- tokens pass by ---------------------------------------------------------------------------------------------
    def committed(self, commit: TokenCommit, result: CommitResult) -> Entry | None:
        """Returns what there was of a request that is over."""
        if result.status is CommitStatus.OK:
            self.table.committed(commit.key, commit.token.epoch, commit.position + len(commit.tokens))
            if commit.finish is not None:
                self.shipper.losses.forget(commit.key)
                return self.table.end(commit.key)
        elif result.status is CommitStatus.FENCED:
            self.table.disown(commit.key, commit.token.epoch)
        return None

    # -- an owner takes over ----------------------------------------------------------------------------------------
    async def restoring(self, record: RequestRecord) -> None:
        """Call before `pages`: what the KV store loses from here on, the owner hears of when it announces."""
        if self.shipper.policy.ships and record.watermark > 0:
            await self.shipper.restoring(record.key, record.token.epoch)

    @asynccontextmanager
    async def borrowing(self) -> AsyncGenerator[Keep, None]:
        """For the length of one restore: what is lent under it stays where it is until its end."""
        ends: list[Callable[[], None]] = []
        try:
            yield ends.append
        finally:
            for end in ends:
                end()

    async def pages(self, wish: Wish, chosen: Choice, borrowed: Keep | None) -> AsyncGenerator[Piece, None]:
        """What `Restorer.pages` brings: in the arena under `borrowed`, those from elsewhere in a free block as long as there
        is one; as bytes where nothing can be borrowed."""
        async with self.borrowing() as own, aclosing(self.restorer.pages(wish, chosen, borrowed or own)) as pieces:
            async for piece in pieces:
                if not borrowed:
                    yield self._copied(piece, wish.shape)
                else:
                    yield self.landing.place(piece, wish.shape, borrowed) if piece.data else piece

    def _lend(self, held: Held, keep: Keep) -> Piece:
        self.table.pins.pin(held.block)
        keep(lambda: self.table.pins.unpin(held.block))
        return Piece(held.number, held.epoch, held.slots, "arena", held.block)

    def _copied(self, piece: Piece, shape: Shape) -> Piece:
        if piece.data:
            return piece
        data = bytes(self.arena.view[piece.block : piece.block + piece.slots * shape.row_bytes])
        return msgspec.structs.replace(piece, data=data)


def _lives(attached: _Attached) -> bool:
    return attached.started > 0 and _started(attached.pid) == attached.started


def _started(pid: int) -> float:
    """When a process began; 0 for one that is gone, or only waits for its parent to hear of its end."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return 0.0
