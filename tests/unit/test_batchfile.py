from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.jobs.batchfile import BOM, Line, LineError, LineSplitter


def split(*chunks: bytes, limit: int = 1000) -> list[Line | LineError]:
    splitter = LineSplitter(limit)
    found = [item for chunk in chunks for item in splitter.feed(chunk)]
    return found + list(splitter.end())


def test_numbers_count_blank_lines() -> None:
    assert split(b"a\n\n  \r\nb\r\nc") == [Line(1, b"a"), Line(4, b"b"), Line(5, b"c")]


def test_only_newlines_split() -> None:
    text = "a\u2028b\x0bc\x85d\re"
    assert split(text.encode()) == [Line(1, text.encode())]


def test_a_byte_order_mark_is_dropped_at_the_start_only() -> None:
    assert split(BOM + b"a\n" + BOM + b"b") == [Line(1, b"a"), Line(2, BOM + b"b")]


def test_bytes_that_are_not_utf8_are_placed() -> None:
    (good, bad) = split(b"ok\nab\xff\n")
    assert good == Line(1, b"ok")
    assert isinstance(bad, LineError) and bad.line == 2
    assert "0xff" in bad.message and "column 3" in bad.message


def test_a_line_that_is_too_long_is_refused_once_and_the_next_is_read() -> None:
    for chunks in ([b"a\n" + b"x" * 50 + b"\nb\n"], [b"a\n", *[b"x" * 8] * 6, b"x\nb", b"\n"]):
        first, long, last = split(*chunks, limit=20)
        assert (first, last) == (Line(1, b"a"), Line(3, b"b"))
        assert isinstance(long, LineError) and (long.line, long.code) == (2, "line_too_long")


def test_a_long_line_at_the_end_is_refused_once() -> None:
    assert [type(item) for item in split(*[b"x" * 15] * 5, limit=20)] == [LineError]


@given(st.binary(max_size=200).filter(lambda data: b"\xff" not in data), st.lists(st.integers(0, 200)))
def test_chunk_borders_do_not_matter(data: bytes, cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert split(*[data[a:b] for a, b in pairwise(borders)]) == split(data)
