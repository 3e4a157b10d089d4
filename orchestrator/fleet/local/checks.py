"""What is said by name before anything is started: ports, model, disk, memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import psutil
from msgspec.structs import replace

from context_daemon import redis_server
from context_daemon.arena import MIN_BYTES
from orchestrator.fleet import statefile
from orchestrator.fleet.local import reaper
from orchestrator.fleet.local.options import MAX_KV_SERVERS, ClusterOptions
from worker.engine.config import GIB, EngineConfig, EngineConfigError, EnginePlan, plan_engine
from worker.engine.model_folder import ModelFolderError

# Private memory beside weights and KV with Ray 2.60 and torch 2.13. Measured: 320 MiB for the head; 240 for a machine's
# raylet, agents, daemon and watcher and 150 for torch and transformers in its worker. The rest is room for loading.
HEAD_BYTES = 512 * 2**20
MACHINE_BYTES = 640 * 2**20
FREE_DISK_BYTES = 256 * 2**20  # token logs of a few hundred thousand requests, and Ray's session files


class PreflightError(Exception):
    """The cluster cannot run like this here; nothing was started. The message says what to change."""


def preflight(options: ClusterOptions) -> None:
    """Raises PreflightError with the first thing that is wrong."""
    check_not_running(options.name)
    if options.workers < 0 or options.threads < 0:
        raise PreflightError("--workers and --threads take numbers from 0 up")
    check_kv(options)
    check_port(options.port)
    check_store(statefile.cluster_dir(options.name) / "durable")
    if options.orchestrator:
        plan(options)


def check_not_running(name: str) -> None:
    """Refuses a cluster that runs. One whose supervisor and reaper were both killed is swept away first."""
    try:
        state = statefile.read_cluster(name)
    except ValueError as error:
        raise PreflightError(str(error)) from error
    if state is not None and statefile.supervisor_alive(state):
        raise PreflightError(
            f"cluster {name!r} runs already (pid {state.pid}, API at {state.api_address}); "
            f"stop it with `tideover down --name {name}`, or choose another --name"
        )
    if state is not None:
        reaper.sweep(name, state.cluster_id, Path(state.runtime_dir))


def check_kv(options: ClusterOptions) -> None:
    """Commit mode, budgets, arena and number of KV servers: whatever a context daemon would refuse to start with."""
    try:
        _ = options.ship_budget, options.tariff
    except ValueError as error:
        raise PreflightError(str(error)) from error
    if not 1 <= options.kv_servers <= MAX_KV_SERVERS:
        raise PreflightError(f"--kv-servers {options.kv_servers}: 1 to {MAX_KV_SERVERS} are possible on one machine")
    if options.arena_bytes and options.arena_bytes < MIN_BYTES:
        raise PreflightError(f"--arena-bytes {options.arena_bytes}: give each machine at least {MIN_BYTES} bytes")
    total, wanted = psutil.virtual_memory().total, options.arena_bytes * max(1, options.workers)
    if wanted > total:
        raise PreflightError(
            f"--arena-bytes {options.arena_bytes} for each of {options.workers} workers: {wanted / GIB:.1f} GiB of shared "
            f"memory, and this machine has {total / GIB:.1f} GiB in all"
        )


def check_port(port: int) -> None:
    if not 0 <= port <= 65535:
        raise PreflightError(f"port {port} is no port number: 0 to 65535")
    if port and not redis_server.port_is_free("127.0.0.1", port):
        raise PreflightError(
            f"port {port} on 127.0.0.1 is in use (or not allowed); choose another with --port, 0 for any free one"
        )


def check_store(folder: Path) -> None:
    """The durable store needs a server program, room, and a folder that takes writes."""
    try:
        redis_server.find_server_binary()
        redis_server.check_writable(folder, FREE_DISK_BYTES)
    except redis_server.ServerError as error:
        raise PreflightError(f"{error} (the folder lies under XDG_STATE_HOME)") from error


def plan(options: ClusterOptions, available_bytes: int | None = None) -> EnginePlan:
    """The engine plan of each worker, out of its share of the memory that is free now."""
    if not options.model:
        raise PreflightError("no model: give --model a Hugging Face folder")
    available = psutil.virtual_memory().available if available_bytes is None else available_bytes
    workers = max(1, options.workers)
    fixed = HEAD_BYTES + options.kv_servers * options.kv_store_memory + workers * MACHINE_BYTES
    share = (available - fixed) // workers
    known = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
    if unknown := options.engine_args.keys() - known:
        raise PreflightError(
            f"unknown engine arguments {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}"
        )
    try:
        return plan_engine(EngineConfig(model=options.model, **options.engine_args), max(0, share))
    except ModelFolderError as error:
        raise PreflightError(str(error)) from error
    except EngineConfigError as error:
        raise PreflightError(
            f"{error} (for each of {workers} workers: {available / GIB:.1f} GiB are free on this machine, "
            f"{fixed / GIB:.1f} GiB of it for the stores, Ray and the processes)"
        ) from error


def settle(options: ClusterOptions) -> ClusterOptions:
    """The same with the size of the KV cache fixed, so that each replacement machine is like the first."""
    pages = plan(options).num_pages
    return replace(options, engine_args=options.engine_args | {"num_pages": pages})
