"""Command-line options about KV that `python -m context_daemon` and `tideover up` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from context_daemon.commit_mode import KVCommit
from context_daemon.quantities import ByteCount

_OPTIONS = (
    click.option(
        "--kv-commit", type=click.Choice([str(mode) for mode in KVCommit]), default=str(KVCommit.STORE), show_default=True,
        callback=lambda _, __, mode: KVCommit(mode),
        help="What of the KV leaves the machine: every step (store), nothing (arena), all when a notice comes (grace), or "
        "what the budgets allow (auto). Tokens are committed every step in all of them.",
    ),
    click.option(
        "--kv-bandwidth", type=ByteCount(per_second=True),
        help="auto: bytes/s that may leave each machine, as in 200MB; no bound by default.",
    ),
    click.option(
        "--kv-cost-budget", type=float,
        help="auto: money an hour that each machine's KV traffic may cost; no bound by default.",
    ),
    click.option(
        "--kv-price-per-gb", type=float,
        help="Price of a GB to or from the KV store: for auto's budget and for the metrics. On AWS 0 within a zone and 0.02 "
        "across zones; free by default, and then not shown.",
    ),
    click.option(
        "--peer-price-per-gb", type=float,
        help="Price of a GB to another machine, for the metrics; by default not shown.",
    ),
    click.option(
        "--instance-price", type=float,
        help="Price of a machine an hour, shown in the metrics beside that of its KV; by default not shown.",
    ),
    click.option(
        "--nic-bandwidth", type=ByteCount(per_second=True),
        help="Bytes/s of each machine's network in one direction, as in 1.25GB for 10 Gbit/s, for the metrics; by default "
        "what the kernel says, if it does.",
    ),
    click.option(
        "--arena-bytes", type=ByteCount(), default=0,
        help="Shared memory for KV pages on each machine, as in 16GiB; by default 1/8 of its memory, at most 16 GiB.",
    ),
)  # fmt: skip


def ship_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`kv_commit`, `kv_bandwidth` and `kv_cost_budget` (None: no bound), `kv_price_per_gb`, `peer_price_per_gb`,
    `instance_price` and `nic_bandwidth` (None: not known), `arena_bytes` (0: default)."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
