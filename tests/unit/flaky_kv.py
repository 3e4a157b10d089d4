"""A KVCluster of two servers in memory, as the shipper sees it, that can be away, hang and forget."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from context_daemon.kv_node import KVWriteResult
from context_daemon.memory_kv import MemoryKV
from context_daemon.records import RequestKey
from context_daemon.store import SlotWrite, StoreUnavailable


class FlakyKV:
    """The servers in `away` are away; `open` lets writes through."""

    def __init__(self) -> None:
        self.memory = MemoryKV()
        self.away: set[str] = set()
        self.open = asyncio.Event()
        self.open.set()
        self.asked = asyncio.Event()
        self.written: list[SlotWrite] = []
        self.batches: list[int] = []

    def server_of(self, key: RequestKey) -> str:
        return "even" if key.line % 2 == 0 else "odd"

    async def write_slots(self, writes: Sequence[SlotWrite]) -> str:
        self.asked.set()
        await self.open.wait()
        if self.away & {self.server_of(write.key) for write in writes}:
            raise StoreUnavailable("away")
        self.written += writes
        self.batches.append(sum(len(write.data) for write in writes))
        return await self.memory.write_slots(writes)

    async def write_each(self, writes: Sequence[SlotWrite]) -> list[KVWriteResult]:
        try:
            return [KVWriteResult(await self.write_slots(writes))] * len(writes)
        except StoreUnavailable as error:
            return [KVWriteResult(error=str(error))] * len(writes)

    async def generation(self, key: RequestKey) -> str:
        if self.server_of(key) in self.away:
            raise StoreUnavailable("away")
        return await self.memory.write_slots([])
