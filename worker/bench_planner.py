"""`tideover bench planner`: how much later a request goes on by the way that the planner chose than by the best one.

Each draw gives the links to the second daemon a bandwidth and takes a context; every way is measured, then the planner's
choice, which knows nothing of the draw but what the daemon learnt from the restores before. Regret is its time over that of
the best single way, less one: below zero where a split beat them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from worker.bench_resume import ResumeBench

_SINGLE = ("peer", "store", "recompute")
_LESSONS = 2  # restores by each link before its draw counts: a daemon has seen a link before it judges it
_SLOWEST, _FASTEST = 4e6, 4e8  # bytes/s; drawn evenly by their logarithm


def run_planner_bench(
    model: Path, contexts: Sequence[int], draws: int, threads: int, seed: int
) -> list[dict[str, Any]]:
    """One row a draw, in the order drawn."""
    rng = Random(seed)
    with ResumeBench(model, max(contexts), threads, slowed=True) as bench:
        items = {context: bench.interrupted(context) for context in contexts}
        rows = []
        for _ in range(draws):
            context = rng.choice(list(contexts))
            bench.peer_link.bytes_per_s, bench.store_link.bytes_per_s = _bandwidth(rng), _bandwidth(rng)
            for path in ("peer", "store") * (_LESSONS - 1):
                bench.resume(items[context], path)
            single = {path: bench.resume(items[context], path)["ms"] for path in _SINGLE}
            rows.append(_row(bench, context, single, bench.resume(items[context], "planner")))
    return rows


def _bandwidth(rng: Random) -> float:
    return math.exp(rng.uniform(math.log(_SLOWEST), math.log(_FASTEST)))


def _row(bench: ResumeBench, context: int, single: dict[str, float], planned: dict[str, Any]) -> dict[str, Any]:
    best = min(single, key=single.__getitem__)
    chosen = planned["source"] or "recompute"
    if planned["source"] and planned["recomputed_tokens"]:
        chosen += "+recompute"
    return {
        "context": context,
        "peer_mb_s": round(bench.peer_link.bytes_per_s / 1e6, 1),
        "store_mb_s": round(bench.store_link.bytes_per_s / 1e6, 1),
        **{f"{path}_ms": round(single[path], 1) for path in _SINGLE},
        "planner_ms": round(planned["ms"], 1),
        "best": best,
        "chosen": chosen,
        "regret": round(planned["ms"] / single[best] - 1, 3),
    }
