"""The KV pages themselves, and the road between them and the canonical layout."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.engine.config import EnginePlan


class KVPool:
    """Storage `[layer][k|v][kv_head][page][token][head_dim]`: what one head of a page needs is one piece.

    Outside, a slot is token-major, `[token][layer][k|v][kv_head][head_dim]` (KVLayout); `export` and `load` turn it.
    """

    def __init__(self, plan: EnginePlan, dtype: torch.dtype) -> None:
        spec = plan.spec
        self.page_size = plan.page_size
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        # One page more than is handed out: block tables are filled up with it, and it stays zero.
        self.zero_page = plan.num_pages
        pages, page = plan.num_pages + 1, plan.page_size * spec.head_dim
        self._data = torch.zeros(spec.num_layers, 2, spec.num_kv_heads, pages, page, dtype=dtype)
        # Gathered pages go to one buffer: megabytes allocated anew for each layer cost more than their copy.
        self._scratch = torch.empty(2, 0, dtype=dtype)
        self._slots = self._data.view(spec.num_layers, 2, spec.num_kv_heads, -1, spec.head_dim)
        self._pieces = self._data.view(spec.num_layers, 2, spec.num_kv_heads * pages, page)
        self._first_piece = torch.arange(spec.num_kv_heads)[:, None] * pages  # of each head

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put rows `[kv_heads, n, dim]` at `slots` (page * page_size + offset)."""
        self._slots[layer, 0].index_copy_(1, slots, keys)
        self._slots[layer, 1].index_copy_(1, slots, values)

    def gather(self, layer: int, pages: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `pages` as `[kv_heads, blocks, block, dim]`, valid until the next call."""
        pieces = (self._first_piece + pages).view(-1)
        size = pieces.shape[0] * self._pieces.shape[-1]
        if self._scratch.shape[1] < size:
            self._scratch = torch.empty(2, size, dtype=self._data.dtype)
        keys, values = (self._scratch[which, :size].view(pieces.shape[0], -1) for which in (0, 1))
        # Along the first dimension: there index_select copies whole pieces.
        torch.index_select(self._pieces[layer, 0], 0, pieces, out=keys)
        torch.index_select(self._pieces[layer, 1], 0, pieces, out=values)
        shape = (self.num_kv_heads, -1, block, self.head_dim)
        return keys.view(shape), values.view(shape)

    def clear(self, pages: list[int]) -> None:
        """Zero pages that change hands: what a mask hides is still multiplied, by zero, and must be finite."""
        for page in pages:
            self._data[:, :, :, page].zero_()

    def export(self, slots: list[int], out: memoryview) -> None:
        layers, _, heads, _, dim = self._slots.shape
        target = torch.frombuffer(out, dtype=self._data.dtype).view(len(slots), layers, 2, heads, dim)
        first, count = slots[0], len(slots)
        if slots == list(range(first, first + count)):
            source = self._slots[:, :, :, first : first + count]
        else:
            source = self._slots.index_select(3, torch.tensor(slots))
        target.copy_(source.permute(3, 0, 1, 2, 4))

    def load(self, slots: list[int], source: bytes | bytearray | memoryview) -> None:
        layers, _, heads, _, dim = self._slots.shape
        data = torch.frombuffer(bytearray(source), dtype=self._data.dtype).view(len(slots), layers, 2, heads, dim)
        self._slots.index_copy_(3, torch.tensor(slots), data.permute(1, 2, 3, 0, 4).contiguous())
