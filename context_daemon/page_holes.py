"""What became of pages that left the arena: gone before the KV store had them, or in it behind such a hole. Pure.

KV counts as far as it is in the store without a hole, so a page that was pushed out unshipped holds up all behind it until
its owner writes it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_AT_ONCE = 16  # pages that an owner is asked for: what fills a hole must not push out much else

PageId = tuple[int, int]  # page, epoch


@dataclass(slots=True)
class Holes:
    """Of one request."""

    missing: set[PageId] = field(default_factory=set)  # in neither
    behind: set[PageId] = field(default_factory=set)  # whole in the store and not here any more

    def pushed_out(self, page: PageId, stored: bool) -> None:
        (self.behind if stored else self.missing).add(page)

    def landed(self, page: PageId) -> None:
        """It left while it was under way, and all of it arrived."""
        self.missing.discard(page)
        self.behind.add(page)

    def written(self, page: PageId) -> None:
        """It is here again."""
        self.missing.discard(page)
        self.behind.discard(page)

    def over(self, reach: int, epoch: int) -> int:
        """The first page from `reach` on that is not stored behind it; nothing is kept of those before."""
        while (reach, epoch) in self.behind:
            self.behind.discard((reach, epoch))
            reach += 1
        return reach

    def first(self, page: int, epoch: int) -> tuple[int, int]:
        """Pages `[first, last)` to be written again, when `page` is the first that the store lacks."""
        last = page
        while (last, epoch) in self.missing and last < page + _AT_ONCE:
            last += 1
        return page, last

    def clear(self) -> None:
        self.missing.clear()
        self.behind.clear()
