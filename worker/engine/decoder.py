"""The forward pass of the Llama family over our pages: one row per token, no batch dimension, no modules.

Written out because it is what a decode step of a small model spends its time on besides the weights: transformers'
modules are the loader and, in tests, the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.engine.attention import PagedStep, paged_attention
from worker.engine.linear import Kernel, TiledLinear, rowwise_silu


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """`qkv` gives `[heads | kv_heads | kv_heads] x head_dim`, its queries scaled already; `gate_up` gives both."""

    input_norm: Tensor
    qkv: TiledLinear
    out: TiledLinear
    post_norm: Tensor
    gate_up: TiledLinear
    down: TiledLinear


@dataclass(frozen=True, slots=True)
class Decoder:
    """`cos` and `sin` are `[max_model_len, 1, head_dim]`, `sin` with its first half negated (see `_rotate`)."""

    kernel: Kernel
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    embedding: Tensor
    cos: Tensor
    sin: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: TiledLinear

    def forward(self, ids: Tensor, positions: Tensor, step: PagedStep) -> Tensor:
        """`[rows]` token ids and positions -> `[rows, hidden]`. Rows are a multiple of the kernel's base tile."""
        x = F.embedding(ids, self.embedding)
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        for index, layer in enumerate(self.layers):
            x += layer.out(self._attend(layer.qkv(self._norm(x, layer.input_norm)), cos, sin, step, index))
            gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, dim=1)
            x += layer.down(rowwise_silu(gate).mul_(up))
        return self._norm(x, self.norm)

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, step: PagedStep, layer: int) -> Tensor:
        qkv = qkv.view(qkv.shape[0], -1, self.head_dim)
        _rotate(qkv[:, : self.num_heads + self.num_kv_heads], cos, sin)
        step.pool.write(layer, step.kv_rows, qkv[: step.rows, self.num_heads :])
        return paged_attention(qkv[:, : self.num_heads], step, layer)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that one decode step must read."""
        parts = [p for layer in self.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return sum(part.bytes for part in (*parts, self.head))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding in place: `x cos + (x2, x1) (-sin, sin)`, in operations that round alike wherever they run."""
    swapped = torch.roll(x, x.shape[-1] // 2, -1)
    x.mul_(cos).add_(swapped.mul_(sin))
