"""Reads what a Hugging Face model folder says about itself, and refuses by name what this engine cannot run.

Only JSON files and safetensors headers are read: no weights, no torch.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
# "dynamic" and "longrope" pick their frequencies by the longest sequence in the batch: a row would depend on others.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_MAX_HEADER_BYTES = 100 * 1024 * 1024


class ModelFolderError(Exception):
    """The folder is not a model that this engine can run; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    path: str
    architecture: str
    rope_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    weight_files: tuple[str, ...]
    num_parameters: int
    tied_head: bool

    @property
    def slot_elements(self) -> int:
        """Elements of one token's KV: `[layer][k|v][kv_head][head_dim]`."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim


def inspect_model_folder(path: Path) -> ModelSpec:
    """Raises ModelFolderError when the folder is missing, incomplete, or of a kind that is not supported."""
    if not path.is_dir():
        raise ModelFolderError(f"model folder {str(path)!r} does not exist or is not a folder")
    config = _read_json(path / "config.json")
    architecture = _architecture(path, config)
    if not (path / "tokenizer.json").is_file():
        raise ModelFolderError(f"{path}: tokenizer.json is missing")
    files = _weight_files(path)
    heads = _positive_int(path, config, "num_attention_heads")
    hidden = _positive_int(path, config, "hidden_size")
    return ModelSpec(
        path=str(path),
        architecture=architecture,
        rope_type=_rope_type(path, config),
        num_layers=_positive_int(path, config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_positive_int(path, config, "num_key_value_heads", heads),
        head_dim=_positive_int(path, config, "head_dim", hidden // heads),
        hidden_size=hidden,
        intermediate_size=_positive_int(path, config, "intermediate_size"),
        vocab_size=_positive_int(path, config, "vocab_size"),
        max_position_embeddings=_positive_int(path, config, "max_position_embeddings"),
        eos_token_ids=_eos_token_ids(path, config),
        weight_files=tuple(str(f) for f in files),
        num_parameters=sum(_count_parameters(f) for f in files),
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ModelFolderError(f"{file.parent}: {file.name} is missing")
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelFolderError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def _positive_int(path: Path, config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFolderError(f"{path}/config.json: {name} must be a positive integer, not {value!r}")
    return value


def _architecture(path: Path, config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ModelFolderError(
            f"{path}: architecture {', '.join(map(str, names)) or 'missing'} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    if config.get("quantization_config") is not None:
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelFolderError(f"{path}: quantised weights ({method}) are not supported; use the original weights")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelFolderError(f"{path}: hidden_act {config['hidden_act']!r} is not supported; supported is 'silu'")
    if _has_sliding_window(names[0], config):
        raise ModelFolderError(f"{path}: sliding-window attention ({names[0]}) is not supported")
    return str(names[0])


def _has_sliding_window(architecture: str, config: dict[str, Any]) -> bool:
    if "sliding_attention" in (config.get("layer_types") or ()):
        return True
    if architecture == "Qwen2ForCausalLM":
        return bool(config.get("use_sliding_window", False))
    if architecture == "MistralForCausalLM":  # its config class fills in 4096 when the key is absent
        return config.get("sliding_window", 4096) is not None
    return False


def _rope_type(path: Path, config: dict[str, Any]) -> str:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelFolderError(f"{path}/config.json: rope settings must be an object, not {rope!r}")
    name = rope.get("rope_type", rope.get("type", "default"))
    if name not in ROPE_TYPES:
        raise ModelFolderError(f"{path}: RoPE type {name!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    return str(name)


def _eos_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    value = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    value = config.get("eos_token_id") if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelFolderError(f"{path}: eos_token_id must be an integer or a list of them, not {value!r}")
    return tuple(ids)


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        files = [path / str(name) for name in names]
    else:
        files = [single]
    missing = [f.name for f in files if not f.is_file()]
    if missing or not files:
        raise ModelFolderError(f"{path}: weights are missing ({', '.join(missing) or 'empty index'}); need safetensors")
    return files


def _count_parameters(file: Path) -> int:
    """Sum of the tensors' sizes, from the header (https://github.com/huggingface/safetensors#format)."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise ModelFolderError(f"{file} is not a safetensors file: bad header length")
        try:
            header = json.loads(stream.read(length))
            entries = [entry for name, entry in header.items() if name != "__metadata__"]
            end = max((entry["data_offsets"][1] for entry in entries), default=0)
            count = sum(prod(entry["shape"]) for entry in entries)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFolderError(f"{file} is not a safetensors file: {error!r}") from error
    if file.stat().st_size != 8 + length + end:
        raise ModelFolderError(
            f"{file} is cut short or damaged: {file.stat().st_size} bytes, {8 + length + end} expected"
        )
    return int(count)
