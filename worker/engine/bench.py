"""Our engine beside others, each alone in its own process: same weights, prompts, threads and number of new tokens.

`run_engine_bench` starts `python -m worker.engine.bench` once per engine and collects their rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ENGINES = ("tideover", "transformers")
_STDERR_TAIL = 2000
_BANDWIDTH_BYTES = 256 * 1024 * 1024


@dataclass(slots=True)
class Timings:
    """Seconds. `intervals` are inter-token latencies, one per token after each sequence's first."""

    ttft: list[float] = field(default_factory=list)
    intervals: list[float] = field(default_factory=list)
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_steps: list[float] = field(default_factory=list)


def run_engine_bench(
    model: str,
    batches: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    threads: int,
    peers: Sequence[str],
    rounds: int = 1,
) -> list[dict[str, Any]]:
    """Rows for "tideover" and each peer at each batch size: medians over `rounds`, in which the engines take turns.

    `decode_tok_s` is the batch over its median decode step: on a busy machine a mean tells more of the others.
    `floor_fraction` is the time that reading the weights once takes, at the read bandwidth measured in the same
    process, over the same step. Raises ValueError for an unknown peer, RuntimeError if an engine fails.
    """
    unknown = sorted(set(peers) - set(ENGINES))
    if unknown:
        raise ValueError(f"unknown peer {', '.join(unknown)}: known are {', '.join(ENGINES)}")
    if min(batches) < 1 or prompt_tokens < 1 or new_tokens < 2 or threads < 1:
        raise ValueError("batches, prompt tokens and threads must be at least 1, new tokens at least 2")
    engines = tuple(dict.fromkeys(("tideover", *peers)))
    measured: dict[str, list[list[dict[str, Any]]]] = {engine: [] for engine in engines}
    for _ in range(rounds):
        for engine in engines:
            flags = {"engine": engine, "model": model, "batches": ",".join(map(str, batches))}
            sizes = {"prompt-tokens": prompt_tokens, "new-tokens": new_tokens, "threads": threads}
            measured[engine].append(_run_child([f"--{name}={value}" for name, value in (flags | sizes).items()]))
    return [_median_row(rows) for engine in engines for rows in zip(*measured[engine], strict=True)]


def _median_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One batch size of one engine over the rounds: the median of each figure that was measured."""
    return {
        name: statistics.median(row[name] for row in rows) if isinstance(value, float) else value
        for name, value in rows[0].items()
    }


def _run_child(flags: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "worker.engine.bench", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(flags)} failed with {done.returncode}:\n{done.stderr[-_STDERR_TAIL:]}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def _prompts(batch: int, prompt_tokens: int, vocab: int) -> list[list[int]]:
    generator = np.random.default_rng(batch)
    rows: list[list[int]] = generator.integers(0, vocab, (batch, prompt_tokens)).tolist()
    return rows


def _row(engine: str, batch: int, prompt_tokens: int, timings: Timings, floor: float) -> dict[str, Any]:
    step = statistics.median(timings.decode_steps)
    p50, p99 = np.percentile(timings.intervals, (50, 99))
    return {
        "engine": engine,
        "dtype": "float32",
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "prefill_tok_s": round(timings.prefill_tokens / timings.prefill_seconds, 1),
        "decode_tok_s": round(batch / step, 1),
        "ttft_ms": round(statistics.median(timings.ttft) * 1e3, 1),
        "itl_p50_ms": round(float(p50) * 1e3, 1),
        "itl_p99_ms": round(float(p99) * 1e3, 1),
        "floor_fraction": round(floor / step, 3),
    }


def read_bandwidth() -> float:
    """Bytes per second that torch reads from memory with the threads it has: the best of five passes."""
    import torch

    data = torch.ones(_BANDWIDTH_BYTES // 4)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - start)
    return _BANDWIDTH_BYTES / min(seconds)


def decode_weight_bytes(model: Any) -> int:
    """Bytes that one decode step must read: every weight, but not an embedding table that the head does not share."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    table = model.get_input_embeddings().weight
    return int(total if table is model.lm_head.weight else total - table.numel() * table.element_size())


def _bench_tideover(args: argparse.Namespace) -> tuple[Callable[[int], Timings], float]:
    from worker.engine.config import EngineConfig
    from worker.engine.engine import TorchEngine

    batches = args.batches
    length = args.prompt_tokens + args.new_tokens
    engine = TorchEngine.load(
        EngineConfig(
            model=args.model,
            max_num_seqs=max(batches),
            # all prompts in one step, as generate does: then every decode step holds the whole batch
            max_num_batched_tokens=max(batches) * args.prompt_tokens,
            max_model_len=length,
            num_pages=max(batches) * -(-length // 16),
            num_threads=args.threads,
            batch_invariant=not args.batch_variant,
        )
    )
    return lambda batch: _time_tideover(engine, batch, args), engine.step_bytes


def _time_tideover(engine: Any, batch: int, args: argparse.Namespace) -> Timings:
    from context_daemon.records import RequestKey, SamplingParams
    from worker.engine.protocol import EngineRequest

    params = SamplingParams(seed=0, max_tokens=args.new_tokens, temperature=0, ignore_eos=True)
    keys = [RequestKey("bench", line) for line in range(1, batch + 1)]
    prompts = _prompts(batch, args.prompt_tokens, engine.plan.spec.vocab_size)
    timings, start = Timings(), time.perf_counter()
    last: dict[RequestKey, float] = {}
    for key, prompt in zip(keys, prompts, strict=True):
        engine.add(EngineRequest(key, tuple(prompt), params))
    while engine.has_work():
        before = time.perf_counter()
        output = engine.step()
        now = time.perf_counter()
        if output.prefill_tokens:
            timings.prefill_tokens += output.prefill_tokens
            timings.prefill_seconds += now - before
        else:
            timings.decode_steps.append(now - before)
        for token in output.tokens:
            if token.key in last:
                timings.intervals.append(now - last[token.key])
            else:
                timings.ttft.append(now - start)
            last[token.key] = now
    for key in keys:
        engine.abort(key)
    return timings


def _bench_transformers(args: argparse.Namespace) -> tuple[Callable[[int], Timings], float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, local_files_only=True)
    model.eval()
    return lambda batch: _time_transformers(model, batch, args), decode_weight_bytes(model)


def _time_transformers(model: Any, batch: int, args: argparse.Namespace) -> Timings:
    import torch

    stamps: list[float] = []

    def stamp(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        stamps.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    ids = torch.tensor(_prompts(batch, args.prompt_tokens, model.config.vocab_size))
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=args.new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=[stamp],
    )
    steps = np.diff(stamps).tolist()
    return Timings(
        ttft=[stamps[0] - start] * batch,
        intervals=[step for step in steps for _ in range(batch)],
        prefill_tokens=batch * args.prompt_tokens,
        prefill_seconds=stamps[0] - start,
        decode_steps=steps,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], required=True)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-variant", action="store_true", help="measure tideover without batch invariance")
    args = parser.parse_args()
    prepare = _bench_tideover if args.engine == "tideover" else _bench_transformers
    measure, weight_bytes = prepare(args)
    floor = weight_bytes / read_bandwidth()
    measure(1)  # warm-up
    rows = [_row(args.engine, batch, args.prompt_tokens, measure(batch), floor) for batch in args.batches]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
