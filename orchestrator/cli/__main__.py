"""`python -m orchestrator.cli`, the same as `tideover`."""

from orchestrator.cli import main

main(prog_name="tideover")
