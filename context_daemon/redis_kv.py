"""KVStore over a Redis-compatible server without persistence and with LRU eviction.

kv:<layout>:<job>:<line>.<choice>:<epoch>:<page>   string, framed slots by slot offset; TTL, 6 h by default
kv:generation                                      string, drawn by whoever finds it missing; no TTL
kv:probe:<random>                                  string, read to learn how fast that is; 10 s
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from context_daemon.kv_pages import PagePart, page_key, page_parts, pages_pattern, parse_page_key
from context_daemon.records import RequestKey
from context_daemon.redis_script import Arg, RedisScripts, text
from context_daemon.store import KVStore, SlotWrite, StoredPage, StoreUnavailable

GENERATION = "kv:generation"
_CHUNK = 500
_PROBE_TTL_S = 10


class RedisKV(RedisScripts):
    """`generation` is a value kept beside the pages instead of the server's run_id: it changes with a restart and also
    with a FLUSHALL, and one small GET in each write's own pipeline tells it."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 2.0,
        ttl_s: int = 6 * 3600,
        new_generation: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        super().__init__(url, timeout_s=timeout_s)
        self._ttl_s, self._new_generation = ttl_s, new_generation

    async def write_slots(self, writes: Sequence[SlotWrite]) -> str:
        parts: list[Sequence[Arg]] = []
        whole: list[Sequence[Arg]] = []
        for write in writes:
            for part in page_parts(write):
                name = page_key(write.layout, write.key, write.epoch, part.page)
                (whole if part.whole else parts).extend(self._commands(name, part))
        before = await self.generation() if whole else None
        for command in whole:  # large values one by one: a pipeline of them is slower
            await self._command(*command)
        replies = await self._checked([*self._generation_commands(), *parts])
        after = text(replies[1])
        if before not in (None, after):
            raise StoreUnavailable(f"KV store {self.address} was restarted during a write: write again from position 0")
        return after

    def _generation_commands(self) -> list[Sequence[Arg]]:
        return [("SET", GENERATION, self._new_generation(), "NX"), ("GET", GENERATION)]

    def _commands(self, name: str, part: PagePart) -> list[Sequence[Arg]]:
        data: bytes = part.data  # type: ignore[assignment]  # the client takes any buffer; a copy would cost
        if part.whole:
            return [("SET", name, data, "EX", self._ttl_s)]
        return [("SETRANGE", name, part.offset, data), ("EXPIRE", name, self._ttl_s)]

    async def read_page(self, key: RequestKey, epoch: int, layout: str, page: int) -> bytes | None:
        value: bytes | None = await self._command("GET", page_key(layout, key, epoch, page))
        return value

    async def delete_request(self, key: RequestKey, epochs: Sequence[int], layout: str, pages: int) -> None:
        names = [page_key(layout, key, epoch, page) for epoch in epochs for page in range(pages)]
        for start in range(0, len(names), _CHUNK):
            await self._command("UNLINK", *names[start : start + _CHUNK])

    async def list_pages(self, job_id: str = "") -> AsyncGenerator[list[StoredPage], None]:
        pattern, cursor = pages_pattern(job_id), b"0"
        while True:
            cursor, found = await self._command("SCAN", cursor, "MATCH", pattern, "COUNT", _CHUNK)
            names = [text(name) for name in found]
            sizes = await self._checked([("STRLEN", name) for name in names])
            pages = [parse_page_key(name, size) for name, size in zip(names, sizes, strict=True) if size]
            yield [page for page in pages if page is not None]
            if int(cursor) == 0:
                return

    async def delete_pages(self, pages: Sequence[StoredPage]) -> int:
        names, gone = [page_key(page.layout, page.key, page.epoch, page.page) for page in pages], 0
        for start in range(0, len(names), _CHUNK):
            gone += int(await self._command("UNLINK", *names[start : start + _CHUNK]))
        return gone

    async def timed_read(self, size: int, at_once: int) -> float:
        """Seconds to read `size` bytes so many times at once, of a value made for that."""
        name = f"kv:probe:{secrets.token_hex(8)}"
        await self._command("SET", name, bytes(size), "EX", _PROBE_TTL_S)
        started = time.perf_counter()
        await asyncio.gather(*(self._command("GET", name) for _ in range(at_once)))
        seconds = time.perf_counter() - started
        await self._command("UNLINK", name)
        return seconds

    async def generation(self) -> str:
        return text((await self._checked(self._generation_commands()))[1])


def _conforms(store: RedisKV) -> KVStore:
    return store
