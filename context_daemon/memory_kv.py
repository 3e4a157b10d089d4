"""KVStore in memory, for unit tests and simulation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from fnmatch import fnmatchcase

from context_daemon.kv_pages import page_key, page_parts, pages_pattern, parse_page_key
from context_daemon.records import RequestKey
from context_daemon.store import KVStore, SlotWrite, StoredPage


class MemoryKV:
    def __init__(self) -> None:
        self._pages: dict[str, bytearray] = {}
        self._generation = 1

    def lose_everything(self) -> None:
        """What a restart of a server without persistence does."""
        self._pages.clear()
        self._generation += 1

    async def write_slots(self, writes: Sequence[SlotWrite]) -> str:
        for write in writes:
            for part in page_parts(write):
                page = self._pages.setdefault(page_key(write.layout, write.key, write.epoch, part.page), bytearray())
                if len(page) < part.offset:
                    page.extend(bytes(part.offset - len(page)))
                page[part.offset : part.offset + len(part.data)] = part.data
        return str(self._generation)

    async def read_page(self, key: RequestKey, epoch: int, layout: str, page: int) -> bytes | None:
        found = self._pages.get(page_key(layout, key, epoch, page))
        return None if found is None else bytes(found)

    async def delete_request(self, key: RequestKey, epochs: Sequence[int], layout: str, pages: int) -> None:
        for epoch in epochs:
            for page in range(pages):
                self._pages.pop(page_key(layout, key, epoch, page), None)

    async def list_pages(self, job_id: str = "") -> AsyncGenerator[list[StoredPage], None]:
        pattern = pages_pattern(job_id)
        named = [name for name in self._pages if fnmatchcase(name, pattern)]
        yield [page for name in named if (page := parse_page_key(name, len(self._pages[name]))) is not None]

    async def delete_pages(self, pages: Sequence[StoredPage]) -> int:
        names = {page_key(page.layout, page.key, page.epoch, page.page) for page in pages}
        return sum(self._pages.pop(name, None) is not None for name in names)

    async def close(self) -> None:
        """Nothing to release."""


def _conforms(store: MemoryKV) -> KVStore:
    return store
