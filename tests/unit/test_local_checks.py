"""What the local cluster refuses before it starts anything, each by name."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from orchestrator.fleet import statefile
from orchestrator.fleet.local import checks, options
from orchestrator.fleet.local.checks import PreflightError
from orchestrator.fleet.local.options import ClusterOptions

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 32,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def model_folder(folder: Path, **changes: Any) -> str:
    """A folder with a whole safetensors file: one small tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    return str(folder)


def refusal(**wanted: Any) -> str:
    with pytest.raises(PreflightError) as refused:
        checks.preflight(ClusterOptions(**{"port": 0, "orchestrator": False} | wanted))
    return str(refused.value)


def test_a_good_plan_passes_and_fixes_the_kv_cache(tmp_path: Path) -> None:
    wanted = ClusterOptions(port=0, model=model_folder(tmp_path / "m"), engine_args={"max_num_seqs": 4})
    checks.preflight(wanted)
    assert checks.settle(wanted).engine_args == {"max_num_seqs": 4, "num_pages": 4 * 256 // 16}


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in refusal(port=port)
    assert "70000" in refusal(port=70000)


def test_a_missing_model_folder(tmp_path: Path) -> None:
    assert str(tmp_path / "none") in refusal(orchestrator=True, model=str(tmp_path / "none"))
    assert "--model" in refusal(orchestrator=True)


def test_an_unknown_architecture(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", architectures=["MambaForCausalLM"])
    assert "MambaForCausalLM" in refusal(orchestrator=True, model=folder)


def test_an_unknown_engine_argument(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    assert "max_seqs" in refusal(orchestrator=True, model=folder, engine_args={"max_seqs": 3})


def test_too_little_memory_says_how_much_each_worker_has(tmp_path: Path) -> None:
    wanted = ClusterOptions(model=model_folder(tmp_path / "m"), workers=3, engine_args={"num_pages": 1_000_000})
    with pytest.raises(PreflightError, match=r"too little memory.*3 workers") as refused:
        checks.plan(wanted, available_bytes=6 * 2**30)
    assert "6.0 GiB are free" in str(refused.value)


def test_a_folder_that_takes_no_writes(state_home: Path) -> None:
    state_home.mkdir()
    (state_home / "tideover").write_text("a file where the folder should be")
    assert "XDG_STATE_HOME" in refusal()


def test_a_name_that_is_no_plain_folder_name() -> None:
    for name in ("../x", "", "A", "-x", "a/b", "x" * 41):
        with pytest.raises(ValueError, match="cluster name"):
            statefile.cluster_dir(name)


def test_a_damaged_state_file_is_named(state_home: Path) -> None:
    path = state_home / "tideover" / "local" / "cluster.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert str(path) in refusal()


def test_two_clusters_get_two_subnets() -> None:
    first, claim = options.claim_subnet("same")
    second, other = options.claim_subnet("same")
    assert first != second
    claim.close()
    other.close()


def test_no_address_is_used_twice() -> None:
    subnet = options.Subnet(7)
    addresses = [subnet.node(index) for index in range(1000)]
    assert len(set(addresses)) == 1000
    assert not {subnet.head, subnet.supervisor} & set(addresses)
