from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.tiny_model import write_tiny_model
from worker.engine.bench import run_engine_bench


@pytest.mark.slow
def test_both_engines_report_every_batch_with_every_figure(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    rows = run_engine_bench(str(folder), [1, 3], prompt_tokens=9, new_tokens=4, threads=1, peers=["transformers"])
    assert [(row["engine"], row["batch"]) for row in rows] == [
        ("tideover", 1),
        ("tideover", 3),
        ("transformers", 1),
        ("transformers", 3),
    ]
    for row in rows:
        assert (row["dtype"], row["prompt_tokens"]) == ("float32", 9)
        assert min(row[name] for name in ("prefill_tok_s", "decode_tok_s", "ttft_ms", "itl_p50_ms")) > 0
        assert row["itl_p50_ms"] <= row["itl_p99_ms"]
        assert 0 < row["floor_fraction"] < 1.5


def test_unknown_peers_and_broken_models_are_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown peer vllm"):
        run_engine_bench("model", [1], 8, 4, 1, ["vllm"])
    with pytest.raises(RuntimeError, match="does not exist"):
        run_engine_bench(str(tmp_path / "nowhere"), [1], 8, 4, 1, [])
