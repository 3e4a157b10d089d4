"""How a KV slot is framed: its bytes, then a checksum and its position. Pure.

    frame = slot bytes | xxh3-64 (u64, little endian) | position (u64, little endian)

The checksum is seeded by who the slot is (job, line, choice, epoch, layout, position) and covers its bytes, so that flipped,
truncated or swapped bytes, and bytes of another request, epoch or layout, are all told from the right ones. One write at a
slot's offset moves bytes and checksum together. In the arena, in the KV store and on the wire a page is the same bytes.
"""

from __future__ import annotations

import struct
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from context_daemon.records import RequestKey

TRAILER = struct.Struct("<QQ")
TRAILER_BYTES = TRAILER.size
_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # spreads neighbouring positions over all seeds

Buffer = bytes | bytearray | memoryview


class Absent(StrEnum):
    """Why a page ended before its last slot."""

    NONE = ""  # it did not
    SHORT = "short"  # no bytes there: a partly filled page
    HOLE = "hole"  # zeros: a later slot was written, this one never
    TRUNCATED = "truncated"  # part of a slot
    MISMATCH = "mismatch"  # other bytes than were framed under this identity


class Verified(msgspec.Struct, frozen=True):
    """How far a page counts. `rejected` are the slots that were there but did not count."""

    slots: int
    rejected: int
    reason: Absent


def framed_size(slot_bytes: int) -> int:
    return slot_bytes + TRAILER_BYTES


def identity(key: RequestKey, epoch: int, layout: str) -> int:
    """Whose slots: the part of the seed that all slots of a request's epoch share."""
    return int(xxh3_64_intdigest(f"{key.job_id}\0{key.line}\0{key.choice}\0{epoch}\0{layout}\0".encode()))


def _checksum(slot: memoryview, whose: int, position: int) -> int:
    return int(xxh3_64_intdigest(slot, (whose + position * _MIX) & _MASK))


def seal(page: memoryview, whose: int, first_position: int, slot_bytes: int) -> None:
    """Write the trailers of the slots whose bytes lie in `page`, the first of them at `first_position`."""
    step = framed_size(slot_bytes)
    for index, at in enumerate(range(0, len(page), step)):
        position = first_position + index
        TRAILER.pack_into(page, at + slot_bytes, _checksum(page[at : at + slot_bytes], whose, position), position)


def seal_as(page: memoryview, raw: memoryview, whose: int, first_position: int, slot_bytes: int) -> None:
    """Write trailers into `page` for the slots in `raw`. Memory that others may reach is sealed by what was to be in it: a
    byte that a late writer changed there then never matches."""
    step = framed_size(slot_bytes)
    for index in range(len(raw) // slot_bytes):
        slot, position = raw[index * slot_bytes : (index + 1) * slot_bytes], first_position + index
        TRAILER.pack_into(page, index * step + slot_bytes, _checksum(slot, whose, position), position)


def verify(page: memoryview, whose: int, first_position: int, slot_bytes: int, page_size: int) -> Verified:
    """How many of a page's slots, from its first on, are what was sealed under this identity."""
    step = framed_size(slot_bytes)
    reason = Absent.NONE
    for index in range(page_size):
        reason = _check(page[index * step : (index + 1) * step], whose, first_position + index, slot_bytes)
        if reason is not Absent.NONE:
            break
    else:
        index = page_size
    there = min(page_size, -(-len(page) // step))
    return Verified(index, there - index, reason)


def _check(piece: memoryview, whose: int, position: int, slot_bytes: int) -> Absent:
    if len(piece) == 0:
        return Absent.SHORT
    if len(piece) < framed_size(slot_bytes):
        return Absent.TRUNCATED
    found, at = TRAILER.unpack_from(piece, slot_bytes)
    if at == position and _checksum(piece[:slot_bytes], whose, position) == found:
        return Absent.NONE
    return Absent.HOLE if not any(piece) else Absent.MISMATCH


def bare(framed: memoryview, slots: int, slot_bytes: int) -> npt.NDArray[np.uint8]:
    """The first `slots` slots without their trailers, `[slots, slot_bytes]`; a view, no copy."""
    rows = np.frombuffer(framed, np.uint8, slots * framed_size(slot_bytes))
    return rows.reshape(slots, framed_size(slot_bytes))[:, :slot_bytes]


def frame(whose: int, start: int, raw: Buffer, slot_bytes: int) -> bytes:
    """Raw consecutive slots, framed; the first is at position `start`. Raises ValueError unless `raw` holds whole slots."""
    count, rest = divmod(len(raw), slot_bytes)
    if rest:
        raise ValueError(f"slots at {start}: {len(raw)} bytes are not whole slots of {slot_bytes}")
    out, step = bytearray(count * framed_size(slot_bytes)), framed_size(slot_bytes)
    for index in range(count):
        out[index * step : index * step + slot_bytes] = raw[index * slot_bytes : (index + 1) * slot_bytes]
    seal(memoryview(out), whose, start, slot_bytes)
    return bytes(out)
