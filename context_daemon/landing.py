"""Where pages from elsewhere come down: free blocks of the arena, or plain memory when there are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from context_daemon.arena import Arena
from context_daemon.page_records import Shape
from context_daemon.page_stream import PageHead
from context_daemon.pieces import Piece
from context_daemon.slabs import Slabs

Keep = Callable[[Callable[[], None]], None]  # takes what to do when the page's reader is done


@dataclass(frozen=True, slots=True)
class Spot:
    """Room for one page; `block` is where in the arena, None in plain memory."""

    view: memoryview
    block: int | None


class Landing:
    """Used in the event loop only; the bytes may be received in any thread."""

    def __init__(self, arena: Arena, slabs: Slabs) -> None:
        self._arena, self._slabs = arena, slabs

    def take(self, shape: Shape, count: int) -> list[Spot]:
        fits = self._slabs.blocks_of(shape.block_bytes) > 0
        blocks = self._slabs.take(shape.block_bytes, count) if fits else []
        spots = [Spot(self._arena.view[block : block + shape.block_bytes], block) for block in blocks]
        return spots + [Spot(memoryview(bytearray(shape.block_bytes)), None) for _ in range(count - len(blocks))]

    def give(self, spot: Spot) -> None:
        """It was not used."""
        spot.view.release()
        if spot.block is not None:
            self._slabs.give(spot.block)

    def landed(self, spot: Spot, shape: Shape, head: PageHead, slots: int, source: str, keep: Keep) -> Piece:
        """The page as its reader may use it until what was given to `keep` is called."""
        if spot.block is None:
            data = bytes(spot.view[: slots * shape.row_bytes])
            return Piece(head.page, head.epoch, slots, source, data=data)
        block = spot.block
        spot.view.release()
        keep(lambda: self._slabs.give(block))
        return Piece(head.page, head.epoch, slots, source, block=block)

    def place(self, piece: Piece, shape: Shape, keep: Keep) -> Piece:
        """A page that came as bytes, in a block; as it is when there is none."""
        (spot,) = self.take(shape, 1)
        if spot.block is None:
            return piece
        spot.view[: len(piece.data)] = piece.data
        head = PageHead(piece.number, piece.epoch, piece.slots)
        return self.landed(spot, shape, head, piece.slots, piece.source, keep)
