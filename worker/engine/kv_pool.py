"""The KV pages themselves, and the road between them and the canonical layout."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.engine.config import EnginePlan


class KVPool:
    """Storage `[layer][k|v][page][token][kv_head][head_dim]`: one layer's page is one piece, cheap to gather.

    Outside, a slot is token-major, `[token][layer][k|v][kv_head][head_dim]` (KVLayout); `export` and `load` turn it.
    """

    def __init__(self, plan: EnginePlan, dtype: torch.dtype) -> None:
        spec = plan.spec
        self.page_size = plan.page_size
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self._width = spec.num_kv_heads * spec.head_dim
        # One page more than is handed out: block tables are filled up with it, and it stays zero.
        self.zero_page = plan.num_pages
        self._data = torch.zeros(spec.num_layers, 2, plan.num_pages + 1, plan.page_size * self._width, dtype=dtype)
        # Gathered pages go to one buffer: megabytes allocated anew for each layer cost more than their copy.
        self._scratch = torch.empty(2, 0, plan.page_size * self._width, dtype=dtype)
        self._slots = self._data.view(spec.num_layers * 2, -1, self._width)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put rows `[n, kv_heads, dim]` at `slots` (page * page_size + offset)."""
        rows = slots.shape[0]
        self._slots[2 * layer].index_copy_(0, slots, keys.reshape(rows, self._width))
        self._slots[2 * layer + 1].index_copy_(0, slots, values.reshape(rows, self._width))

    def gather(self, layer: int, pages: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `pages` as `[blocks, block, kv_heads, dim]`, valid until the next call."""
        if self._scratch.shape[1] < pages.shape[0]:
            self._scratch = torch.empty(2, pages.shape[0], self._data.shape[-1], dtype=self._data.dtype)
        shape = (-1, block, self.num_kv_heads, self.head_dim)
        for which in (0, 1):
            out = self._scratch[which, : pages.shape[0]]
            torch.index_select(self._data[layer, which], 0, pages, out=out)
        return self._scratch[0, : pages.shape[0]].view(shape), self._scratch[1, : pages.shape[0]].view(shape)

    def clear(self, pages: list[int]) -> None:
        """Zero pages that change hands: what a mask hides is still multiplied, by zero, and must be finite."""
        for page in pages:
            self._data[:, :, page].zero_()

    def export(self, slots: list[int], out: memoryview) -> None:
        target = torch.frombuffer(out, dtype=self._data.dtype).view(len(slots), -1, self._width)
        first, count = slots[0], len(slots)
        if slots == list(range(first, first + count)):
            target.copy_(self._slots[:, first : first + count].transpose(0, 1))
        else:
            target.copy_(self._slots.index_select(1, torch.tensor(slots)).transpose(0, 1))

    def load(self, slots: list[int], source: bytes | bytearray | memoryview) -> None:
        data = torch.frombuffer(bytearray(source), dtype=self._data.dtype).view(len(slots), -1, self._width)
        self._slots.index_copy_(1, torch.tensor(slots), data.transpose(0, 1).contiguous())
