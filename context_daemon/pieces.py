"""A page under way from wherever it was to its new owner."""

from __future__ import annotations

import msgspec


class Piece(msgspec.Struct, frozen=True):
    """A page on its way to an owner: in the arena at `block`, or as bytes where the arena had no room."""

    number: int
    epoch: int
    slots: int
    source: str
    block: int = 0
    data: bytes = b""
