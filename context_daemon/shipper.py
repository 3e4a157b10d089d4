"""Carries pages from the arena to the KV servers, behind the tokens, as the commit mode allows."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from context_daemon import metrics
from context_daemon.arena import Arena
from context_daemon.commit_mode import KVCommit, ShipPolicy, dearest_first, within
from context_daemon.fault_points import Point, hit
from context_daemon.kv_losses import KVLosses
from context_daemon.kv_node import KVWriteResult
from context_daemon.observability import get_logger
from context_daemon.page_records import Due
from context_daemon.page_table import PageTable
from context_daemon.records import RequestKey
from context_daemon.store import SlotWrite, StoreUnavailable

log = get_logger()

_BATCH_BYTES = 4 << 20  # one round to a server: tokens share the event loop with it
_PAUSE_S = 1.0  # after a server that did not answer
_TICK_S = 0.05  # a budget refills, a notice comes
_CHECK_S = 2.0  # a server that nothing is written to is asked whether it still has what it was given


class KVServers(Protocol):
    """What of a KVCluster the shipper needs."""

    def server_of(self, key: RequestKey) -> str: ...

    async def write_each(self, writes: Sequence[SlotWrite]) -> list[KVWriteResult]: ...

    async def generation(self, key: RequestKey) -> str: ...


class Shipper:
    """`run` until cancelled. Each server has one message under way and its own pauses: one that hangs or is away holds up
    the requests that lie on it and no others. What a server lost goes there again, as far as it is in the arena; owners
    hear of it from `losses`."""

    def __init__(
        self, table: PageTable, arena: Arena, kv: KVServers, policy: ShipPolicy, noticed: Callable[[], bool]
    ) -> None:
        self._table, self._arena, self._kv = table, arena, kv
        self.policy = policy
        self.losses = KVLosses()
        self._noticed = noticed
        self._due: dict[RequestKey, None] = {}  # requests that may have something, oldest first
        self._wake = asyncio.Event()
        self._flying: dict[str, asyncio.Task[None]] = {}  # what is under way, by server
        self._paused: dict[str, float] = {}  # until then, servers that are away
        self._heard_at: dict[str, float] = {}

    def due(self, key: RequestKey) -> None:
        """Something of `key` was written."""
        if self.policy.ships:
            self._due[key] = None
            self._wake.set()

    async def restoring(self, key: RequestKey, epoch: int) -> None:
        """An owner is about to rely on pages of the store (see KVLosses.restoring). Waits for the server's answer."""
        try:
            generation = await self._kv.generation(key)
        except StoreUnavailable:
            generation = None
        self._lost(self._kv.server_of(key), self.losses.restoring(key, epoch, generation))

    async def landed(self, key: RequestKey) -> None:
        """Until nothing of a request that has just ended is under way any more."""
        task = self._flying.get(self._kv.server_of(key))
        if task is not None:
            await asyncio.wait([task])

    async def run(self) -> None:
        try:
            while True:
                self._wake.clear()
                self._land()
                self._launch()
                with suppress(TimeoutError):  # wait_for may swallow a cancellation (Python 3.11)
                    async with asyncio.timeout(_TICK_S if self._due else _CHECK_S):
                        await self._wake.wait()
        finally:
            for task in self._flying.values():
                task.cancel()
            await asyncio.gather(*self._flying.values(), return_exceptions=True)

    # -- who goes ---------------------------------------------------------------------------------------------------
    def _launch(self) -> None:
        while batch := self._choose():
            groups: dict[str, list[Due]] = {}
            for due in batch:
                groups.setdefault(self._kv.server_of(due.key), []).append(due)
            for server, group in groups.items():
                self._fly(server, self._ship(server, group))
        for key in self.losses.samples():
            server = self._kv.server_of(key)
            if self._free(server) and time.monotonic() - self._heard_at.get(server, -math.inf) >= _CHECK_S:
                self._fly(server, self._check(server, key))

    def _fly(self, server: str, work: Coroutine[None, None, None]) -> None:
        task = self._flying[server] = asyncio.create_task(work, name=f"KV to {server}")
        task.add_done_callback(lambda _: self._wake.set())

    def _land(self) -> None:
        """Raises what ended a message, if it was not the server."""
        for server, task in list(self._flying.items()):
            if task.done():
                del self._flying[server]
                task.result()

    def _free(self, server: str) -> bool:
        return server not in self._flying and self._paused.get(server, -math.inf) <= time.monotonic()

    def _choose(self) -> list[Due]:
        """What goes now to servers that are free; afterwards they are not."""
        noticed = self._noticed()
        allowance = min(self.policy.allowance(time.monotonic(), noticed), _BATCH_BYTES)
        if allowance <= 0:
            self._due = {key: None for key in self._due if self._table.get(key) is not None}
            return []
        due: list[Due] = []
        ordered = noticed or self.policy.budget.mode is KVCommit.AUTO
        size = 0
        for key in [key for key in self._due if self._free(self._kv.server_of(key))]:
            items = self._table.due(key)
            if not items:
                del self._due[key]
            due += items
            size += sum(item.bytes for item in items)
            if size > _BATCH_BYTES and not ordered:
                break
        return within(dearest_first(due) if ordered else due, allowance)

    # -- on the way -------------------------------------------------------------------------------------------------
    async def _ship(self, server: str, batch: Sequence[Due]) -> None:
        self.policy.spent(sum(due.bytes for due in batch))  # at once: the other servers share the budget
        for due in batch:
            self._table.sending(due)
        try:
            hit(Point.SHIP_STARTED)
            results = await self._kv.write_each([self._write(due) for due in batch])
            hit(Point.SHIP_STORED)
        finally:
            for due in batch:
                self._table.pins.unpin(due.block)
        for due, result in zip(batch, results, strict=True):
            if result.error:
                self.policy.spent(-due.bytes)
            else:
                self._shipped(server, due, result.generation)
        for error in {result.error for result in results if result.error}:
            self._away(server, error)

    async def _check(self, server: str, key: RequestKey) -> None:
        try:
            self._hear(server, key, await self._kv.generation(key))
        except StoreUnavailable as error:
            self._away(server, str(error))

    def _shipped(self, server: str, due: Due, generation: str) -> None:
        self._hear(server, due.key, generation)
        metrics.KV_BYTES.inc(due.bytes)
        self._table.mark_stored(due)
        self._due.pop(due.key, None)  # to the end of the queue: others come first
        self._due[due.key] = None

    def _hear(self, server: str, key: RequestKey, generation: str) -> None:
        self._heard_at[server] = time.monotonic()
        if self._paused.pop(server, None) is not None:
            log.info("kv_store_back", server=server)
        self._lost(server, self.losses.heard(key, generation))

    def _lost(self, server: str, keys: Iterable[RequestKey]) -> None:
        here = [key for key in keys if self._table.get(key) is not None]
        if here:
            log.warning("kv_store_restarted", server=server, requests=len(here), effect="what is here is written again")
        for key in here:
            self._table.mark_lost(key)
            self.due(key)

    def _away(self, server: str, error: str) -> None:
        if server not in self._paused:
            log.warning("kv_store_away", server=server, error=error, effect="its KV waits in the arena")
        metrics.STORE_ERRORS.labels("kv").inc()
        self._paused[server] = time.monotonic() + _PAUSE_S

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
