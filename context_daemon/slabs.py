"""Who has which part of an arena: blocks of any size out of slabs of one size. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Slab:
    block_bytes: int
    free: list[int]  # offsets
    taken: set[int] = field(default_factory=set)


class Slabs:
    """Each slab holds blocks of one size; an empty slab may change its size. Offsets are bytes into the arena."""

    def __init__(self, total_bytes: int, slab_bytes: int) -> None:
        """Raises ValueError when not one slab fits."""
        if not 0 < slab_bytes <= total_bytes:
            raise ValueError(f"an arena of {total_bytes} bytes holds no slab of {slab_bytes}")
        self._slab_bytes = slab_bytes
        self._slabs: dict[int, _Slab] = {}  # by first offset
        self.used_bytes = 0
        self._unused = [start * slab_bytes for start in reversed(range(total_bytes // slab_bytes))]

    def blocks_of(self, block_bytes: int) -> int:
        """How many blocks of this size the whole arena could hold."""
        return (len(self._unused) + len(self._slabs)) * (self._slab_bytes // block_bytes)

    def take(self, block_bytes: int, count: int) -> list[int]:
        """Up to `count` blocks; fewer when there are no more. Raises ValueError when one never fits a slab."""
        if not 0 < block_bytes <= self._slab_bytes:
            raise ValueError(f"a block of {block_bytes} bytes does not fit a slab of {self._slab_bytes}")
        taken: list[int] = []
        for slab in self._slabs.values():
            if slab.block_bytes == block_bytes:
                taken += self._take_from(slab, count - len(taken))
        while len(taken) < count and (slab_or_none := self._new_slab(block_bytes)) is not None:
            taken += self._take_from(slab_or_none, count - len(taken))
        return taken

    def _take_from(self, slab: _Slab, count: int) -> list[int]:
        taken = [slab.free.pop() for _ in range(min(count, len(slab.free)))]
        slab.taken.update(taken)
        self.used_bytes += len(taken) * slab.block_bytes
        return taken

    def give(self, offset: int) -> None:
        """Raises KeyError for what is not taken."""
        slab = self._slabs.get(offset // self._slab_bytes * self._slab_bytes)
        if slab is None or offset not in slab.taken:
            raise KeyError(f"block {offset} is not taken")
        slab.taken.discard(offset)
        slab.free.append(offset)
        self.used_bytes -= slab.block_bytes

    def _new_slab(self, block_bytes: int) -> _Slab | None:
        start = self._unused.pop() if self._unused else self._emptied(block_bytes)
        if start is None:
            return None
        count = self._slab_bytes // block_bytes
        slab = _Slab(block_bytes, [start + index * block_bytes for index in reversed(range(count))])
        self._slabs[start] = slab
        return slab

    def _emptied(self, block_bytes: int) -> int | None:
        """A slab of another size that nobody uses any more."""
        for start, slab in self._slabs.items():
            if not slab.taken and slab.block_bytes != block_bytes:
                return start
        return None
