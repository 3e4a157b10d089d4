"""Which KV pages are free and which are taken. Pure Python on integers."""

from __future__ import annotations


class PageAccountingError(Exception):
    """Pages were freed twice or lost: the engine's books are wrong and it must not go on."""


class PageAllocator:
    """Hands out page numbers `0 .. num_pages - 1`. Invariant: free + used == total, no page in both."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return len(self._used)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) when there are not that many."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        for page in pages:
            if page not in self._used:
                raise PageAccountingError(f"page {page} was freed but is not in use")
            self._used.remove(page)
            self._free.append(page)

    def check(self, owned: list[int]) -> None:
        """Raise unless the owners' pages are exactly the used ones and nothing was lost."""
        if sorted(owned) != sorted(self._used):
            raise PageAccountingError(
                f"sequences own {len(owned)} pages, the allocator says {self.used_count} are used"
            )
        if len(set(self._free) | self._used) != self.num_pages or self.free_count + self.used_count != self.num_pages:
            raise PageAccountingError(
                f"free {self.free_count} + used {self.used_count} pages are not the total {self.num_pages}"
            )


def pages_for(positions: int, page_size: int) -> int:
    return -(-positions // page_size)
