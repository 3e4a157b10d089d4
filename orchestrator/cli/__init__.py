"""The command line, `tideover`. Exit codes: 0 good, 1 the job failed or differs, 2 usage."""

from __future__ import annotations

from importlib.metadata import version as installed_version

import click

from orchestrator.cli.bench import bench
from orchestrator.cli.cluster import down, up
from orchestrator.cli.common import json_option, print_json
from orchestrator.cli.context import context
from orchestrator.cli.demo import demo
from orchestrator.cli.jobs import cancel, results, status, submit, watch
from orchestrator.cli.workers import kill, preempt, workers


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """LLM inference on spot machines that loses nothing when they are taken away."""


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Print the version."""
    text = installed_version("tideover")
    if as_json:
        print_json({"version": text})
    else:
        click.echo(text)


for command in (
    up,
    down,
    demo,
    submit,
    status,
    watch,
    results,
    cancel,
    workers,
    context,
    preempt,
    kill,
    bench,
    version,
):
    main.add_command(command)
