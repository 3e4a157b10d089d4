"""How a step's rows are put together for attention: which rows see which blocks, and where those lie."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.engine.attention import BLOCK, PREFILL_ROWS, Group, Segment
from worker.engine.kv_pool import KVPool
from worker.engine.scheduler import Chunk

_DECODE_PAIRS = 48  # (row, block) pairs gathered at a time: what stays near, without too many calls


def order_chunks(chunks: list[Chunk]) -> list[Chunk]:
    """Single rows first, longest context first, as `build_groups` wants them; then longer chunks."""
    return sorted(chunks, key=lambda c: (c.length != 1, -c.start))


def build_groups(chunks: list[Chunk], page_size: int, pool: KVPool) -> tuple[Group, ...]:
    """Groups over the rows of `chunks`, which are in the order of `order_chunks`."""
    groups: list[Group] = []
    row = 0
    singles: list[Chunk] = []
    for chunk in chunks:
        if chunk.length > 1:
            groups += _chunk_groups(chunk, len(singles) + row, page_size, pool)
            row += chunk.length
        else:
            singles.append(chunk)
    start = 0
    for part in _split_singles(singles):
        groups.append(_single_group(part, start, page_size, pool))
        start += len(part)
    return tuple(groups)


def _split_singles(chunks: list[Chunk]) -> list[list[Chunk]]:
    parts: list[list[Chunk]] = []
    pairs = _DECODE_PAIRS
    for chunk in chunks:
        blocks = _blocks(chunk.start)
        if pairs + blocks > _DECODE_PAIRS:
            parts.append([])
            pairs = 0
        parts[-1].append(chunk)
        pairs += blocks
    return parts


def _single_group(chunks: list[Chunk], start: int, page_size: int, pool: KVPool) -> Group:
    """One row per sequence. Longest first, so that the rows that see block j are a prefix."""
    segments: list[Segment] = []
    pages: list[int] = []
    rows: list[int] = []
    positions: list[int] = []
    pair = 0
    for block in range(_blocks(chunks[0].start)):
        seen = [c for c in chunks if _blocks(c.start) > block]
        segments.append(Segment(0, len(seen), pair))
        pair += len(seen)
        rows += range(len(seen))
        positions += [c.start - block * BLOCK for c in seen]
        for chunk in seen:
            pages += _block_pages(chunk.sequence.pages, block, page_size, pool.zero_page)
    return Group(
        start, start + len(chunks), tuple(segments), pool.pieces_of(pages), _mask(positions), torch.tensor(rows)
    )


def _chunk_groups(chunk: Chunk, row: int, page_size: int, pool: KVPool) -> list[Group]:
    return [
        _chunk_group(chunk, first, min(first + PREFILL_ROWS, chunk.length), row, page_size, pool)
        for first in range(0, chunk.length, PREFILL_ROWS)
    ]


def _chunk_group(chunk: Chunk, first: int, last: int, row: int, page_size: int, pool: KVPool) -> Group:
    """Rows `[first, last)` of one sequence's chunk: the rows that see block j are a suffix."""
    start, segments, pages, positions, pair = chunk.start + first, [], [], [], 0
    for block in range(_blocks(chunk.start + last - 1)):
        lowest = max(0, block * BLOCK - start)
        segments.append(Segment(lowest, last - first, pair))
        pair += last - first - lowest
        positions += [start + i - block * BLOCK for i in range(lowest, last - first)]
        pages += _block_pages(chunk.sequence.pages, block, page_size, pool.zero_page)
    return Group(row + first, row + last, tuple(segments), pool.pieces_of(pages), _mask(positions), None)


def _block_pages(table: list[int], block: int, page_size: int, zero_page: int) -> list[int]:
    count = BLOCK // page_size
    pages = table[block * count : (block + 1) * count]
    return pages + [zero_page] * (count - len(pages))


def _mask(positions: list[int]) -> Tensor:
    """`[pairs, 1, BLOCK]`: 0 up to the row's position within the block, -inf beyond."""
    beyond = torch.arange(BLOCK)[None, :] > torch.tensor(positions)[:, None]
    return torch.zeros(len(positions), BLOCK).masked_fill_(beyond, -torch.inf).unsqueeze(1)


def _blocks(position: int) -> int:
    return position // BLOCK + 1
