"""Takes a request's pages out of the KV store: all of them when it is over, or those of epochs that nobody will name."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

from context_daemon.kv_garbage import unnamed
from context_daemon.observability import get_logger
from context_daemon.page_records import Entry
from context_daemon.page_table import PageTable
from context_daemon.records import RequestKey, RequestRecord
from context_daemon.shipper import Shipper
from context_daemon.store import ContextStore, KVStore, StoreUnavailable

log = get_logger()

_AT_ONCE = 8  # each call has a connection of its own, which stays: a batch that ends together must not open hundreds


class Pages(Protocol):
    """What of the KVService is needed."""

    table: PageTable
    shipper: Shipper

    def page_size(self, layout: str) -> int: ...


class PageDrop:
    """What it misses, for a server is away say, goes with its TTL or with `tideover context gc`."""

    def __init__(self, store: ContextStore, kv: KVStore, pages: Pages) -> None:
        self._store, self._kv, self._pages = store, kv, pages
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def landed(self, key: RequestKey) -> None:
        """Until nothing that this daemon ships of a request that is over is under way any more."""
        await self._pages.shipper.landed(key)

    async def over(self, key: RequestKey, here: Entry | None) -> None:
        """A request that is over; `here` is what the arena had of it."""
        try:
            await self._pages.shipper.landed(key)
            async with self._turns:
                await self._drop(key, here)
        except StoreUnavailable as error:
            log.warning("pages_not_dropped", request=str(key), error=str(error))

    async def _drop(self, key: RequestKey, here: Entry | None) -> None:
        record = await self._store.get_request(key)
        if record is None:
            return
        epochs: dict[str, set[int]] = {record.layout: {segment.epoch for segment in record.segments}}
        sizes = {record.layout: self._pages.page_size(record.layout)}
        if here is not None and here.sent:  # also what no watermark ever told of
            epochs[here.shape.layout] = here.sent | epochs.get(here.shape.layout, set())
            sizes[here.shape.layout] = here.shape.page_size
        for layout, under in epochs.items():
            await self._delete(record, here, under, layout, sizes[layout])

    async def unnamed(self, entry: Entry, record: RequestRecord) -> None:
        """Of a request that is not over, what went to the KV store under epochs whose watermark was never committed."""
        useless = {epoch for epoch in entry.sent if unnamed(entry.shape.layout, epoch, record)}
        if not useless:
            return
        try:
            self._pages.table.unship(entry, useless)  # before the wait: nothing more of them goes there behind it
            await self._pages.shipper.landed(entry.key)
            await self._delete(record, entry, useless, entry.shape.layout, entry.shape.page_size)
            entry.sent -= useless
        except StoreUnavailable as error:
            log.warning("pages_not_dropped", request=str(entry.key), error=str(error))

    async def _delete(
        self, record: RequestRecord, here: Entry | None, epochs: Collection[int], layout: str, page_size: int
    ) -> None:
        """Up to the last token, and as far as the arena's pages reach: an owner that died was ahead of its commits."""
        positions = len(record.spec.prompt_token_ids) + len(record.tokens)
        pages = max([-(-positions // page_size), *(number + 1 for number, _ in (here.all() if here else ()))])
        if layout and epochs:
            await self._kv.delete_request(record.key, sorted(epochs), layout, pages)
