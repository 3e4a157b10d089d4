"""transformers' own modules around our pages: loading, and the parts that are exchanged."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from worker.engine import attention
from worker.engine.config import EngineConfigError, EnginePlan
from worker.engine.linear import ROW_TILE, RowwiseSiLU, TiledLinear, probe_tiles

_ROPE_BLOCK = 64


class RotaryTable(nn.Module):
    """cos and sin per position, computed once in calls of one shape, so that they depend on the position alone."""

    def __init__(self, rotary: nn.Module, max_model_len: int, dtype: torch.dtype) -> None:
        super().__init__()
        like = torch.zeros(1, dtype=dtype)
        parts = [
            rotary(like, position_ids=torch.arange(start, start + _ROPE_BLOCK)[None])
            for start in range(0, max_model_len, _ROPE_BLOCK)
        ]
        self.cos = nn.Buffer(torch.cat([cos[0] for cos, _ in parts]), persistent=False)
        self.sin = nn.Buffer(torch.cat([sin[0] for _, sin in parts]), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[position_ids], self.sin[position_ids]


def load_model(plan: EnginePlan) -> Any:
    """The causal LM with paged attention and a rotary table; in batch-invariant mode with tiled products too."""
    attention.register()
    quiet: Any = transformers.utils.logging
    quiet.disable_progress_bar()  # a worker's stderr is a log
    model: Any = _from_folder(plan)
    model.model.rotary_emb = RotaryTable(model.model.rotary_emb, plan.max_model_len, getattr(torch, plan.dtype))
    if plan.batch_invariant:
        _make_invariant(model)
    return model


def _from_folder(plan: EnginePlan) -> Any:
    cls = getattr(transformers, plan.spec.architecture)
    model, report = cls.from_pretrained(
        plan.spec.path,
        dtype=getattr(torch, plan.dtype),
        attn_implementation=attention.IMPLEMENTATION,
        local_files_only=True,
        output_loading_info=True,
    )
    # transformers fills absent weights with random ones and only warns
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            raise EngineConfigError(f"{plan.spec.path}: weights do not match config.json: {kind} {report[kind]}")
    model.eval()
    model.requires_grad_(False)
    return model


def _make_invariant(model: nn.Module) -> None:
    probed: dict[tuple[int, ...], tuple[int, ...]] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            shape = tuple(module.weight.shape)
            if shape not in probed:
                probed[shape] = probe_tiles(module.weight)
            model.set_submodule(name, TiledLinear(module, probed[shape]))
        elif hasattr(module, "act_fn"):
            module.act_fn = RowwiseSiLU()


def padded(rows: int, invariant: bool) -> int:
    """Rows that a step is filled up to."""
    return -(-rows // ROW_TILE) * ROW_TILE if invariant else rows


def kernels_name(invariant: bool) -> str:
    return f"mm-tile{ROW_TILE}-attn{attention.BLOCK}" if invariant else f"linear-attn{attention.BLOCK}"
