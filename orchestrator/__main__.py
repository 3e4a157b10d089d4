"""`python -m orchestrator`: one process that leads a cluster. All it knows is in the durable store; it may be killed."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import click

from context_daemon.observability import configure_logging, get_logger, serve_metrics
from context_daemon.redis_store import RedisStore
from context_daemon.store import StaleLeader
from orchestrator.api.server import serve
from orchestrator.context_view import ContextView
from orchestrator.events import EventLog
from orchestrator.fleet.cloud import LocalCloud
from orchestrator.fleet.ray_fleet import FleetOptions, RayFleet
from orchestrator.fleet.view import ClusterView
from orchestrator.jobs.service import JobService
from orchestrator.jobs.validation import ModelLimits
from orchestrator.leadership import Leadership
from orchestrator.routing.router import Router, RouterOptions
from worker.engine.model_folder import inspect_model_folder
from worker.text import Tokenizer

log = get_logger()


@click.command()
@click.option("--listen", default="127.0.0.1:50051", show_default=True, help="Address of the gRPC API.")
@click.option("--durable-url", required=True, help="redis:// URL of the durable server.")
@click.option("--ray-address", required=True, help="host:port of the Ray head.")
@click.option("--model", required=True, help="Folder of the model.")
@click.option("--served-model-name", default="", help="Name clients use; by default the folder's.")
@click.option("--engine-args", default="{}", help="JSON object of engine settings, by EngineConfig's names.")
@click.option("--cloud-url", default="", help="Control endpoint of the local cloud, for fault injection.")
@click.option("--cluster", default="", help="Name of the cluster, for the log.")
@click.option("--metrics-port", default=0, show_default=True)
@click.option(
    "--lease-seconds", default=5.0, show_default=True, help="Silence after which an owner loses its requests."
)
def main(**options: Any) -> None:
    """Run the orchestrator until SIGTERM."""
    try:
        engine_args = json.loads(options["engine_args"])
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"not JSON: {error}", param_hint="--engine-args") from error
    configure_logging("orchestrator", cluster=options["cluster"])
    sys.exit(asyncio.run(_run(options, engine_args)))


async def _run(options: dict[str, Any], engine_args: dict[str, Any]) -> int:
    holder = f"{socket.gethostname()}:{os.getpid()}"
    store = RedisStore(options["durable_url"], writer=f"{holder}:{secrets.token_hex(8)}")
    leadership = Leadership(store, holder)
    events = EventLog(time.time)
    model_name = options["served_model_name"] or Path(options["model"]).name
    fleet = RayFleet(FleetOptions(options["ray_address"], model_name, options["model"], engine_args), events)
    await asyncio.to_thread(fleet.connect)
    term = await leadership.acquire()
    events.add("leading", f"orchestrator leads with term {term}")
    router = Router(store, fleet, events, RouterOptions(lease_s=options["lease_seconds"]))
    host = options["listen"].rsplit(":", 1)[0]
    log.info("metrics", address=f"{host}:{serve_metrics(host, options['metrics_port'])}")
    cloud = LocalCloud(options["cloud_url"], os.environ.get("TIDEOVER_CLOUD_TOKEN", ""))
    view = ClusterView(store, fleet, leadership, events, cloud, model_name)
    spec = inspect_model_folder(Path(options["model"]))
    limits = ModelLimits(model_name, engine_args.get("max_model_len") or spec.max_position_embeddings, spec.vocab_size)
    jobs = JobService(store, Tokenizer.load(options["model"]), limits, router.waiting_for, time.time)
    server = await serve(options["listen"], jobs, view, ContextView(store))
    return await _until_over(server, leadership, fleet, router, store)


async def _until_over(server: Any, leadership: Leadership, fleet: RayFleet, router: Router, store: RedisStore) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    parts = [
        asyncio.create_task(stop.wait(), name="signal"),
        asyncio.create_task(leadership.keep(), name="leadership"),
        asyncio.create_task(fleet.run(), name="fleet"),
        asyncio.create_task(router.run(lambda: leadership.term), name="router"),
    ]
    done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    code = max(_exit_code(task) for task in done)
    for task in parts:
        task.cancel()
    await server.stop(grace=1)
    await store.close()
    return code


def _exit_code(task: asyncio.Task[Any]) -> int:
    error = task.exception()
    if error is None:
        return 0
    if isinstance(error, StaleLeader):
        log.error("leadership_lost", error=str(error), effect="exits; a supervisor starts it anew as a standby")
    else:
        log.error("orchestrator_fatal", part=task.get_name(), exc_info=error)
    return 1


if __name__ == "__main__":
    main()
