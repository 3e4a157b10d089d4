"""Commands on the fleet: workers, preempt, kill."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from orchestrator.cli.common import address_option, as_dict, connect, console, json_option, print_json, reports_errors


@click.command()
@json_option
@address_option
@reports_errors
def workers(as_json: bool, address: str | None) -> None:
    """List the workers."""
    found = connect(address).workers()
    if as_json:
        print_json({"workers": [as_dict(worker) for worker in found]})
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("worker", "node", "state", "running", "waiting", "tokens/s", "KV pages", "notice"):
        table.add_column(heading)
    for worker in found:
        pages = f"{worker.pages_used}/{worker.pages_total}"
        load = (str(worker.running), str(worker.waiting), f"{worker.tokens_per_s:.1f}", pages)
        table.add_row(worker.worker_id, worker.node_id, worker.state, *load, worker.notice)
    Console(width=160).print(table)


@click.command()
@click.argument("worker_id", metavar="WORKER")
@click.option("--deadline", type=click.FloatRange(min=0.0), required=True, metavar="SECONDS", help="Until it is taken.")
@json_option
@address_option
@reports_errors
def preempt(worker_id: str, deadline: float, as_json: bool, address: str | None) -> None:
    """Give WORKER's machine a termination notice, and take it away at the deadline (fault injection)."""
    node_id = connect(address).preempt(worker_id, deadline)
    _say(worker_id, node_id, f"is told that it will be terminated in {deadline:g} s", as_json)


@click.command()
@click.argument("worker_id", metavar="WORKER")
@json_option
@address_option
@reports_errors
def kill(worker_id: str, as_json: bool, address: str | None) -> None:
    """SIGKILL every process of WORKER's machine, without notice (fault injection)."""
    node_id = connect(address).kill(worker_id)
    _say(worker_id, node_id, "is killed", as_json)


def _say(worker_id: str, node_id: str, what: str, as_json: bool) -> None:
    if as_json:
        print_json({"worker_id": worker_id, "node_id": node_id})
    else:
        console.print(f"{node_id} (of {worker_id}) {what}", markup=False)
