"""`tideover up` and `tideover down`: a whole cluster on this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from context_daemon.ship_options import ship_options
from orchestrator.cli.common import FAILED, USAGE, console, fail, json_option, print_json
from orchestrator.fleet import statefile
from orchestrator.fleet.local import serve
from orchestrator.fleet.local.checks import PreflightError, preflight
from orchestrator.fleet.local.options import DEFAULT_PORT, MAX_KV_SERVERS, ClusterOptions
from orchestrator.fleet.local.process import ProcessFailed
from orchestrator.fleet.local.shutdown import stop_cluster
from worker.demo_model import DemoModelError, ensure_demo_model

_ENGINE_FLAGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "kv_cache_memory_bytes",
    "dtype",
    "batch_invariant",
)

_KV_FLAGS = (
    "kv_servers",
    "kv_commit",
    "kv_bandwidth",
    "kv_cost_budget",
    "kv_price_per_gb",
    "peer_price_per_gb",
    "instance_price",
    "nic_bandwidth",
    "arena_bytes",
)

name_option = click.option(
    "--name",
    envvar="TIDEOVER_CLUSTER_NAME",
    default=ClusterOptions().name,
    show_default=True,
    help="Name of the cluster.",
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Engine flags by vLLM's names; what is not given is left to the engine."""
    for option in reversed(
        (
            click.option("--max-num-seqs", type=click.IntRange(min=1), help="Most sequences in one step."),
            click.option(
                "--max-num-batched-tokens",
                type=click.IntRange(min=1),
                default=128,
                show_default=True,
                help="Most tokens in one step: on CPUs a step must stay well below a lease time.",
            ),
            click.option("--max-model-len", type=click.IntRange(min=1), help="Longest prompt and answer together."),
            click.option("--num-gpu-blocks-override", type=click.IntRange(min=1), help="KV pages, on any device."),
            click.option("--kv-cache-memory-bytes", type=click.IntRange(min=1), help="Memory for KV, per worker."),
            click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of weights, activations and KV."),
            click.option("--batch-invariant/--no-batch-invariant", default=None, help="Logits that ignore neighbours."),
        )
    ):
        command = option(command)
    return command


def kv_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What becomes of KV besides the workers' own memory; the context daemon's flags of the same names."""
    servers = click.option(
        "--kv-servers", default=1, show_default=True, type=click.IntRange(1, MAX_KV_SERVERS),
        help="KV page servers; each request's pages lie on one of them.",
    )  # fmt: skip
    return servers(ship_options(command))


def engine_args(flags: dict[str, Any]) -> dict[str, Any]:
    """The engine's arguments out of the command's flags; a page is what vLLM calls a block."""
    given = {name: flags[name] for name in _ENGINE_FLAGS if flags.get(name) is not None}
    if flags.get("num_gpu_blocks_override") is not None:
        given["num_pages"] = flags["num_gpu_blocks_override"]
    return given


@click.command()
@name_option
@click.option(
    "--workers", default=2, show_default=True, type=click.IntRange(min=0), help="Machines with one worker each."
)
@click.option("--model", default=None, help="Hugging Face folder; by default the demo model, prepared once and cached.")
@click.option("--port", default=DEFAULT_PORT, show_default=True, help="Of the API on 127.0.0.1; 0 takes any free one.")
@click.option(
    "--threads", default=0, type=click.IntRange(min=0), help="Per worker; by default the cores divided by the workers."
)
@engine_options
@kv_options
@click.option("--replace/--no-replace", default=True, show_default=True, help="Start a new machine for each one lost.")
@click.option("--fresh", is_flag=True, help="Forget the jobs of earlier runs first.")
@click.option("--detach", is_flag=True, help="Return when the cluster is ready and leave it running.")
@click.option("--orchestrator/--no-orchestrator", default=True, hidden=True)
@json_option
def up(**flags: Any) -> None:
    """Start a cluster on this machine: stores, Ray, machines with a worker each, and the orchestrator.

    In the foreground until Ctrl-C, or --detach and `tideover down`.
    """
    say = _printer()
    try:
        options = _options(flags, say)
        preflight(options)
        if flags["detach"]:
            _show(serve.start_detached(options, say), flags["as_json"])
        else:
            asyncio.run(serve.serve(options, say, lambda state: _show(state, flags["as_json"])))
    except (PreflightError, ValueError) as error:
        fail(str(error), USAGE)
    except (ProcessFailed, DemoModelError, OSError) as error:
        fail(str(error), FAILED)


def _options(flags: dict[str, Any], say: Callable[[str], None]) -> ClusterOptions:
    statefile.cluster_dir(flags["name"])  # refuses a bad name before anything else
    return ClusterOptions(
        name=flags["name"],
        model=_model(flags["model"], say) if flags["orchestrator"] else "",
        workers=flags["workers"],
        port=flags["port"],
        threads=flags["threads"],
        engine_args=engine_args(flags),
        replace=flags["replace"],
        fresh=flags["fresh"],
        orchestrator=flags["orchestrator"],
        **{name: flags[name] for name in _KV_FLAGS},
    )


def _model(given: str | None, say: Callable[[str], None]) -> str:
    if given is not None:
        return str(Path(given).absolute())
    said = ""

    def progress(what: str, part: float) -> None:
        nonlocal said
        line = f"demo model: {what} {10 * int(10 * part)} %"
        if line != said:
            said = line
            say(line)

    return str(ensure_demo_model(progress))


def _show(state: statefile.ClusterState, as_json: bool) -> None:
    if as_json:
        facts = msgspec.to_builtins(state)
        facts.pop("control_token")  # stays in the state file, which only its owner can read
        print_json(facts)
        sys.stdout.flush()


def _printer() -> Callable[[str], None]:
    return lambda line: console.print(line, markup=False, soft_wrap=True)


@click.command()
@name_option
@json_option
def down(name: str, as_json: bool) -> None:
    """Stop the cluster of `tideover up` and check that nothing of it is left. Jobs and answers are kept."""
    try:
        state = statefile.read_cluster(name)
    except ValueError as error:
        fail(str(error), USAGE)
    left = stop_cluster(state) if state is not None else []
    if as_json:
        print_json({"name": name, "was_running": state is not None, "left": left})
    elif state is None:
        console.print(f"no cluster {name!r} is up here", markup=False)
    if left:
        fail(f"cluster {name!r} left behind: {', '.join(left)}", FAILED)
    if state is not None:
        console.print(f"cluster {name!r} is down; nothing is left of it but its jobs and logs", markup=False)
