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
        layers, heads, dim = plan.spec.num_layers, plan.spec.num_kv_heads, plan.spec.head_dim
        self.num_kv_heads = heads
        self.head_dim = dim
        # One page more than is handed out: block tables are filled up with it, and it stays zero.
        self.zero_page = plan.num_pages
        pages, page = plan.num_pages + 1, plan.page_size * dim
        self._slots = torch.zeros(layers, 2 * heads, pages * plan.page_size, dim, dtype=dtype)
        self._pieces = self._slots.view(layers, 2 * heads * pages, page)
        self._rows = self._slots.view(layers, -1, dim)
        self._first_piece = torch.arange(2 * heads)[:, None] * pages
        self._first_row = torch.arange(2 * heads) * (pages * plan.page_size)
        # Gathered pages go to one buffer: megabytes allocated anew for each layer cost more than their copy.
        self._scratch = torch.empty(0, page, dtype=dtype)

    def rows_of(self, slots: list[int]) -> Tensor:
        """Where `write` puts a step's KV, for every layer; slots are page * page_size + offset."""
        return (torch.tensor(slots)[:, None] + self._first_row).view(-1)

    def pieces_of(self, pages: list[int]) -> Tensor:
        """What `gather` takes, for every layer."""
        return (self._first_piece + torch.tensor(pages)).view(-1)

    def write(self, layer: int, rows: Tensor, kv: Tensor) -> None:
        """Put `[n, 2 * kv_heads, dim]`, keys before values, at the `rows_of` n slots."""
        self._rows[layer].index_copy_(0, rows, kv.reshape(-1, self.head_dim))

    def gather(self, layer: int, pieces: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the pages as `[kv_heads, blocks, block, dim]`, valid until the next call."""
        if self._scratch.shape[0] < pieces.shape[0]:
            self._scratch = torch.empty(pieces.shape[0], self._scratch.shape[1], dtype=self._scratch.dtype)
        out = self._scratch[: pieces.shape[0]]
        torch.index_select(self._pieces[layer], 0, pieces, out=out)
        keys, values = out.view(2, self.num_kv_heads, -1, block, self.head_dim)
        return keys, values

    def clear(self, pages: list[int]) -> None:
        """Zero pages that change hands: what a mask hides is still multiplied, by zero, and must be finite."""
        by_page = self._pieces.view(self._slots.shape[0], self._slots.shape[1], -1, self._pieces.shape[-1])
        for page in pages:
            by_page[:, :, page].zero_()

    def clear_slots(self, slots: list[int]) -> None:
        self._slots.index_fill_(2, torch.tensor(slots), 0.0)

    def export(self, slots: list[int], out: memoryview) -> None:
        """One gather, straight into `out`: pieces of `head_dim` values in the canonical order."""
        first = torch.arange(self._slots.shape[0])[:, None] * self._slots.shape[1] * self._slots.shape[2]
        rows = torch.tensor(slots)[:, None, None] + (first + self._first_row)
        target = torch.frombuffer(out, dtype=self._slots.dtype).view(-1, self.head_dim)
        torch.index_select(self._slots.view(-1, self.head_dim), 0, rows.view(-1), out=target)

    def load(self, slots: list[int], source: memoryview) -> None:
        """The way back, from rows that begin with a slot; straight from `source`, for which it should be writable (torch
        takes no other without a copy)."""
        data = self._canonical(source, len(slots)).permute(1, 2, 0, 3)
        first, count = slots[0], len(slots)
        if slots == list(range(first, first + count)):  # twice as fast, and usual: pages are handed out in order
            self._slots[:, :, first : first + count].copy_(data)
        else:
            self._slots.index_copy_(2, torch.tensor(slots), data)

    def _canonical(self, source: memoryview, count: int) -> Tensor:
        layers, pairs, _, dim = self._slots.shape
        rows = torch.frombuffer(bytearray(source) if source.readonly else source, dtype=self._slots.dtype)
        return rows.view(count, -1)[:, : layers * pairs * dim].view(count, layers, pairs, dim)
