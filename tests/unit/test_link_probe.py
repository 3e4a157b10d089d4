"""What a short transfer says of a link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_daemon.link_probe import rate_of


def test_the_slow_start_does_not_count() -> None:
    """A connection's first bytes wait for the other end's word: of 4 MB the second half came at 1 GB/s."""
    marks = [(100_000, 0.010), (500_000, 0.020), (2_000_000, 0.030), (3_000_000, 0.031), (4_000_000, 0.032)]
    rate = rate_of(marks)
    assert rate is not None
    assert rate.setup_s == 0.010
    assert rate.bytes_per_s == pytest.approx(1e9)


@pytest.mark.parametrize("marks", [[], [(4_000_000, 0.01)]])
def test_too_little_says_nothing(marks: list[tuple[int, float]]) -> None:
    assert rate_of(marks) is None


def test_one_piece_after_the_first_is_enough() -> None:
    rate = rate_of([(100, 0.5), (1_000_000, 1.5)])
    assert rate is not None and rate.bytes_per_s == pytest.approx(1e6, rel=0.01)


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 1)), min_size=2))
def test_whatever_comes_it_is_a_rate(pieces: list[tuple[int, float]]) -> None:
    marks, size, at = [], 0, 0.0
    for more, seconds in pieces:
        size, at = size + more, at + seconds
        marks.append((size, at))
    rate = rate_of(marks)
    assert rate is not None and rate.bytes_per_s > 0
