from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from context_daemon.kv_pages import page_parts
from context_daemon.kv_slots import Absent, bare, frame, framed_size, identity, seal, verify
from context_daemon.memory_kv import MemoryKV
from context_daemon.records import RequestKey
from context_daemon.store import SlotWrite

KEY, LAYOUT, SLOT, PAGE = RequestKey("job", 3, 1), "abcd", 24, 4
WHOSE = identity(KEY, 5, LAYOUT)


def raw(start: int, stop: int) -> bytes:
    return b"".join(bytes([p % 251 + 1]) * SLOT for p in range(start, stop))


def page_bytes(page: int, count: int = PAGE, key: RequestKey = KEY, epoch: int = 5, layout: str = LAYOUT) -> bytes:
    whose = identity(key, epoch, layout)
    return frame(whose, page * PAGE, raw(page * PAGE, page * PAGE + count), SLOT)


def read(data: bytes, page: int = 2) -> tuple[int, int, Absent]:
    got = verify(memoryview(data), WHOSE, page * PAGE, SLOT, PAGE)
    assert bare(memoryview(data), got.slots, SLOT).tobytes() == raw(page * PAGE, page * PAGE + got.slots)
    return got.slots, got.rejected, got.reason


def test_a_round_trip() -> None:
    assert read(page_bytes(2)) == (4, 0, Absent.NONE)
    assert read(page_bytes(2, 3)) == (3, 0, Absent.SHORT)
    assert read(b"") == (0, 0, Absent.SHORT)


def test_bytes_of_anything_else_are_absent() -> None:
    for wrong in (
        page_bytes(1),
        page_bytes(2, key=RequestKey("job", 3)),
        page_bytes(2, key=RequestKey("job", 4, 1)),
        page_bytes(2, key=RequestKey("joc", 3, 1)),
        page_bytes(2, epoch=6),
        page_bytes(2, layout="abce"),
    ):
        assert read(wrong) == (0, 4, Absent.MISMATCH)


def test_a_hole_and_a_truncated_slot_end_the_prefix() -> None:
    good, step = page_bytes(2), framed_size(SLOT)
    assert read(good[:step] + bytes(step) + good[2 * step :]) == (1, 3, Absent.HOLE)
    assert read(good[:-1]) == (3, 1, Absent.TRUNCATED)
    assert read(good[step : 2 * step] + good[:step] + good[2 * step :]) == (0, 4, Absent.MISMATCH)  # swapped slots


@given(st.integers(0, 4 * framed_size(SLOT) - 1), st.integers(0, 7))
def test_any_flipped_bit_is_found(at: int, bit: int) -> None:
    data = bytearray(page_bytes(2))
    data[at] ^= 1 << bit
    slots, _, reason = read(bytes(data))
    assert slots == at // framed_size(SLOT) and reason is Absent.MISMATCH


def test_sealing_in_place_is_framing() -> None:
    page = bytearray(page_bytes(2))
    step = framed_size(SLOT)
    for at in range(2 * step, len(page), step):
        page[at + SLOT : at + step] = bytes(step - SLOT)
    assert read(bytes(page)) == (2, 2, Absent.MISMATCH)
    seal(memoryview(page)[2 * step :], WHOSE, 10, SLOT)
    assert bytes(page) == page_bytes(2)


def test_raw_bytes_must_be_whole_slots() -> None:
    with pytest.raises(ValueError, match="whole slots"):
        frame(WHOSE, 0, b"x" * (SLOT + 1), SLOT)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=8))
async def test_writes_in_any_order_and_cut_give_the_same_pages(pieces: list[tuple[int, int]]) -> None:
    """Repeats and overlaps by position are harmless; what was written is read, nothing else."""
    store, covered = MemoryKV(), set()
    for start, count in pieces:
        data = frame(WHOSE, start, raw(start, start + count), SLOT)
        for _ in range(2):
            await store.write_slots([SlotWrite(KEY, 5, LAYOUT, start, count, SLOT, PAGE, data)])
        covered |= set(range(start, start + count))
    for page in range(8):
        found = await store.read_page(KEY, 5, LAYOUT, page)
        prefix = 0
        while prefix < PAGE and page * PAGE + prefix in covered:
            prefix += 1
        assert verify(memoryview(found or b""), WHOSE, page * PAGE, SLOT, PAGE).slots == prefix


def test_parts_are_whole_only_when_they_fill_the_page() -> None:
    data = frame(WHOSE, 3, raw(3, 10), SLOT)
    parts = list(page_parts(SlotWrite(KEY, 5, LAYOUT, 3, 7, SLOT, PAGE, data)))
    step = framed_size(SLOT)
    assert [(p.page, p.offset, p.whole, len(p.data)) for p in parts] == [
        (0, 3 * step, False, step), (1, 0, True, 4 * step), (2, 0, False, 2 * step),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="framed slots"):
        list(page_parts(SlotWrite(KEY, 5, LAYOUT, 3, 6, SLOT, PAGE, data)))
