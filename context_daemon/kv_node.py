"""One server of a KVCluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import ParamSpec, TypeVar

import msgspec
from redis.exceptions import TimeoutError as RedisTimeoutError

from context_daemon.link_probe import PROBE_BYTES, PROBE_S
from context_daemon.rates import MIN_SECONDS, LinkRate
from context_daemon.records import RequestKey
from context_daemon.redis_kv import RedisKV
from context_daemon.store import SlotWrite, StoredPage, StoreUnavailable

PAUSE_S = 5.0
P = ParamSpec("P")
T = TypeVar("T")


class KVWriteResult(msgspec.Struct, frozen=True):
    """Of one write: the generation of the server that took it, or why it does not count. One of the two is ""."""

    generation: str = ""
    error: str = ""


class KVNode:
    """Bounds the page reads under way, and waits for a server that hangs only once in `PAUSE_S`: within it every call
    raises StoreUnavailable at once, so that one hanging server does not hold up each write that others share. A server that
    refuses connections says so at once and is tried each time: it may be back any moment."""

    def __init__(self, kv: RedisKV, reads: int, clock: Callable[[], float]) -> None:
        self._kv, self._clock = kv, clock
        self._reads = asyncio.Semaphore(reads)
        self._paused_until: float | None = None

    async def write(self, writes: Sequence[SlotWrite]) -> KVWriteResult:
        try:
            return KVWriteResult(generation=await self._call(self._kv.write_slots, writes))
        except StoreUnavailable as error:
            return KVWriteResult(error=str(error))

    async def read(self, key: RequestKey, epoch: int, layout: str, page: int) -> bytes | None:
        async with self._reads:
            return await self._call(self._kv.read_page, key, epoch, layout, page)

    async def delete(self, key: RequestKey, epochs: Sequence[int], layout: str, pages: int) -> None:
        await self._call(self._kv.delete_request, key, epochs, layout, pages)

    async def list_pages(self, job_id: str) -> AsyncGenerator[list[StoredPage], None]:
        """Not bounded by the pauses of the others' calls: whoever lists waits."""
        async with aclosing(self._kv.list_pages(job_id)) as found:
            async for pages in found:
                yield pages

    async def delete_pages(self, pages: Sequence[StoredPage]) -> int:
        return await self._call(self._kv.delete_pages, pages)

    async def generation(self) -> str:
        return await self._call(self._kv.generation)

    async def probe(self, at_once: int) -> LinkRate:
        """How fast pages come, so many at once. Raises StoreUnavailable."""
        await self._call(self._kv.timed_read, 1, at_once)  # opens the connections
        setup_s = min([await self._call(self._kv.timed_read, 1, 1) for _ in range(3)])
        for parts in (16, 4, 1):
            size = PROBE_BYTES // parts // at_once
            seconds = await self._call(self._kv.timed_read, size, at_once)
            if seconds > PROBE_S:
                break
        return LinkRate(size * at_once / max(seconds - setup_s, MIN_SECONDS), setup_s)

    async def close(self) -> None:
        await self._kv.close()

    async def _call(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._paused_until is not None and self._clock() < self._paused_until:
            raise StoreUnavailable(
                f"KV server {self._kv.address} did not answer in time and is not asked for {PAUSE_S:g} s"
            )
        try:
            answer = await call(*args, **kwargs)
        except StoreUnavailable as error:
            if isinstance(error.__cause__, RedisTimeoutError | TimeoutError):
                self._paused_until = self._clock() + PAUSE_S
            raise
        self._paused_until = None
        return answer
