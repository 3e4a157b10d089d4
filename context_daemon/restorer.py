"""Brings an interrupted request's pages to its new owner by the way that is soonest: chosen, carried out, measured."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from context_daemon import metrics
from context_daemon.kv_metrics import ABSENT_PAGES
from context_daemon.kv_slots import identity, verify
from context_daemon.landing import Keep
from context_daemon.links import Links
from context_daemon.observability import get_logger
from context_daemon.page_records import Held, Shape
from context_daemon.page_table import PageTable
from context_daemon.pieces import Piece
from context_daemon.rates import LinkRate, PredictionError, PrefillCost
from context_daemon.records import RequestKey, RequestRecord
from context_daemon.restore_plan import Path, RestorePlan, SourceKind, SourceOffer, plan
from context_daemon.store import StoreUnavailable
from context_daemon.watermark import epoch_of_page

log = get_logger()

_DESCRIBE_S = 0.5


class StoreReads(Protocol):
    """What of the KV store a restore needs (KVCluster)."""

    def read_pages(
        self, key: RequestKey, epochs: Mapping[int, int], layout: str, pages: Iterable[int]
    ) -> AsyncGenerator[tuple[int, bytes], None]: ...


class PeerReads(Protocol):
    """What of other nodes' daemons a restore needs (PeerClient). None raises for a peer that is away."""

    async def describe(
        self, address: str, keys: Sequence[RequestKey], layout: str, timeout_s: float
    ) -> Mapping[RequestKey, int]: ...

    def fetch(
        self, address: str, key: RequestKey, shape: Shape, first_page: int, until_page: int, keep: Keep
    ) -> AsyncGenerator[Piece, None]: ...

    async def probe(self, address: str) -> LinkRate | None: ...


