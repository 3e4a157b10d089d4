"""How a KV slot is framed: its bytes, then a checksum and its position. Pure.

    frame = slot bytes | crc32 (u32, little endian) | position (u32, little endian)

The checksum covers who the slot is (job, line, choice, epoch, layout), its position and its bytes, so that flipped,
truncated or swapped bytes, and bytes of another request, epoch or layout, are all told from the right ones. One write at a
slot's offset moves bytes and checksum together.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from zlib import crc32

import msgspec

from context_daemon.records import RequestKey

TRAILER = struct.Struct("<II")
TRAILER_BYTES = TRAILER.size
_POSITION = struct.Struct("<I")

Buffer = bytes | bytearray | memoryview


class Absent(StrEnum):
    """Why a page ended before its last slot."""

    NONE = ""  # it did not
    SHORT = "short"  # no bytes there: a partly filled page
    HOLE = "hole"  # zeros: a later slot was written, this one never
    TRUNCATED = "truncated"  # part of a slot
    MISMATCH = "mismatch"  # other bytes than were framed under this identity


class Unframed(msgspec.Struct, frozen=True):
    """The valid prefix of a page. `rejected` counts the slots that were there but did not count."""

    raw: bytes
    slots: int
    rejected: int
    reason: Absent


def framed_size(slot_bytes: int) -> int:
    return slot_bytes + TRAILER_BYTES


def _identity(key: RequestKey, epoch: int, layout: str) -> int:
    return crc32(f"{key.job_id}\0{key.line}\0{key.choice}\0{epoch}\0{layout}\0".encode())


def frame(key: RequestKey, epoch: int, layout: str, start: int, raw: Buffer, slot_bytes: int) -> bytes:
    """Frame consecutive raw slots, the first at position `start`. Raises ValueError unless `raw` holds whole slots."""
    count, rest = divmod(len(raw), slot_bytes)
    if rest:
        raise ValueError(f"frame of {key} at {start}: {len(raw)} bytes are not whole slots of {slot_bytes}")
    view, identity = memoryview(raw).cast("B"), _identity(key, epoch, layout)
    pieces: list[Buffer] = []
    for index in range(count):
        slot = view[index * slot_bytes : (index + 1) * slot_bytes]
        position = start + index
        pieces += (slot, TRAILER.pack(crc32(slot, crc32(_POSITION.pack(position), identity)), position))
    return b"".join(pieces)


def unframe(
    key: RequestKey, epoch: int, layout: str, page: int, framed: Buffer, slot_bytes: int, page_size: int
) -> Unframed:
    """The slots of a page up to the first that is absent or does not match."""
    step, view, identity = framed_size(slot_bytes), memoryview(framed).cast("B"), _identity(key, epoch, layout)
    pieces: list[memoryview] = []
    reason = Absent.NONE
    for index in range(page_size):
        piece = view[index * step : (index + 1) * step]
        reason = _check(piece, identity, page * page_size + index, slot_bytes, step)
        if reason is not Absent.NONE:
            break
        pieces.append(piece[:slot_bytes])
    there = min(page_size, -(-len(view) // step))
    return Unframed(b"".join(pieces), len(pieces), there - len(pieces), reason)


def _check(piece: memoryview, identity: int, position: int, slot_bytes: int, step: int) -> Absent:
    if len(piece) == 0:
        return Absent.SHORT
    if len(piece) < step:
        return Absent.TRUNCATED
    found, at = TRAILER.unpack_from(piece, slot_bytes)
    if at == position and crc32(piece[:slot_bytes], crc32(_POSITION.pack(position), identity)) == found:
        return Absent.NONE
    return Absent.HOLE if not any(piece) else Absent.MISMATCH
