"""`tideover bench`: figures on this machine, as a table or as JSON rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from context_daemon.quantities import ByteCount
from orchestrator.cli.common import console, json_option, print_json


@click.group()
def bench() -> None:
    """Measure this machine."""


def _batches(_: click.Context, __: click.Parameter, value: str) -> list[int]:
    try:
        batches = [int(part) for part in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: give whole numbers as 1,8,32") from error
    if not batches or min(batches) < 1:
        raise click.BadParameter(f"{value!r}: these start at 1")
    return batches


def _batch_option(default: str = "1,8,32") -> Callable[[Any], Any]:
    return click.option("--batch", "batches", default=default, show_default=True, callback=_batches)


_model_option = click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A model folder; else the demo model.",
)
_threads_option = click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=None,
    help="Of the engine. Default: all cores; for commit all but one.",
)


@bench.command()
@_batch_option("1,8,32,64")
@click.option("--segments", type=click.IntRange(min=1), default=30, show_default=True, help="Pairs of segments.")
@click.option("--steps", type=click.IntRange(min=2), default=24, show_default=True, help="Decode steps a segment.")
@_model_option
@_threads_option
@json_option
def commit(
    batches: list[int], segments: int, steps: int, model: Path | None, threads: int | None, as_json: bool
) -> None:
    """What committing every decode step costs: alternating segments with and without."""
    from worker.bench_commit import run_commit_bench  # torch: only when it is needed

    # One core is left to the daemon, the stores and the committing threads, as on a machine that serves.
    _print(run_commit_bench(_model(model), batches, segments, steps, threads or max(1, _cores() - 1)), as_json)


@bench.command()
@_batch_option()
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--new-tokens", type=click.IntRange(min=2), default=32, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Engines take turns; medians.")
@click.option("--peers", default="", help="Also measured, each alone in its process: transformers.")
@_model_option
@_threads_option
@json_option
def engine(
    batches: list[int],
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    peers: str,
    model: Path | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Prefill and decode speed, beside peers and beside the floor that reading the weights sets."""
    from worker.engine.bench import run_engine_bench

    names = [name for name in peers.split(",") if name]
    if unknown := set(names) - {"transformers"}:
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: only transformers is known", param_hint="--peers")
    _print(
        run_engine_bench(str(_model(model)), batches, prompt_tokens, new_tokens, threads or _cores(), names), as_json
    )


@bench.command()
@click.option("--context", "contexts", default="256,1024,4000", show_default=True, callback=_batches)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="The ways take turns; medians."
)
@click.option(
    "--link",
    type=ByteCount(per_second=True),
    default=0,
    help="Slow the links to the peer and the store down to this, as 20MB/s. Default: as fast as they are.",
)
@click.option(
    "--beside", type=click.IntRange(min=0), default=0, show_default=True, help="Sequences that decode on meanwhile."
)
@_model_option
@_threads_option
@json_option
def resume(
    contexts: list[int], rounds: int, link: int, beside: int, model: Path | None, threads: int | None, as_json: bool
) -> None:
    """How soon an interrupted request goes on, by each way that its KV can come back."""
    from worker.bench_resume import PATHS, run_resume_bench

    cores = threads or max(1, _cores() - 1)
    _print(run_resume_bench(_model(model), contexts, rounds, cores, PATHS, link, beside), as_json)


@bench.command()
@click.option("--context", "contexts", default="256,512,1024", show_default=True, callback=_batches, help="Drawn from.")
@click.option("--draws", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@_model_option
@_threads_option
@json_option
def planner(contexts: list[int], draws: int, seed: int, model: Path | None, threads: int | None, as_json: bool) -> None:
    """How far the restore planner's choice is from the best way, over links of drawn bandwidths."""
    from worker.bench_planner import run_planner_bench

    rows = run_planner_bench(_model(model), contexts, draws, threads or max(1, _cores() - 1), seed)
    _print(rows, as_json, median_regret=round(median(row["regret"] for row in rows), 3))


@bench.command()
@_batch_option()
@click.option("--kv-servers", "servers", default="1,2,3", show_default=True, callback=_batches)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=3.0, show_default=True, help="For each row.")
@json_option
def store(batches: list[int], servers: list[int], seconds: float, as_json: bool) -> None:
    """What one context daemon takes in: commits by batch size, KV bytes by the number of KV servers."""
    from worker.bench_store import run_store_bench

    _print(run_store_bench(batches, servers, seconds), as_json)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _model(given: Path | None) -> Path:
    from worker.demo_model import ensure_demo_model

    return given or ensure_demo_model(lambda text, _share: console.print(text, markup=False))


def _print(rows: list[dict[str, Any]], as_json: bool, **overall: float) -> None:
    if as_json:
        print_json({"rows": rows} | overall)
        return
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    out = Console(width=160)
    out.print(table)
    for name, value in overall.items():
        out.print(f"{name}: {value}")
