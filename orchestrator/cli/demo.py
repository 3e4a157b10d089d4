"""`tideover demo`: the whole story on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from orchestrator.cli.common import FAILED, console, json_option, print_json


@click.command()
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=Path("examples/prompts.jsonl"),
    show_default=True,
    help="The batch to run.",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), default=Path("output.jsonl"))
@click.option(
    "--deadline", type=click.FloatRange(min=2.0), default=6.0, show_default=True, help="Of the notice, seconds."
)
@json_option
def demo(file: Path, output: Path, deadline: float, as_json: bool) -> None:
    """Run a batch on two local machines, take both away on the way, and compare with an undisturbed run."""
    from orchestrator.demo.scenario import DemoFailed, run_demo

    try:
        report = run_demo(file, output, deadline, console)
    except DemoFailed as error:
        console.print(f"error: {error}", style="red", markup=False)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        console.print("interrupted: everything is taken down")
        sys.exit(130)
    if as_json:
        print_json(report.as_dict())
    sys.exit(0 if report.verdict.ok else FAILED)
