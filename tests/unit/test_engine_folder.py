"""Model folders and flags that TorchEngine refuses, each by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.tiny_model import write_tiny_model
from worker.engine.config import EngineConfig, EngineConfigError, plan_engine
from worker.engine.engine import TorchEngine
from worker.engine.model_folder import ModelFolderError, inspect_model_folder

GIB = 1024**3


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def load(folder: Path, **flags: Any) -> TorchEngine:
    return TorchEngine.load(EngineConfig(model=str(folder), **({"num_pages": 128, "max_num_seqs": 8} | flags)))


def spoil(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_folder_that_cannot_be_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="does not exist"):
        inspect_model_folder(tmp_path / "nowhere")
    for changes, reason in (
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic' is not supported"),
        ({"rope_parameters": None, "rope_scaling": {"type": "su"}}, "RoPE type 'su' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a positive integer"),
    ):
        with pytest.raises(ModelFolderError, match=reason):
            inspect_model_folder(spoil(write_tiny_model(tmp_path / "m"), **changes))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", b"{", "not JSON"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("model.safetensors", None, "weights are missing"),
        ("model.safetensors", b"short", "not a safetensors file"),
    ],
)
def test_missing_or_damaged_files_are_named(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(ModelFolderError, match=reason):
        inspect_model_folder(folder)


def test_a_truncated_weight_file_is_noticed(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelFolderError, match="cut short"):
        inspect_model_folder(folder)


def test_too_little_memory_is_said_before_loading(folder: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"needs 0.00 GiB for weights \+ .* GiB for KV, 0.50 GiB available"):
        plan_engine(EngineConfig(model=str(folder), num_pages=10**6), GIB // 2)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"dtype": "bfloat16"}, "promised for float32 only"),
        ({"max_model_len": 4096}, "max_position_embeddings 512"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "less than max_num_seqs 64"),
        ({"page_size": 24}, "must divide 64"),
        ({"kv_cache_memory_bytes": 10}, "holds no page"),
    ],
)
def test_flags_that_make_no_sense_are_named(folder: Path, flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineConfigError, match=reason):
        plan_engine(EngineConfig(model=str(folder), **flags), GIB)


def test_weights_that_miss_a_tensor_are_refused(tmp_path: Path) -> None:
    folder = spoil(write_tiny_model(tmp_path), num_hidden_layers=3)
    with pytest.raises(EngineConfigError, match="missing_keys"):
        load(folder)
