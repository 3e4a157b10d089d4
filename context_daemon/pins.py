"""Blocks that somebody reads: they are given back when the last reader let go, not before. Pure."""

from __future__ import annotations

from collections.abc import Callable


class Pins:
    """`free(block)` is called for each block that was released and that nobody reads any more."""

    def __init__(self, free: Callable[[int], None]) -> None:
        self._free = free
        self._readers: dict[int, int] = {}
        self._released: set[int] = set()  # while somebody reads them

    def pin(self, block: int) -> None:
        """Keep a block as it is while somebody reads it."""
        self._readers[block] = self._readers.get(block, 0) + 1

    def unpin(self, block: int) -> None:
        self._readers[block] -= 1
        if self._readers[block] == 0:
            del self._readers[block]
            if block in self._released:
                self._released.discard(block)
                self._free(block)

    def release(self, block: int) -> None:
        """Nobody needs it any more."""
        if block in self._readers:
            self._released.add(block)
        else:
            self._free(block)
