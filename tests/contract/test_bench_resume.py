"""The rig of `tideover bench resume` and `bench planner`, on a tiny model: every way brings back the same next token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from context_daemon.rates import PrefillCost
from tests.unit.tiny_model import tiny_config, write_tiny_model
from worker.bench_planner import run_planner_bench
from worker.bench_resume import Interrupted, ResumeBench, run_resume_bench

CONTEXT = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tiny_config(max_position_embeddings=512))


@pytest.fixture(scope="module")
def bench(model: Path) -> Iterator[ResumeBench]:
    with ResumeBench(model, CONTEXT, 1, slowed=True) as bench:
        yield bench


@pytest.fixture(scope="module")
def item(bench: ResumeBench) -> Interrupted:
    return bench.interrupted(CONTEXT)


def test_every_way_leads_to_the_same_token(bench: ResumeBench, item: Interrupted) -> None:
    bench.peer_link.bytes_per_s = bench.store_link.bytes_per_s = 0.0
    runs = {path: bench.resume(item, path) for path in ("recompute", "arena", "peer", "store")}
    assert {path: run["source"] for path, run in runs.items()} == {
        "recompute": "", "arena": "arena", "peer": "peer", "store": "store"
    }  # fmt: skip
    assert {path: run["recomputed_tokens"] for path, run in runs.items()} == {
        "recompute": CONTEXT, "arena": 0, "peer": 0, "store": 0
    }  # fmt: skip
    assert len({run["sampled"] for run in runs.values()}) == 1


@pytest.mark.parametrize("path", ["peer", "store"])
def test_a_slowed_link_carries_no_more_than_it_may(bench: ResumeBench, item: Interrupted, path: str) -> None:
    link = {"peer": bench.peer_link, "store": bench.store_link}[path]
    link.bytes_per_s = 1e6
    started = time.monotonic()
    run = bench.resume(item, path)
    assert run["bytes"] == CONTEXT * bench.layout.slot_bytes
    assert time.monotonic() - started >= 0.9 * run["bytes"] / 1e6


def test_the_planner_is_held_against_the_best_single_way(model: Path) -> None:
    rows = run_planner_bench(model, (64, 128), draws=3, threads=1, seed=7)
    assert len(rows) == 3
    for row in rows:
        best = min(row["peer_ms"], row["store_ms"], row["recompute_ms"])
        assert row[f"{row['best']}_ms"] == best
        assert row["regret"] == pytest.approx(row["planner_ms"] / best - 1, rel=0.1, abs=0.01)


def test_a_split_leads_to_the_same_token(bench: ResumeBench, item: Interrupted) -> None:
    """Computing is said to be as slow as both links: the head is computed while the tail comes."""
    rate = 5e5
    bench.peer_link.bytes_per_s = bench.store_link.bytes_per_s = rate
    whole = bench.resume(item, "recompute")
    for path in ("peer", "store") * 2:  # so that the daemon knows how slow they are
        bench.resume(item, path)
    bench.prefill.seed(PrefillCost(1e-4, bench.layout.slot_bytes / rate))
    run = bench.resume(item, "planner")
    assert 0.2 * CONTEXT < run["recomputed_tokens"] < 0.8 * CONTEXT
    assert run["bytes"] == (CONTEXT - run["recomputed_tokens"]) * bench.layout.slot_bytes
    assert run["sampled"] == whole["sampled"]


def test_who_decodes_beside_a_restore_is_in_the_row(model: Path) -> None:
    (row,) = run_resume_bench(model, (128,), 2, 1, paths=("arena",), beside=2)
    assert row["recomputed_tokens"] == 0
    assert 0 < row["itl_ms"] <= row["itl_max_ms"]
    assert row["itl_joined_ms"] > 0
