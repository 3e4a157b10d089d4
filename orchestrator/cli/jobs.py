"""Commands on jobs: submit, status, watch, results, cancel."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import click
from rich.console import Console
from rich.table import Table

from orchestrator.cli import live
from orchestrator.cli.common import (
    FAILED,
    USAGE,
    address_option,
    as_dict,
    connect,
    console,
    fail,
    json_option,
    print_json,
    reports_errors,
)
from orchestrator.client import TideoverClient
from orchestrator.demo.report import recovery_table
from protos import jobs_pb2


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--watch", is_flag=True, help="Show progress until the job is done.")
@click.option("--request-id", default="", help="Idempotency key: the same key and file never make a second job.")
@click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Stored with the job; may be repeated.")
@json_option
@address_option
@reports_errors
def submit(
    file: Path, watch: bool, request_id: str, metadata: tuple[str, ...], as_json: bool, address: str | None
) -> None:
    """Submit a batch FILE in OpenAI's batch format (one JSON request a line).

    --json prints the job as it is at the end: accepted, or with --watch done. Progress goes to stderr.
    """
    pairs = dict(_pair(item) for item in metadata)
    client = connect(address)
    job = client.create_job(file, request_id=request_id, metadata=pairs)
    if not as_json:
        console.print(f"job {job.job_id}: {job.total} requests accepted", markup=False)
    if watch:
        job = live.show(client.watch_job(job.job_id), console)
    _say_job(job, as_json)
    _exit_by_state(job)


def _pair(item: str) -> tuple[str, str]:
    key, separator, value = item.partition("=")
    if not separator or not key:
        raise click.BadParameter(f"{item!r} is not KEY=VALUE", param_hint="--metadata")
    return key, value


@click.command()
@click.argument("job_id", metavar="[JOB]", required=False)
@json_option
@address_option
@reports_errors
def status(job_id: str | None, as_json: bool, address: str | None) -> None:
    """Show one JOB with its recoveries, or all jobs."""
    client = connect(address)
    if job_id:
        _one_status(client, job_id, as_json)
        return
    jobs = _all_jobs(client)
    if as_json:
        print_json({"jobs": [_job_dict(job) for job in jobs]})
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("job", "state", "done", "failed", "total", "tokens"):
        table.add_column(heading)
    for job in jobs:
        figures = (job.completed, job.failed, job.total, job.output_tokens)
        table.add_row(job.job_id, live.state_name(job.state), *map(str, figures))
    Console(width=160).print(table)


def _one_status(client: TideoverClient, job_id: str, as_json: bool) -> None:
    job, rows = client.get_job(job_id), client.interruptions(job_id)
    if as_json:
        print_json(_job_dict(job) | {"interruptions": [as_dict(row) for row in rows]})
        return
    _say_job(job, as_json=False)
    if rows:
        Console(width=200).print(recovery_table(rows))


def _all_jobs(client: TideoverClient) -> list[jobs_pb2.Job]:
    jobs: list[jobs_pb2.Job] = []
    token = ""
    while True:
        page = client.list_jobs(page_token=token)
        jobs += page.jobs
        token = page.next_page_token
        if not token:
            return jobs


@click.command()
@click.argument("job_id", metavar="JOB")
@json_option
@address_option
@reports_errors
def watch(job_id: str, as_json: bool, address: str | None) -> None:
    """Show a JOB's progress until it is done. --json prints one object a line, one line an update."""
    updates = connect(address).watch_job(job_id)
    if not as_json:
        _exit_by_state(live.show(updates, console))
        return
    job = jobs_pb2.Job()
    for update in updates:
        job = update.job
        print_json(as_dict(update) | {"job": _job_dict(job)})
    _exit_by_state(job)


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write output lines here.")
@click.option("--follow", is_flag=True, help="Wait until the job is done.")
@json_option
@address_option
@reports_errors
def results(job_id: str, output: Path | None, follow: bool, as_json: bool, address: str | None) -> None:
    """Fetch a JOB's lines, ordered as submitted: what is there now, or with --follow all of them.

    Without -o, lines go to stdout, one JSON object each. With -o, good lines go to FILE and error lines to FILE.errors.jsonl
    beside it. --json prints one document: the job's counts and, without -o, its `lines`.
    """
    client = connect(address)
    lines = sorted(client.stream_results(job_id, follow=follow), key=lambda item: item.line)
    job = client.get_job(job_id)
    good, bad = [line for line in lines if line.ok], [line for line in lines if not line.ok]
    if output is not None:
        _write_file(good, output)
        if bad:
            _write_file(bad, output.with_name(output.name + ".errors.jsonl"))
    elif not as_json:
        _write(lines, sys.stdout.buffer)
    if as_json:
        facts = {"job_id": job_id, "state": live.state_name(job.state), "total": job.total}
        _print_document(facts | {"output": len(good), "errors": len(bad)}, None if output else lines)
    console.print(f"{len(good)} answers, {len(bad)} errors of {job.total} lines", markup=False)
    if job.state in live.TERMINAL:
        _exit_by_state(job)


def _print_document(facts: dict[str, object], lines: list[jobs_pb2.StreamResultsResponse] | None) -> None:
    """One JSON object; result lines stand in it byte for byte."""
    if lines is None:
        print_json(facts)
        return
    head = json.dumps(facts, ensure_ascii=False).removesuffix("}").encode()
    sys.stdout.buffer.write(head + b', "lines": [' + b", ".join(line.payload for line in lines) + b"]}\n")
    sys.stdout.buffer.flush()


def _write(lines: Iterable[jobs_pb2.StreamResultsResponse], out: BinaryIO) -> None:
    for line in lines:
        out.write(line.payload + b"\n")
    out.flush()


def _write_file(lines: Iterable[jobs_pb2.StreamResultsResponse], path: Path) -> None:
    """Whole or not at all: a reader never sees half a file."""
    part = None
    try:
        descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        with os.fdopen(descriptor, "wb") as out:
            _write(lines, out)
        Path(part).chmod(0o644)
        Path(part).replace(path)
    except OSError as error:
        if part is not None:
            Path(part).unlink(missing_ok=True)
        fail(f"cannot write {path}: {error.strerror}", USAGE)


@click.command()
@click.argument("job_id", metavar="JOB")
@json_option
@address_option
@reports_errors
def cancel(job_id: str, as_json: bool, address: str | None) -> None:
    """Cancel a JOB: finished lines stay, the others get an error line."""
    _say_job(connect(address).cancel_job(job_id), as_json)


def _job_dict(job: jobs_pb2.Job) -> dict[str, object]:
    return as_dict(job) | {"state": live.state_name(job.state)}


def _say_job(job: jobs_pb2.Job, as_json: bool) -> None:
    if as_json:
        print_json(_job_dict(job))
        return
    counts = f"{job.completed} good, {job.failed} failed of {job.total}, {job.output_tokens} tokens"
    click.echo(f"{job.job_id}  {live.state_name(job.state)}  {counts}" + (f"  {job.error}" if job.error else ""))


def _exit_by_state(job: jobs_pb2.Job) -> None:
    if job.state in (jobs_pb2.JOB_STATE_FAILED, jobs_pb2.JOB_STATE_CANCELLED) or job.failed:
        sys.exit(FAILED)