@dataclass(frozen=True, slots=True)
class Wish:
    """What a new owner asks for: `shape` is its engine's, `prefill` what computing costs it."""

    record: RequestRecord
    shape: Shape
    prefill: PrefillCost
    only: str = ""  # the one source that may be used; "": any

    @property
    def wanted(self) -> int:
        """T-1: positions that can have KV."""
        return max(0, len(self.record.spec.prompt_token_ids) + len(self.record.tokens) - 1)

    @property
    def pages(self) -> int:
        return -(-self.wanted // self.shape.page_size)


@dataclass(frozen=True, slots=True)
class Choice:
    """Pages of `[fetch_from, fetch_to)` are to come, the plan's source first; where it ends early the next one goes on.
    Nothing at all when computing is sooner."""

    order: tuple[SourceOffer, ...]
    fetch_from: int
    fetch_to: int


class Restorer:
    """`lend(held)` gives a page of this node's arena as a Piece; `here` is this daemon's own address."""

    def __init__(
        self,
        table: PageTable,
        lend: Callable[[Held, Keep], Piece],
        store: StoreReads,
        peers: PeerReads | None,
        links: Links,
        here: str,
    ) -> None:
        self._table, self._lend, self._store, self._peers = table, lend, store, peers
        self._links, self._here = links, here
        self.error = PredictionError()

    async def choose(self, wish: Wish) -> Choice:
        """Asks the sources what they have, and the planner what of it to use."""
        offers = await self._offers(wish)
        chosen = plan(wish.wanted, wish.shape.slot_bytes, wish.shape.page_size, offers, wish.prefill)
        self._say(wish, chosen)
        if chosen.path is Path.RECOMPUTE:
            return Choice((), 0, 0)
        order = sorted(offers, key=lambda offer: offer.kind is not chosen.source)
        furthest = max(offer.positions for offer in offers)
        return Choice(tuple(order), chosen.fetch_from, furthest)

    async def pages(self, wish: Wish, chosen: Choice, keep: Keep) -> AsyncGenerator[Piece, None]:
        """Whole pages one after another, until one is nowhere to be had or all are there; the last may be a part of one.
        Blocks are freed by what `keep` is given."""
        order, reached = chosen.order, chosen.fetch_from  # positions given or not wanted
        for index, offer in enumerate(order):
            if offer.positions <= reached:
                continue
            async with aclosing(self._measured(wish, offer, reached // wish.shape.page_size, keep)) as pieces:
                async for piece in pieces:
                    end = min(wish.wanted, piece.number * wish.shape.page_size + piece.slots)
                    whole = piece.slots == wish.shape.page_size or end == wish.wanted
                    if not whole and any(other.positions > end for other in order[index + 1 :]):
                        break  # another has more of this page
                    reached = end
                    yield piece
                    if not whole:
                        return
            if reached >= wish.wanted:
                return

    # -- what there is ----------------------------------------------------------------------------------------------
    async def _offers(self, wish: Wish) -> list[SourceOffer]:
        record, shape, links = wish.record, wish.shape, self._links
        here = self._table.prefix(record.key, shape.layout)
        there = await self._peer_positions(wish) if here < wish.wanted or wish.only else 0  # it may be gone: seconds
        found = [
            (SourceKind.ARENA, here, links.arena),
            (SourceKind.PEER, there, links.peer(record.kv_at)),
            (SourceKind.STORE, record.watermark if record.layout == shape.layout else 0, links.store),
        ]
        if record.watermark and record.layout != shape.layout:
            ABSENT_PAGES.labels("layout").inc()
        return [
            SourceOffer(kind, min(positions, wish.wanted), rate.rate, links.under_way.get(kind, 0))
            for kind, positions, rate in found
            if positions > 0 and wish.only in ("", kind.value)
        ]

    async def _peer_positions(self, wish: Wish) -> int:
        address = wish.record.kv_at
        if self._peers is None or not address or address == self._here:
            return 0
        known = await self._peers.describe(address, [wish.record.key], wish.shape.layout, _DESCRIBE_S)
        if positions := known.get(wish.record.key, 0):
            await self._links.meet(address, self._peers.probe)
        return positions

    # -- how it comes -----------------------------------------------------------------------------------------------
    async def _measured(self, wish: Wish, offer: SourceOffer, first: int, keep: Keep) -> AsyncGenerator[Piece, None]:
        """The pages of one source; what they took teaches its rate and the planner's error."""
        sources = {
            SourceKind.ARENA: self._from_here,
            SourceKind.PEER: self._from_peer,
            SourceKind.STORE: self.from_store,
        }
        under_way, size, started = self._links.under_way, 0, time.monotonic()
        under_way[offer.kind] = under_way.get(offer.kind, 0) + 1
        waited = 0.0
        try:
            async with aclosing(sources[offer.kind](wish, first, keep)) as pieces:
                async for piece in pieces:
                    size += piece.slots * wish.shape.row_bytes
                    yielded = time.monotonic()
                    yield piece
                    waited += time.monotonic() - yielded  # the reader's time is not the link's
        finally:
            under_way[offer.kind] -= 1
            self._learn(wish, offer, size, time.monotonic() - started - waited)

    def _learn(self, wish: Wish, offer: SourceOffer, size: int, seconds: float) -> None:
        if size == 0 or seconds <= 0:
            return
        self.error.record(offer.rate.seconds(size, offer.sharers), seconds)
        metrics.RESTORE_ERROR.set(self.error.factor)
        metrics.RESTORE_SECONDS.labels(offer.kind.value).observe(seconds)
        metrics.RESTORE_BYTES.labels(offer.kind.value).inc(size)
        links = {
            SourceKind.ARENA: self._links.arena,
            SourceKind.STORE: self._links.store,
            SourceKind.PEER: self._links.peer(wish.record.kv_at),
        }
        links[offer.kind].observe(size, seconds, offer.sharers)

    async def _from_here(self, wish: Wish, first: int, keep: Keep) -> AsyncGenerator[Piece, None]:
        for number in range(first, wish.pages):
            held = self._table.held_page(wish.record.key, wish.shape.layout, number)
            if held is None:
                return
            yield self._lend(held, keep)

    async def _from_peer(self, wish: Wish, first: int, keep: Keep) -> AsyncGenerator[Piece, None]:
        if self._peers is None:
            return
        record = wish.record
        async with aclosing(self._peers.fetch(record.kv_at, record.key, wish.shape, first, wish.pages, keep)) as pieces:
            async for piece in pieces:
                yield piece

    async def from_store(self, wish: Wish, first: int, keep: Keep) -> AsyncGenerator[Piece, None]:
        """Pages up to the first that is absent, or whose slots do not match."""
        record, shape = wish.record, wish.shape
        until = -(-min(record.watermark, wish.wanted) // shape.page_size)
        found = {page: epoch_of_page(record.segments, page) for page in range(first, until)}
        epochs = {page: epoch for page, epoch in found.items() if epoch is not None}
        came = first
        try:
            async with aclosing(self._store.read_pages(record.key, epochs, shape.layout, range(first, until))) as pages:
                async for number, data in pages:
                    piece = self._verified(wish, number, epochs[number], data)
                    if piece is None:
                        return
                    came = number + 1
                    yield piece
        except StoreUnavailable as error:  # KV is soft: what is missing is computed again
            metrics.STORE_ERRORS.labels("kv").inc()
            log.warning("kv_store_away", request=str(record.key), error=str(error))
        if came < until:
            ABSENT_PAGES.labels("missing").inc()

    @staticmethod
    def _verified(wish: Wish, number: int, epoch: int, data: bytes) -> Piece | None:
        shape, size = wish.shape, wish.shape.page_size
        whose = identity(wish.record.key, epoch, shape.layout)
        good = verify(memoryview(data), whose, number * size, shape.slot_bytes, size)
        left = wish.record.watermark - number * size
        slots = min(good.slots, left)
        if slots < min(left, size):
            ABSENT_PAGES.labels(str(good.reason)).inc()
        metrics.KV_BYTES_READ.inc(len(data))
        return Piece(number, epoch, slots, "store", data=data[: slots * shape.row_bytes]) if slots else None

    def _say(self, wish: Wish, chosen: RestorePlan) -> None:
        metrics.RESTORE_PATHS.labels(chosen.path.value).inc()
        weighed = {
            f"{option.path}:{option.source or 'compute'}": round(1e3 * option.predicted_s, 1)
            for option in chosen.alternatives
            if option.path is not Path.SPLIT
        }
        log.info(
            "restore_planned", request=str(wish.record.key), wanted=wish.wanted, path=chosen.path.value, ms=weighed
        )
