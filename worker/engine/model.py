"""Loading: transformers reads the folder and makes the modules, and their weights become a `Decoder`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from worker.engine.config import EngineConfigError, EnginePlan
from worker.engine.decoder import Decoder, DecoderLayer
from worker.engine.linear import PLAIN, Kernel, TiledLinear, choose_kernel

_ROPE_BLOCK = 64
MakeLinear = Callable[[Tensor, Tensor | None], TiledLinear]


def load_decoder(plan: EnginePlan) -> Decoder:
    """Raises EngineConfigError if weights do not match the config, InvarianceError as `choose_kernel`."""
    quiet: Any = transformers.utils.logging
    quiet.disable_progress_bar()  # a worker's stderr is a log
    model = _from_folder(plan)
    with torch.inference_mode():
        return _decoder(model, plan)


def _from_folder(plan: EnginePlan) -> Any:
    cls = getattr(transformers, plan.spec.architecture)
    model, report = cls.from_pretrained(
        plan.spec.path, dtype=getattr(torch, plan.dtype), local_files_only=True, output_loading_info=True
    )
    # transformers fills absent weights with random ones and only warns
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            raise EngineConfigError(f"{plan.spec.path}: weights do not match config.json: {kind} {report[kind]}")
    model.eval()
    model.requires_grad_(False)
    return model


def _decoder(model: Any, plan: EnginePlan) -> Decoder:
    kernel, make = _maker(model, plan.batch_invariant)
    cos, sin = _rotary_tables(model.model.rotary_emb, plan)
    layers = []
    while len(model.model.layers):  # each layer's own weights are let go once they are packed
        layers.append(_layer(model.model.layers.pop(0), make))
    return Decoder(
        kernel=kernel,
        num_heads=plan.spec.num_heads,
        num_kv_heads=plan.spec.num_kv_heads,
        head_dim=plan.spec.head_dim,
        eps=model.config.rms_norm_eps,
        embedding=model.model.embed_tokens.weight,
        cos=cos,
        sin=sin,
        layers=tuple(layers),
        norm=model.model.norm.weight,
        head=make(model.lm_head.weight, model.lm_head.bias),
    )


def _layer(layer: Any, make: MakeLinear) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        input_norm=layer.input_layernorm.weight,
        qkv=make(*_qkv(attention)),
        out=make(attention.o_proj.weight, attention.o_proj.bias),
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=make(*_joined(mlp.gate_proj, mlp.up_proj)),
        down=make(mlp.down_proj.weight, mlp.down_proj.bias),
    )


def _qkv(attention: Any) -> tuple[Tensor, Tensor | None]:
    """With the softmax scaling multiplied into the queries: rotation keeps a factor."""
    weight, bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    queries = attention.q_proj.weight.shape[0]
    for part in (weight, bias):
        if part is not None:
            part[:queries] *= attention.scaling
    return weight, bias


def _joined(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return torch.cat(weights), torch.cat(biases) if biases else None


def _maker(model: Any, invariant: bool) -> tuple[Kernel, MakeLinear]:
    if not invariant:
        return PLAIN, lambda weight, bias: TiledLinear(PLAIN, weight, bias, ())
    first = model.model.layers[0]
    attention, mlp = first.self_attn, first.mlp
    weights = (_qkv(attention)[0], attention.o_proj.weight, _joined(mlp.gate_proj, mlp.up_proj)[0])
    kernel, tiles = choose_kernel((*weights, mlp.down_proj.weight, model.lm_head.weight))
    return kernel, lambda weight, bias: TiledLinear(kernel, weight, bias, tiles[tuple(weight.shape)])


def _rotary_tables(rotary: nn.Module, plan: EnginePlan) -> tuple[Tensor, Tensor]:
    """cos and sin per position, computed once in calls of one shape, so that they depend on the position alone."""
    like = torch.zeros(1, dtype=getattr(torch, plan.dtype))
    parts = [
        rotary(like, position_ids=torch.arange(start, start + _ROPE_BLOCK)[None])
        for start in range(0, plan.max_model_len, _ROPE_BLOCK)
    ]
    cos = torch.cat([cos[0] for cos, _ in parts]).unsqueeze(1)
    sin = torch.cat([sin[0] for _, sin in parts]).unsqueeze(1)
    sin[..., : sin.shape[-1] // 2] *= -1
    return cos, sin
