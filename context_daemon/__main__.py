"""`python -m context_daemon`: the process that runs on every node and outlives the engine."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import click

from context_daemon.daemon import ContextDaemon, DaemonConfig
from context_daemon.observability import configure_logging, get_logger, serve_metrics
from context_daemon.ship_options import ship_options


async def _run(config: DaemonConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    daemon = ContextDaemon(config)
    try:
        await daemon.start()
        await _first(stop.wait(), daemon.failed())
    finally:
        await daemon.stop()


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Until one of them ends; its error is raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()


@click.command()
@click.option("--node-id", required=True, help="Name of this node; unique among all that ever join the cluster.")
@click.option("--listen", default="127.0.0.1:7070", show_default=True, help="host:port of the gRPC service.")
@click.option("--advertise", default="", help="host:port by which other nodes reach it; by default --listen.")
@click.option("--durable-url", required=True, help="redis:// URL of the durable store.")
@click.option(
    "--kv-url", "kv_urls", required=True, multiple=True,
    help="redis:// URL of a KV page server; repeat for several, the same ones on every node.",
)  # fmt: skip
@click.option("--metrics-port", type=int, default=0, show_default=True, help="Port of /metrics; 0 takes a free one.")
@click.option("--metrics-host", default="127.0.0.1", show_default=True)
@click.option("--store-timeout", "store_timeout_s", type=float, default=1.0, show_default=True, help="Seconds.")
@click.option("--kv-ttl", "kv_ttl_s", type=int, default=6 * 3600, show_default=True, help="Seconds a page is kept.")
@click.option(
    "--worker-ttl", "worker_ttl_s", type=float, default=10.0, show_default=True, help="Seconds a beat counts."
)
@click.option("--max-peer-streams", type=click.IntRange(min=1), default=8, show_default=True, help="To other nodes.")
@ship_options
def main(metrics_port: int, metrics_host: str, **options: str) -> None:
    """Keep tokens, KV pages, heartbeats and notices of one node."""
    config = DaemonConfig(**{name: value for name, value in options.items() if value is not None})  # type: ignore[arg-type]
    configure_logging("context-daemon", node=config.node_id)
    try:
        port = serve_metrics(metrics_host, metrics_port)
        get_logger().info("metrics", host=metrics_host, port=port)
        asyncio.run(_run(config))
    except (OSError, ValueError) as error:
        sys.exit(f"context daemon: {error}")


if __name__ == "__main__":
    main()
