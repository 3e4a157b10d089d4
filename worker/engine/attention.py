"""Paged attention in blocks of fixed shape, one order of reduction per row.

A row at position p sees the blocks 0 .. p // BLOCK of BLOCK positions each, aligned at position 0 of its sequence.
Every product is `[group, head_dim] x [head_dim, BLOCK]` for one row, one key-value head and one block, or of a shape
that was seen to give the same bits, whatever runs beside it and however its prefill was cut; block results are added
in the order of the blocks. What a row cannot see inside its last block has weight exactly 0. So a row's result is a
function of its query and its own KV alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.kv_pool import KVPool

# Positions multiplied at a time: a small block wastes little on a sequence's last one, a large one needs fewer calls.
BLOCK = 64
# Part of the numerics class: to be raised by a change to the forward pass that changes a bit of any result.
REVISION = 2
PREFILL_ROWS = 128  # rows of one sequence that are attended together


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `[first, last)` of the group against one block; their pairs start at `pair`."""

    first: int
    last: int
    pair: int


@dataclass(frozen=True, slots=True)
class Group:
    """Rows `[start, stop)` of the step that are attended together. Their first segment holds all of them.

    `pieces` are the pool's `pieces_of` BLOCK // page_size pages per block: of each pair when rows have their own KV
    (`pair_row` is set), of each block when all rows belong to one sequence. `mask` is `[pairs, 1, BLOCK]`, 0 or -inf.
    """

    start: int
    stop: int
    segments: tuple[Segment, ...]
    pieces: Tensor
    mask: Tensor
    pair_row: Tensor | None


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Where a step's new KV goes, and where the old lies.

    `rows` is the number of real rows, those beyond are padding; `kv_rows` are the pool's `rows_of` their slots.
    `shared` is what `shares_blocks` said of this machine.
    """

    pool: KVPool
    rows: int
    kv_rows: Tensor
    groups: tuple[Group, ...]
    shared: bool


def paged_attention(query: Tensor, step: PagedStep, layer: int) -> Tensor:
    """Scaled queries `[rows, heads, dim]` -> `[rows, heads * dim]`; rows of no group become 0."""
    rows, heads, dim = query.shape
    kv_heads = step.pool.num_kv_heads
    size = heads // kv_heads
    # Inside, heads come first: `[kv_heads, rows or pairs, group, ...]`.
    grouped = query.new_zeros(kv_heads, rows, _padded(size), dim)
    grouped[:, :, :size] = query.view(rows, kv_heads, size, dim).transpose(0, 1)
    out = query.new_zeros(rows, kv_heads, size, dim)
    for group in step.groups:
        part = slice(group.start, group.stop)
        _attend(grouped[:, part], step, layer, group, out[part].transpose(0, 1))
    return out.view(rows, heads * dim)


def _padded(group: int) -> int:
    """Three queries to a key-value head are slower than four, and only four or more pass `shares_blocks`."""
    return 4 if group == 3 else group


def _attend(query: Tensor, step: PagedStep, layer: int, group: Group, out: Tensor) -> None:
    keys, values = step.pool.gather(layer, group.pieces, BLOCK)  # [kv_heads, blocks or pairs, BLOCK, dim]
    if group.pair_row is not None:
        scores = _each(_per_pair(query, group), keys.transpose(2, 3))
    else:
        spread = [query[:, seg.first : seg.last] for seg in group.segments]
        scores = _blockwise(spread, keys.transpose(2, 3), group, step.shared)
    scores.add_(group.mask)
    peak = _reduce_max(scores.amax(-1), group)
    weights = scores.sub_(_per_pair(peak, group).unsqueeze(-1)).exp_()
    total = _add_blocks(weights.sum(-1), group)
    if group.pair_row is not None:
        mixed = _each(weights, values)
    else:
        spread = [weights[:, seg.pair : seg.pair + seg.last - seg.first] for seg in group.segments]
        mixed = _blockwise(spread, values, group, step.shared)
    size = out.shape[2]
    torch.div(_add_blocks(mixed, group)[:, :, :size], total[:, :, :size].unsqueeze(-1), out=out)


def _each(left: Tensor, right: Tensor) -> Tensor:
    """`[kv_heads, pairs, group, k] x [kv_heads, pairs, k, n]`."""
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).view(*left.shape[:-1], right.shape[-1])


def _blockwise(lefts: list[Tensor], right: Tensor, group: Group, shared: bool) -> Tensor:
    """Each segment's `[kv_heads, rows, group, k]` times its block of `[kv_heads, blocks, k, n]`, joined along rows."""
    product = _shared if shared else _apart
    return torch.cat([product(left, right[:, block]) for block, left in enumerate(lefts)], dim=1)


def _shared(left: Tensor, right: Tensor) -> Tensor:
    """One product for all rows that see the same block."""
    return torch.bmm(left.flatten(1, 2), right).view(*left.shape[:-1], right.shape[-1])


def _apart(left: Tensor, right: Tensor) -> Tensor:
    """A product for each row, of the shape that it has in a decode step."""
    return torch.stack([torch.bmm(left[h], right[h].expand(left.shape[1], -1, -1)) for h in range(left.shape[0])])


def shares_blocks(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> bool:
    """Whether `_shared` gives, on this machine and for every number of rows, the very bits of `_each`."""
    generator = torch.Generator().manual_seed(0)
    query, weights = (
        torch.randn(kv_heads, PREFILL_ROWS, _padded(heads // kv_heads), k, generator=generator).to(dtype)
        for k in (dim, BLOCK)
    )
    keys, values = torch.randn(2, kv_heads, BLOCK, dim, generator=generator).to(dtype)
    for left, right in ((query, keys.transpose(1, 2)), (weights, values)):
        expected = _each(left, right[:, None].expand(-1, PREFILL_ROWS, -1, -1).contiguous())
        for rows in range(1, PREFILL_ROWS + 1):
            if not torch.equal(_shared(left[:, :rows], right), expected[:, :rows]):
                return False
    return True


def _reduce_max(pairs: Tensor, group: Group) -> Tensor:
    """Of each row's blocks; overwrites what it is given."""
    out = pairs[:, : group.stop - group.start]
    for seg in group.segments[1:]:
        part = out[:, seg.first : seg.last]
        torch.maximum(part, pairs[:, seg.pair : seg.pair + seg.last - seg.first], out=part)
    return out


def _add_blocks(pairs: Tensor, group: Group) -> Tensor:
    """Sum over each row's blocks, in the order of the blocks; overwrites what it is given."""
    out = pairs[:, : group.stop - group.start]
    for seg in group.segments[1:]:
        out[:, seg.first : seg.last] += pairs[:, seg.pair : seg.pair + seg.last - seg.first]
    return out


def _per_pair(rows: Tensor, group: Group) -> Tensor:
    if len(group.segments) == 1:
        return rows
    if group.pair_row is not None:
        return rows.index_select(1, group.pair_row)
    return torch.cat([rows[:, seg.first : seg.last] for seg in group.segments], dim=1)
