"""The KV pages themselves, and the road between them and the canonical layout."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.engine.config import EnginePlan


class KVPool:
    """Storage `[layer][page][token][k|v][kv_head][head_dim]`: one layer's page is one piece, cheap to gather.

    Outside, a slot is token-major, `[token][layer][k|v][kv_head][head_dim]` (KVLayout); `export` and `load` turn it.
    """

    def __init__(self, plan: EnginePlan, dtype: torch.dtype) -> None:
        spec = plan.spec
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self._width = 2 * spec.num_kv_heads * spec.head_dim
        # One page more than is handed out: block tables are filled up with it, and it stays zero.
        self.zero_page = plan.num_pages
        self._data = torch.zeros(spec.num_layers, plan.num_pages + 1, plan.page_size * self._width, dtype=dtype)
        # Gathered pages go to one buffer: megabytes allocated anew for each layer cost more than their copy.
        self._scratch = torch.empty(0, plan.page_size * self._width, dtype=dtype)
        self._slots = self._data.view(spec.num_layers, -1, self._width)

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Put rows `[n, 2 * kv_heads, dim]`, keys before values, at `slots` (page * page_size + offset)."""
        self._slots[layer].index_copy_(0, slots, kv.reshape(slots.shape[0], self._width))

    def gather(self, layer: int, pages: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `pages` as `[blocks, block, kv_heads, dim]`, valid until the next call."""
        if self._scratch.shape[0] < pages.shape[0]:
            self._scratch = torch.empty(pages.shape[0], self._data.shape[-1], dtype=self._data.dtype)
        out = self._scratch[: pages.shape[0]]
        torch.index_select(self._data[layer], 0, pages, out=out)
        keys, values = out.view(-1, block, 2, self.num_kv_heads, self.head_dim).unbind(2)
        return keys, values

    def clear(self, pages: list[int]) -> None:
        """Zero pages that change hands: what a mask hides is still multiplied, by zero, and must be finite."""
        for page in pages:
            self._data[:, page].zero_()

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
