"""Turns a Llama-architecture GGUF file into a Hugging Face model folder in fp32, with the `gguf` package alone.

The weights come out exactly as the quantised file means them. Only byte-level BPE tokenizers with SmolLM's
pre-tokenizer are handled; anything else is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Progress = Callable[[str, float], None]  # what is being done, and which part of it (0 to 1) is done

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


class ConversionError(Exception):
    """The GGUF file is not one that this converter understands."""


def hf_name(name: str) -> str:
    """The transformers name of a llama.cpp tensor. Raises ConversionError for one that Llama does not have."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" and parts[2] in _BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.weight"
    raise ConversionError(f"tensor {name!r} does not belong to a Llama-architecture model")


def uninterleave(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's row order of q and k: it stores each head's rotary pairs next to each other, transformers stores
    the first halves and then the second halves."""
    rows, columns = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows, columns))


def convert(gguf_file: Path, folder: Path, progress: Progress) -> None:
    """Write config.json, generation_config.json, tokenizer files and model.safetensors into the existing `folder`."""
    from gguf import GGUFReader  # heavy, and in the `demo` extra only

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    if fields.get("general.architecture") != "llama":
        found = fields.get("general.architecture")
        raise ConversionError(f"{gguf_file.name}: architecture {found!r}, expected 'llama'")
    weights = _weights(reader, fields, progress)
    _write_json(folder / "config.json", _config(fields, tied="lm_head.weight" not in weights))
    _write_json(folder / "generation_config.json", _generation_config(fields))
    write_tokenizer(fields, folder)
    from safetensors.numpy import save_file

    progress("writing model.safetensors", 0.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    progress("writing model.safetensors", 1.0)


def _weights(reader: Any, fields: dict[str, Any], progress: Progress) -> dict[str, NDArray[np.float32]]:
    from gguf.quants import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights: dict[str, NDArray[np.float32]] = {}
    for done, tensor in enumerate(reader.tensors):
        progress("converting weights to fp32", done / len(reader.tensors))
        # a copy: fp32 tensors come as views into the mapped file
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        weights[hf_name(tensor.name)] = uninterleave(weight, heads[kind]) if kind in heads else weight
    progress("converting weights to fp32", 1.0)
    return weights


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "vocab_size": fields["llama.vocab_size"],
        # GGUF keeps it as a 32-bit float: 1e-05 would come back as 9.999999747378752e-06
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        **_special_ids(fields),
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {ours: int(fields[f"tokenizer.ggml.{theirs}_token_id"]) for ours, theirs in names.items()}


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {"_from_model_config": True, **_special_ids(fields)}


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Rebuild tokenizer.json and tokenizer_config.json from a GGUF file's metadata."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ConversionError(f"tokenizer {kind[0]!r}, pre-tokenizer {kind[1]!r}: only 'gpt2' with 'smollm' is known")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token
        for token, type_ in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if type_ == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = _special_ids(fields)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[int(fields["tokenizer.ggml.unknown_token_id"])],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
