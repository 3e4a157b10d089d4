"""`python -m worker.preemption`: the notice watcher of one machine."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

import click

from context_daemon.client import ContextClient
from context_daemon.observability import configure_logging, get_logger, serve_metrics
from worker.preemption.aws import AwsSource
from worker.preemption.imds import ImdsClient
from worker.preemption.watcher import Watcher

AWS_METADATA = "http://169.254.169.254"  # link-local, the same on every instance


@click.command()
@click.option("--node-id", required=True, help="Name of this node, as its daemon has it.")
@click.option("--cloud", type=click.Choice(["aws"]), required=True, help="Whose metadata service to ask.")
@click.option("--metadata-url", default=AWS_METADATA, show_default=True)
@click.option("--daemon", required=True, help="host:port of the node's context daemon.")
@click.option("--poll-interval", type=click.FloatRange(min=0.05), default=1.0, show_default=True, help="Seconds.")
@click.option(
    "--asg-timeout", type=float, help="Heartbeat timeout of the Auto Scaling lifecycle hook, if there is one."
)
@click.option("--metrics-host", default="127.0.0.1", show_default=True)
@click.option("--metrics-port", default=0, show_default=True, help="Port of /metrics; 0 takes a free one.")
def main(
    node_id: str,
    cloud: str,
    metadata_url: str,
    daemon: str,
    poll_interval: float,
    asg_timeout: float | None,
    metrics_host: str,
    metrics_port: int,
) -> None:
    """Tell the context daemon of each notice that the cloud gives this machine."""
    configure_logging("watcher", node=node_id, cloud=cloud)
    try:
        port = serve_metrics(metrics_host, metrics_port)
    except OSError as error:
        sys.exit(f"watcher: metrics on {metrics_host}:{metrics_port}: {error}")
    get_logger().info("metrics", host=metrics_host, port=port)
    source = AwsSource(ImdsClient(metadata_url, time.monotonic), node_id, time.time, asg_timeout)
    asyncio.run(_run(source, daemon, poll_interval))


async def _run(source: AwsSource, daemon: str, poll_interval: float) -> None:
    client = ContextClient(daemon, timeout_s=1.0)
    task = asyncio.create_task(Watcher(source, client, poll_interval).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        get_logger().info("stopped")
    finally:
        client.close()


if __name__ == "__main__":
    main()
