"""Commands on what is kept of requests: context ls, show, gc."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from orchestrator.cli.common import (
    FAILED,
    address_option,
    as_dict,
    connect,
    console,
    fail,
    json_option,
    print_json,
    reports_errors,
)
from protos import admin_pb2 as pb

_KEY = re.compile(r"([^/\s]+)/([1-9]\d{0,17})(?:\.(\d{1,9}))?")
_UNITS = ("B", "KB", "MB", "GB", "TB")


class RequestName(click.ParamType[tuple[str, int, int]]):
    """JOB/LINE or JOB/LINE.CHOICE."""

    name = "request"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int, int]:
        match = _KEY.fullmatch(value)
        if match is None:
            self.fail(f"{value!r} names no request: write JOB/LINE or JOB/LINE.CHOICE, lines from 1 up", param, ctx)
        return match[1], int(match[2]), int(match[3] or 0)


@click.group()
def context() -> None:
    """What is kept of requests, and where: tokens, KV in the KV servers and in each machine's arena."""


@context.command("ls")
@click.argument("job_id", metavar="[JOB]", default="")
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="Most requests to list.")
@json_option
@address_option
@reports_errors
def list_context(job_id: str, limit: int, as_json: bool, address: str | None) -> None:
    """List the requests, of JOB or of all, that run, wait for their next owner, or still have KV anywhere."""
    found = connect(address).context(job_id, limit=limit)
    if as_json:
        print_json(_document(found))
        return
    table = _table("request", "state", "epoch", "worker", "tokens", "watermark", "KV store", "arenas")
    for item in found.items:
        figures = (str(item.epoch), item.worker_id, str(item.tokens), str(item.watermark))
        stored = [place for place in item.places if not place.node_id]
        arenas = [f"{place.node_id}: {place.restorable} in {_size(place.bytes)}" for place in _arenas(item)]
        kv = f"{sum(p.restorable for p in stored)} in {_size(sum(p.bytes for p in stored))}" if stored else "-"
        table.add_row(_name(item), item.state or "unknown", *figures, kv, ", ".join(arenas) or "-")
    Console(width=200).print(table)
    _say_nodes(found.nodes)
    _say_gaps(found)


@context.command()
@click.argument("request_key", metavar="JOB/LINE[.CHOICE]", type=RequestName())
@json_option
@address_option
@reports_errors
def show(request_key: tuple[str, int, int], as_json: bool, address: str | None) -> None:
    """Show one request: its record, its KV page by page and place by place, and what a restore would find."""
    found = connect(address).context(*request_key)
    if as_json:
        print_json(_document(found))
        return
    for item in found.items:
        _show(item)
    _say_gaps(found)


@context.command()
@click.option("--dry-run", is_flag=True, help="Say what would go, and leave it.")
@json_option
@address_option
@reports_errors
def gc(dry_run: bool, as_json: bool, address: str | None) -> None:
    """Take away what no request can use any more.

    KV of requests that are over, KV of former owners that no watermark tells of, and arena blocks of workers that are gone.
    What a request that is not over could still use is never touched.
    """
    found = connect(address).collect_context(dry_run)
    reasons = {reason: int(found.stored_pages[reason]) for reason in sorted(found.stored_pages)}
    if as_json:
        print_json(as_dict(found) | {"stored_pages": reasons, "dry_run": dry_run})
    else:
        why = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
        verb = "would go" if dry_run else "gone"
        click.echo(f"{verb}: pages of the KV servers: {why}; {_size(found.stored_bytes)}")
        click.echo(f"{verb}: requests in arenas: {found.arena_requests}; {_size(found.arena_bytes)}")
        click.echo(f"{verb}: blocks of workers that are gone: {found.dead_blocks}")
    missed = [node for node in found.nodes if node.error]
    for node in missed:
        console.print(f"not collected: {node.error}", markup=False)
    if not found.nodes:
        console.print("no machine is known: nothing was looked through", markup=False)
    if missed:
        fail("some machines were not reached; call it again when they are back", FAILED)


def _show(item: pb.ContextItem) -> None:
    segments = ", ".join(f"epoch {s.epoch} from page {s.first_page}" for s in item.segments) or "none"
    click.echo(f"{_name(item)}  {item.state}  incarnation {item.incarnation}, epoch {item.epoch}")
    click.echo(f"  owner      {item.worker_id or 'nobody'}; last committed through {item.kv_at or 'no daemon'}")
    click.echo(f"  tokens     {item.prompt_tokens} of the prompt, {item.tokens} generated and committed")
    click.echo(f"  watermark  {item.watermark} positions of layout {item.layout or '-'}; segments: {segments}")
    wanted = max(0, item.prompt_tokens + item.tokens - 1)
    click.echo(f"  a restore wants {wanted} positions and finds")
    for place in item.places:
        owner = f"; owner there under epoch {place.owner_epoch}" if place.owner_epoch else ""
        click.echo(
            f"    {place.node_id or 'KV store'}: {min(wanted, place.restorable)} of layout {place.layout}, "
            f"{place.pages} pages, {_size(place.bytes)}{owner}"
        )
        pages = ", ".join(f"{page.page} (epoch {page.epoch})" for page in place.held)
        click.echo(f"      pages {pages}")
    if not item.places:
        click.echo("    nothing anywhere: it is all computed")


def _say_nodes(nodes: Iterable[pb.ContextNode]) -> None:
    table = _table("node", "daemon", "arena", "KV to store", "from store", "to peers", "from peers", "money an hour")
    for node in nodes:
        if not node.error:
            ways = ("store out", "store in", "peer out", "peer in")
            rates = [f"{_size(node.bytes_per_s.get(way, 0.0))}/s" for way in ways]
            money = ", ".join(f"{what} {cost:.2f}" for what, cost in sorted(node.money_per_hour.items())) or "-"
            used = f"{_size(node.arena_used_bytes)} of {_size(node.arena_bytes)}"
            table.add_row(node.node_id, node.address, used, *rates, money)
    Console(width=200).print(table)


def _say_gaps(found: pb.ListContextResponse) -> None:
    """What the list lacks."""
    if found.left_off:
        console.print(f"{found.left_off} more requests: name a job, or give a larger --limit", markup=False)
    for node in found.nodes:
        if node.error:
            console.print(f"arena not asked: {node.error}", markup=False)
    if found.kv_error:
        console.print(f"KV servers not fully listed: {found.kv_error}", markup=False)


def _document(found: pb.ListContextResponse) -> dict[str, Any]:
    plain = as_dict(found)
    for item in plain["items"]:
        item["request"] = f"{item['job_id']}/{item['line']}" + (f".{item['choice']}" if item["choice"] else "")
    return plain


def _arenas(item: pb.ContextItem) -> list[pb.ContextPlace]:
    return [place for place in item.places if place.node_id]


def _name(item: pb.ContextItem) -> str:
    return f"{item.job_id}/{item.line}" + (f".{item.choice}" if item.choice else "")


def _size(count: float) -> str:
    """Three digits and a unit of 1000."""
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {_UNITS[-1]}"


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading)
    return table
