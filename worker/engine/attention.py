"""Paged attention in blocks of fixed shape, one order of reduction per row.

A row at position p sees the blocks 0 .. p // BLOCK of BLOCK positions each, aligned at position 0 of its sequence.
Every product is `[group, head_dim] x [head_dim, BLOCK]` for one row, one key-value head and one block, whatever runs
beside it and however its prefill was cut; block results are added in the order of the blocks. What a row cannot see
inside its last block has weight exactly 0. So a row's result is a function of its query and its own KV alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.kv_pool import KVPool

# Positions multiplied at a time: a small block wastes little on a sequence's last one, a large one needs fewer calls.
BLOCK = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `[first, last)` of the group against one block; their pairs start at `pair`."""

    first: int
    last: int
    pair: int


@dataclass(frozen=True, slots=True)
class Group:
    """Rows `[start, stop)` of the step that are attended together. Their first segment holds all of them.

    `pages` lists BLOCK // page_size pages per block: of each pair when rows have their own KV (`pair_row` is set),
    of each block when all rows belong to one sequence. `mask` is `[pairs, 1, BLOCK]`, 0 or -inf.
    """

    start: int
    stop: int
    segments: tuple[Segment, ...]
    pages: Tensor
    mask: Tensor
    pair_row: Tensor | None


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Where a step's new KV goes, and where the old lies."""

    pool: KVPool
    slots: Tensor  # of each real row; the rows beyond are padding
    groups: tuple[Group, ...]


def paged_attention(query: Tensor, step: PagedStep, layer: int) -> Tensor:
    """Scaled queries `[rows, heads, dim]` -> `[rows, heads * dim]`; rows of no group become 0."""
    rows, heads, dim = query.shape
    kv_heads = step.pool.num_kv_heads
    grouped = query.view(rows, kv_heads, heads // kv_heads, dim)
    out = torch.zeros(rows, kv_heads, heads // kv_heads, dim, dtype=query.dtype)
    for group in step.groups:
        part = slice(group.start, group.stop)
        _attend(grouped[part], step.pool, layer, group, out[part].transpose(0, 1))
    return out.view(rows, heads * dim)


def _attend(query: Tensor, pool: KVPool, layer: int, group: Group, out: Tensor) -> None:
    """Inside, heads come first: `[kv_heads, pairs or rows, group, ...]`."""
    keys, values = pool.gather(layer, group.pages, BLOCK)  # [blocks or pairs, BLOCK, kv_heads, dim]
    scores = _scores(query, keys, group).add_(group.mask)
    peak = _reduce_max(scores.amax(-1), group)
    weights = scores.sub_(_per_pair(peak, group).unsqueeze(-1)).exp_()
    total = _add_blocks(weights.sum(-1), group)
    torch.div(_add_blocks(_mix(weights, values, group), group), total.unsqueeze(-1), out=out)


def _scores(query: Tensor, keys: Tensor, group: Group) -> Tensor:
    _, kv_heads, heads, _ = query.shape
    out = torch.empty(kv_heads, group.mask.shape[0], heads, BLOCK, dtype=query.dtype)
    if group.pair_row is not None:
        query = query.index_select(0, group.pair_row)
        for h in range(kv_heads):
            torch.bmm(query[:, h], keys[:, :, h].transpose(1, 2), out=out[h])
        return out
    for block, seg in enumerate(group.segments):
        for h in range(kv_heads):
            rows = query[seg.first : seg.last, h]
            shared = keys[block, :, h].t().expand(rows.shape[0], -1, -1)
            torch.bmm(rows, shared, out=out[h, seg.pair : seg.pair + rows.shape[0]])
    return out


def _mix(weights: Tensor, values: Tensor, group: Group) -> Tensor:
    kv_heads, pairs, heads, _ = weights.shape
    out = torch.empty(kv_heads, pairs, heads, values.shape[-1], dtype=weights.dtype)
    if group.pair_row is not None:
        for h in range(kv_heads):
            torch.bmm(weights[h], values[:, :, h], out=out[h])
        return out
    for block, seg in enumerate(group.segments):
        for h in range(kv_heads):
            part = slice(seg.pair, seg.pair + seg.last - seg.first)
            torch.bmm(weights[h, part], values[block, :, h].expand(seg.last - seg.first, -1, -1), out=out[h, part])
    return out


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
