"""Paged attention in blocks of fixed shape, one order of reduction per row.

A row at position p sees the blocks 0 .. p // BLOCK of BLOCK positions each, aligned at position 0 of its sequence.
Every product is `[group, head_dim] x [head_dim, BLOCK]` for one row, one key-value head and one block, whatever runs
beside it and however its prefill was cut; block results are added in the order of the blocks. What a row cannot see
inside its last block has weight exactly 0. So a row's result is a function of its query and its own KV alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from worker.engine.kv_pool import KVPool

BLOCK = 64
IMPLEMENTATION = "tideover_paged"


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `[first, last)` of the group against one block; their pairs start at `pair`."""

    first: int
    last: int
    pair: int


@dataclass(frozen=True, slots=True)
class Group:
    """Rows `[start, stop)` of the step that are attended together.

    `pages` lists BLOCK // page_size pages per block: of each pair when rows have their own KV (`pair_row` is set),
    of each block when all rows belong to one sequence. `mask` is `[pairs, 1, BLOCK]`, 0 or -inf.
    """

    start: int
    stop: int
    segments: tuple[Segment, ...]
    pages: Tensor
    mask: Tensor
    pair_row: Tensor | None


@dataclass(slots=True)
class PagedStep:
    """Passed to transformers as its cache: takes the new KV, and tells the attention where the old lies."""

    pool: KVPool
    slots: Tensor  # where each real row's KV goes; the rows beyond are padding
    groups: tuple[Group, ...]

    def update(self, key: Tensor, value: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        rows = self.slots.shape[0]
        self.pool.write(layer, self.slots, key[0, :, :rows], value[0, :, :rows])
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        return 0


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    step: PagedStep,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query `[1, heads, rows, dim]` -> `[1, rows, heads, dim]`."""
    heads, rows, dim = query.shape[1:]
    kv_heads = step.pool.num_kv_heads
    grouped = query[0].reshape(kv_heads, heads // kv_heads, rows, dim).transpose(1, 2)  # [kv_heads, rows, group, dim]
    out = torch.zeros(rows, kv_heads, heads // kv_heads, dim, dtype=query.dtype)
    for group in step.groups:
        part = grouped[:, group.start : group.stop].contiguous()
        result = _attend(part, step.pool, int(module.layer_idx), group, scaling)  # type: ignore[arg-type]
        out[group.start : group.stop] = result.transpose(0, 1)
    return out.view(1, rows, heads, dim), None


def _attend(query: Tensor, pool: KVPool, layer: int, group: Group, scaling: float) -> Tensor:
    keys, values = pool.gather(layer, group.pages, BLOCK)  # [kv_heads, blocks or pairs, BLOCK, dim]
    scores = _scores(query * scaling, keys, group).add_(group.mask)
    peak = _reduce_max(scores.amax(-1), group, query.shape[1])
    weights = scores.sub_(_per_pair(peak, group).unsqueeze(-1)).exp_()
    total = _add_blocks(weights.sum(-1), group, query.shape[1])
    mixed = _add_blocks(_mix(weights, values, group), group, query.shape[1])
    return mixed / total.unsqueeze(-1)


def _scores(query: Tensor, keys: Tensor, group: Group) -> Tensor:
    kv_heads, _, heads, dim = query.shape
    pairs = group.mask.shape[0]
    if group.pair_row is not None:
        own = query.index_select(1, group.pair_row).view(kv_heads * pairs, heads, dim)
        return torch.bmm(own, keys.reshape(-1, BLOCK, dim).transpose(1, 2)).view(kv_heads, pairs, heads, BLOCK)
    out = torch.empty(kv_heads, pairs, heads, BLOCK, dtype=query.dtype)
    for block, seg in enumerate(group.segments):
        for h in range(kv_heads):
            rows = query[h, seg.first : seg.last]
            shared = keys[h, block].t().expand(rows.shape[0], -1, -1)
            torch.bmm(rows, shared, out=out[h, seg.pair : seg.pair + rows.shape[0]])
    return out


def _mix(weights: Tensor, values: Tensor, group: Group) -> Tensor:
    kv_heads, pairs, heads, _ = weights.shape
    dim = values.shape[-1]
    if group.pair_row is not None:
        own = weights.view(kv_heads * pairs, heads, BLOCK)
        return torch.bmm(own, values.reshape(-1, BLOCK, dim)).view(kv_heads, pairs, heads, dim)
    out = torch.empty(kv_heads, pairs, heads, dim, dtype=weights.dtype)
    for block, seg in enumerate(group.segments):
        for h in range(kv_heads):
            part = slice(seg.pair, seg.pair + seg.last - seg.first)
            torch.bmm(weights[h, part], values[h, block].expand(seg.last - seg.first, -1, -1), out=out[h, part])
    return out


def _reduce_max(pairs: Tensor, group: Group, rows: int) -> Tensor:
    out = torch.full((pairs.shape[0], rows, *pairs.shape[2:]), -torch.inf, dtype=pairs.dtype)
    for seg in group.segments:
        part = out[:, seg.first : seg.last]
        torch.maximum(part, pairs[:, seg.pair : seg.pair + seg.last - seg.first], out=part)
    return out


def _add_blocks(pairs: Tensor, group: Group, rows: int) -> Tensor:
    """Sum over each row's blocks, in the order of the blocks."""
    out = torch.zeros(pairs.shape[0], rows, *pairs.shape[2:], dtype=pairs.dtype)
    for seg in group.segments:
        out[:, seg.first : seg.last] += pairs[:, seg.pair : seg.pair + seg.last - seg.first]
    return out


def _per_pair(rows: Tensor, group: Group) -> Tensor:
    if group.pair_row is not None:
        return rows.index_select(1, group.pair_row)
    return torch.cat([rows[:, seg.first : seg.last] for seg in group.segments], dim=1)


def register() -> None:
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
