"""Takes in pages of requests that are about to move to this node, while they still run elsewhere.

They lie in the page table under the epoch that wrote them, so that the next owner's restore finds them in its own arena.
Until it comes they are guests: kept by a short lease that each call renews, in room that nobody else needs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from context_daemon import metrics
from context_daemon.fault_points import Point, hit
from context_daemon.landing import Landing
from context_daemon.observability import get_logger
from context_daemon.page_records import Held, Shape
from context_daemon.page_table import PageTable
from context_daemon.pieces import Piece
from context_daemon.preparation import Preparation, Wanted
from context_daemon.rates import PrefillCost
from context_daemon.records import RequestKey, RequestRecord, RequestState
from context_daemon.restorer import PeerReads, Restorer, Wish
from context_daemon.store import ContextStore

log = get_logger()

Free = Callable[[], None]  # gives a block back

LEASE_S = 5.0  # a source renews it every second, and each page that comes does
LAST_LEASE_S = 30.0  # the next owner may have many to take over
TURN_S = 3.0  # of one call: what came until then stays, and is answered; what is under way then is lost
_STREAMS = 4  # at once, of what any source serves
_EVERY_S = 0.5


class Rooms(Protocol):
    """What of the KVService is needed."""

    table: PageTable
    landing: Landing
    restorer: Restorer

    def takes_guests(self, shape: Shape) -> bool: ...

    def room_for_guests(self, shape: Shape) -> bool: ...


@dataclass(slots=True)
class _Lease:
    epoch: int
    until: float
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # a call that meets another takes only what is left


class Guests:
    """`run` until cancelled. For one event loop."""

    def __init__(
        self, rooms: Rooms, peers: PeerReads, store: ContextStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rooms, self._peers, self._store, self._clock = rooms, peers, store, clock
        self._table = rooms.table
        self._leases: dict[RequestKey, _Lease] = {}
        self._streams = asyncio.Semaphore(_STREAMS)

    # -- the source asks --------------------------------------------------------------------------------------------
    async def take(self, asked: Preparation, source: str) -> list[int]:
        """Fetch what is missing, for at most TURN_S. Returns how far each request is here: 0 for one that is not its owner's
        any more. `source` must be known to the peers. What cannot come is no error: it is not here."""
        if not asked.wanted or not self._rooms.takes_guests(asked.shape):
            metrics.GUEST_REFUSALS.labels("layout").inc(len(asked.wanted))
            return [0] * len(asked.wanted)
        tasks = [asyncio.create_task(self._take(one, asked, source)) for one in asked.wanted]
        try:
            await asyncio.wait(tasks, timeout=TURN_S)
        finally:  # also when the caller has gone
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        hit(Point.GUESTS_TAKEN)
        return [
            0 if end is False else min(one.positions, self._table.prefix(one.key, asked.shape.layout))
            for one, end in zip(asked.wanted, ends, strict=True)
        ]

    async def _take(self, one: Wanted, asked: Preparation, source: str) -> bool:
        """False: its owner is another by now."""
        entry = self._table.get(one.key)
        if entry is not None and entry.owner >= one.token.epoch:
            return False
        lease = self._leases.get(one.key)
        if lease is None or lease.epoch < one.token.epoch:
            lease = self._leases[one.key] = _Lease(one.token.epoch, self._clock() + LEASE_S)
        async with lease.turn:
            if self._table.prefix(one.key, asked.shape.layout) < one.positions:
                record = await self._owned(one)
                if record is None:
                    metrics.GUEST_REFUSALS.labels("not_owner").inc()
                    return False
                async with self._streams:
                    await self._fetch(one, asked.shape, record, source, lease)
            self._renew(lease, LAST_LEASE_S if asked.last else LEASE_S)
        return True

    def _renew(self, lease: _Lease, seconds: float) -> None:
        lease.until = max(lease.until, self._clock() + seconds)

    async def _owned(self, one: Wanted) -> RequestRecord | None:
        """Raises StoreUnavailable."""
        record = await self._store.get_request(one.key)
        owned = record is not None and record.state is RequestState.LEASED and record.token == one.token
        return record if owned else None

    async def _fetch(self, one: Wanted, shape: Shape, record: RequestRecord, source: str, lease: _Lease) -> None:
        """From the source; what it has not, since it found it in the KV store itself, from there."""
        size = shape.page_size
        until, reached = -(-one.positions // size), -1
        wish = Wish(record, shape, PrefillCost(0.0, 0.0))
        while reached < (now := self._table.prefix(one.key, shape.layout)) < one.positions:
            reached, first, ends = now, now // size, list[Free]()
            pages = self._peers.fetch(source, one.key, shape, first, until, ends.append)
            async with aclosing(pages) as pieces:
                async for piece in pieces:
                    if not self._adopt(one, shape, piece, ends, lease):
                        return
            if self._table.prefix(one.key, shape.layout) == reached and record.watermark >= reached + size:
                await self._fetch_stored(one, wish, first, lease)

    async def _fetch_stored(self, one: Wanted, wish: Wish, first: int, lease: _Lease) -> None:
        """Whole pages only: the end of the last one is at the source."""
        ends: list[Free] = []
        async with aclosing(self._rooms.restorer.from_store(wish, first, ends.append)) as pieces:
            async for piece in pieces:
                if piece.slots < wish.shape.page_size:
                    return
                placed = self._rooms.landing.place(piece, wish.shape, ends.append)
                if not self._adopt(one, wish.shape, placed, ends, lease):
                    return

    def _adopt(self, one: Wanted, shape: Shape, piece: Piece, ends: list[Free], lease: _Lease) -> bool:
        """False: no more. `ends` frees the block that the piece lies in, if it does."""
        hit(Point.GUESTS_PAGE)
        free = ends.pop() if ends else None
        if free is None or not self._rooms.room_for_guests(shape):
            metrics.GUEST_REFUSALS.labels("full").inc()
            log.info("no_room_for_guests", request=str(one.key), page=piece.number)
            if free is not None:
                free()
            return False
        page = Held(piece.number, piece.epoch, piece.block, piece.slots)
        if piece.epoch > one.token.epoch or not self._table.adopt(one.key, shape, page):
            free()
            return self._table.prefix(one.key, shape.layout) > piece.number * shape.page_size  # it is here already
        self._leases[one.key] = lease
        self._renew(lease, LEASE_S)
        metrics.GUEST_PAGES.labels("taken").inc()
        return True

    # -- who comes, and who does not --------------------------------------------------------------------------------
    def claimed(self, key: RequestKey) -> None:
        """Its next owner is here."""
        self._leases.pop(key, None)
        metrics.GUEST_PAGES.labels("claimed").inc(self._table.settle(key))

    def expire(self) -> int:
        """Let go whose lease ran out. Returns how many requests that were."""
        over = [key for key, lease in self._leases.items() if lease.until <= self._clock()]
        for key in over:
            del self._leases[key]
            pages = self._table.dismiss(key)
            if pages:
                metrics.GUEST_PAGES.labels("dismissed").inc(pages)
                log.info("guests_dismissed", request=str(key), pages=pages, reason="their owner did not come in time")
        return len(over)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            self.expire()
