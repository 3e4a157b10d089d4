"""Who has which part of an arena: no byte is ever in two hands, and none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from context_daemon.slabs import Slabs

SLAB, TOTAL = 100, 450  # the last half slab is no slab
SIZES = (7, 30, 50, 100)


class Holding(RuleBasedStateMachine):
    """Takes and gives blocks of several sizes; `held` is who has what."""

    def __init__(self) -> None:
        super().__init__()
        self.slabs = Slabs(TOTAL, SLAB)
        self.held: dict[int, int] = {}  # size by offset

    @rule(size=st.sampled_from(SIZES), count=st.integers(0, 20))
    def take(self, size: int, count: int) -> None:
        room = self._room(size)
        got = self.slabs.take(size, count)
        assert len(got) == min(count, room)
        assert not self.held.keys() & set(got) and len(set(got)) == len(got)
        self.held |= dict.fromkeys(got, size)

    def _room(self, size: int) -> int:
        """Blocks that fit into slabs that are empty or of this size already."""
        by_slab: dict[int, list[int]] = {}
        for offset, other in self.held.items():
            by_slab.setdefault(offset // SLAB, []).append(other)
        fitting = [held for start in range(TOTAL // SLAB) if set(held := by_slab.get(start, [])) <= {size}]
        return sum(SLAB // size - len(held) for held in fitting)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[offset]
        self.slabs.give(offset)
        with pytest.raises(KeyError):
            self.slabs.give(offset)

    @rule(offset=st.integers(-SLAB, TOTAL + SLAB))
    def what_is_not_taken_is_not_given(self, offset: int) -> None:
        if offset not in self.held:
            with pytest.raises(KeyError):
                self.slabs.give(offset)

    @invariant()
    def blocks_are_disjoint_and_inside(self) -> None:
        end = 0
        for offset, size in sorted(self.held.items()):
            assert offset >= end and offset + size <= TOTAL // SLAB * SLAB
            assert offset // SLAB == (offset + size - 1) // SLAB
            end = offset + size

    @invariant()
    def used_is_what_is_held(self) -> None:
        assert self.slabs.used_bytes == sum(self.held.values())


TestHolding = Holding.TestCase


@pytest.mark.parametrize("size", SIZES)
def test_an_arena_that_was_full_of_others_can_be_full_again(size: int) -> None:
    slabs = Slabs(TOTAL, SLAB)
    for other in (*SIZES, size):
        blocks = slabs.take(other, 1000)
        assert len(blocks) == slabs.blocks_of(other) == 4 * (SLAB // other)
        for block in blocks:
            slabs.give(block)
    assert slabs.used_bytes == 0


def test_one_block_keeps_its_slab_from_other_sizes() -> None:
    slabs = Slabs(TOTAL, SLAB)
    first, *rest = slabs.take(50, 8)
    for block in rest:
        slabs.give(block)
    assert len(slabs.take(100, 10)) == 3
    slabs.give(first)
    assert len(slabs.take(100, 10)) == 1


@given(st.integers(-5, 200), st.integers(-5, 200))
def test_what_holds_nothing_is_refused(total: int, slab: int) -> None:
    if 0 < slab <= total:
        assert Slabs(total, slab).blocks_of(1) == total // slab * slab
    else:
        with pytest.raises(ValueError, match="holds no slab"):
            Slabs(total, slab)


@pytest.mark.parametrize("size", [0, -1, SLAB + 1])
def test_a_block_that_never_fits_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Slabs(TOTAL, SLAB).take(size, 1)
