"""Carries pages from the arena to the KV store, behind the tokens, as the commit mode allows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from context_daemon import metrics
from context_daemon.arena import Arena
from context_daemon.commit_mode import KVCommit, ShipPolicy, dearest_first, within
from context_daemon.observability import get_logger
from context_daemon.page_table import Due, PageTable
from context_daemon.records import RequestKey
from context_daemon.store import KVStore, SlotWrite, StoreUnavailable

log = get_logger()

_BATCH_BYTES = 4 << 20  # one round to the store: tokens share the event loop with it
_PAUSE_S = 1.0  # after a store that did not answer
_TICK_S = 0.05  # a budget refills, a notice comes


class Shipper:
    """`run` until cancelled. `generation` is the KV store's: when it changes, what was there may be gone."""

    def __init__(
        self, table: PageTable, arena: Arena, kv: KVStore, policy: ShipPolicy, noticed: Callable[[], bool]
    ) -> None:
        self._table, self._arena, self._kv = table, arena, kv
        self.policy = policy
        self._noticed = noticed
        self._due: dict[RequestKey, None] = {}  # requests that may have something, oldest first
        self._wake = asyncio.Event()
        self.generation = ""

    def due(self, key: RequestKey) -> None:
        """Something of `key` was written."""
        if self.policy.ships:
            self._due[key] = None
            self._wake.set()

    async def run(self) -> None:
        while True:
            if not self._due:
                self._wake.clear()
                await self._wake.wait()
            batch = self._choose()
            if batch:
                await self._ship(batch)
            elif self._due:
                await asyncio.sleep(_TICK_S)

    def _choose(self) -> list[Due]:
        noticed = self._noticed()
        allowance = min(self.policy.allowance(time.monotonic(), noticed), _BATCH_BYTES)
        if allowance <= 0:
            return []
        due: list[Due] = []
        ordered = noticed or self.policy.budget.mode is KVCommit.AUTO
        size = 0
        for key in list(self._due):
            items = self._table.due(key)
            if not items:
                del self._due[key]
            due += items
            size += sum(item.bytes for item in items)
            if size > _BATCH_BYTES and not ordered:
                break
        return within(dearest_first(due) if ordered else due, allowance)

    async def _ship(self, batch: Sequence[Due]) -> None:
        for due in batch:
            self._table.pin(due.block)
        try:
            generation = await self._kv.write_slots([self._write(due) for due in batch])
        except StoreUnavailable as error:
            metrics.STORE_ERRORS.labels("kv").inc()
            log.warning("kv_store_away", error=str(error), effect="KV waits in the arena")
            await asyncio.sleep(_PAUSE_S)
            return
        finally:
            for due in batch:
                self._table.unpin(due.block)
        self._shipped(batch, generation)

    def _shipped(self, batch: Sequence[Due], generation: str) -> None:
        if self.generation and generation != self.generation:
            log.warning("kv_store_restarted", effect="what is here is written again")
            for entry in self._table.entries():
                self._table.mark_lost(entry.key)
                self.due(entry.key)
        self.generation = generation
        count = sum(due.bytes for due in batch)
        self.policy.spent(count)
        metrics.KV_BYTES.inc(count)
        for due in batch:
            self._table.mark_stored(due)
            self._due.pop(due.key, None)  # to the end of the queue: others come first
            self._due[due.key] = None

    def _write(self, due: Due) -> SlotWrite:
        shape, row = due.shape, due.shape.row_bytes
        return SlotWrite(
            key=due.key,
            epoch=due.epoch,
            layout=shape.layout,
            start=due.number * shape.page_size + due.start,
            count=due.stop - due.start,
            slot_bytes=shape.slot_bytes,
            page_size=shape.page_size,
            data=self._arena.view[due.block + due.start * row : due.block + due.stop * row],
        )
