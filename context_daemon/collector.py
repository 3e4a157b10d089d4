"""Takes away what no request can use any more: pages in the KV store, in the arena, and blocks of workers that are gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing

import msgspec

from context_daemon.kv_garbage import Why, why_garbage
from context_daemon.observability import get_logger
from context_daemon.page_drop import PageDrop
from context_daemon.page_records import Entry
from context_daemon.page_table import PageTable
from context_daemon.records import RequestKey, RequestRecord, RequestState
from context_daemon.store import ContextStore, KVStore, StoredPage

log = get_logger()

_AT_ONCE = 8  # questions to the durable store, each on a connection of its own


class Collected(msgspec.Struct, frozen=True):
    """`stored` counts pages of the KV store by reason. Of a dry run: what would go."""

    stored: dict[Why, int] = {}
    stored_bytes: int = 0
    arena_requests: int = 0
    arena_bytes: int = 0
    blocks: int = 0  # granted to workers that are gone


def is_over(record: RequestRecord | None) -> bool:
    """No owner will ever come for it. True for what the store does not know: nothing is written before it does."""
    return record is None or record.state not in (RequestState.READY, RequestState.LEASED)


class Collector:
    """`reap(dry_run)` takes back the blocks of dead workers and says how many."""

    def __init__(
        self, table: PageTable, store: ContextStore, kv: KVStore, drop: PageDrop, reap: Callable[[bool], int]
    ) -> None:
        self._table, self._store, self._kv, self._drop, self._reap = table, store, kv, drop, reap

    async def collect(self, dry_run: bool, stored: bool) -> Collected:
        """Of this node's arena and, with `stored`, of all KV servers. Raises StoreUnavailable; what had been found until
        then is gone, and another call goes on."""
        blocks = self._reap(dry_run)
        requests, arena_bytes = await self._arena(dry_run, stored)
        counts, stored_bytes = await self._stored(dry_run) if stored else (Counter[Why](), 0)
        found = Collected(dict(counts), stored_bytes, requests, arena_bytes, blocks)
        if not dry_run:
            log.info("collected", **msgspec.to_builtins(found))
        return found

    async def _arena(self, dry_run: bool, stored: bool) -> tuple[int, int]:
        entries = {entry.key: entry for entry in self._table.entries()}
        over = [entries[key] for key, record in (await self._records(entries)).items() if is_over(record)]
        for entry in over if not dry_run else ():
            self._table.end(entry.key)
            # Found, counted and deleted with the rest once it has landed, where the KV servers are gone through next.
            await (self._drop.landed(entry.key) if stored else self._drop.over(entry.key, entry))
        return len(over), sum(map(_bytes, over))

    async def _stored(self, dry_run: bool) -> tuple[Counter[Why], int]:
        counts, size = Counter[Why](), 0
        async with aclosing(self._kv.list_pages()) as batches:
            async for batch in batches:
                garbage = await self._garbage(batch)
                counts.update(garbage.values())
                size += sum(page.bytes for page in garbage)
                if garbage and not dry_run:
                    await self._kv.delete_pages(list(garbage))
        return counts, size

    async def _garbage(self, pages: Sequence[StoredPage]) -> dict[StoredPage, Why]:
        records = await self._records({page.key for page in pages})  # after the pages were seen
        found = {page: why_garbage(page, records[page.key]) for page in pages}
        return {page: why for page, why in found.items() if why}

    async def _records(self, keys: Iterable[RequestKey]) -> dict[RequestKey, RequestRecord | None]:
        found: dict[RequestKey, RequestRecord | None] = {}
        todo = list(keys)
        for start in range(0, len(todo), _AT_ONCE):
            group = todo[start : start + _AT_ONCE]
            found |= zip(group, await asyncio.gather(*map(self._store.get_request, group)), strict=True)
        return found


def _bytes(entry: Entry) -> int:
    return sum(entry.shape.block_bytes for _ in entry.all())
