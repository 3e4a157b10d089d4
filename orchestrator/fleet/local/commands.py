"""Command lines and environments of the processes that a local cluster runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.fleet.local.options import RESOURCE, ClusterOptions, Subnet
from orchestrator.fleet.local.procscan import CLUSTER_ENV, NODE_ENV

DAEMON_ENV = "TIDEOVER_DAEMON_ADDRESS"
CLOUD_TOKEN_ENV = "TIDEOVER_CLOUD_TOKEN"
HEAD_ID = "head"  # stands for a node id: the head's processes are found like a machine's
NODE_LABEL = "tideover-node"
STARTED = "Ray runtime started"  # what `ray start --block` prints when the node has joined

# A machine that is gone is seen after 1.3 s instead of 14; a partition after 4 s.
_FAST_DETECTION = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


def base_environment(inherited: Mapping[str, str], cluster_id: str, token: str) -> dict[str, str]:
    """Of every process of the cluster. Proxies are left out: everything here is on loopback."""
    kept = {
        key: value
        for key, value in inherited.items()
        if key.lower() not in _PROXIES and not key.startswith(("TIDEOVER_", "RAY_"))
    }
    return kept | {
        CLUSTER_ENV: cluster_id,
        # Ray's control store listens on every address of the machine and would run whatever anybody sends it. The token
        # comes by the environment: Ray's default would leave a token file in the home directory.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
    }


def head_environment(base: Mapping[str, str]) -> dict[str, str]:
    return {**base, **_FAST_DETECTION, NODE_ENV: HEAD_ID}


def node_environment(base: Mapping[str, str], node_id: str, daemon_address: str, threads: int) -> dict[str, str]:
    return {**base, NODE_ENV: node_id, DAEMON_ENV: daemon_address, "OMP_NUM_THREADS": str(threads)}


def ray_head(subnet: Subnet, options: ClusterOptions, temp_dir: Path) -> tuple[str, ...]:
    return (
        *_ray_start(subnet.head, options),
        "--head",
        f"--port={subnet.gcs_port}",
        f"--ray-client-server-port={subnet.ray_client_port}",
        "--num-cpus=0",  # nothing but the control store: work belongs on machines that may go
        "--include-dashboard=false",
        "--disable-usage-stats",
        "--no-monitor",  # of Ray's autoscaler: machines are the supervisor's business
        f"--temp-dir={temp_dir}",
    )


def ray_node(subnet: Subnet, options: ClusterOptions, address: str, node_id: str) -> tuple[str, ...]:
    return (
        *_ray_start(address, options),
        f"--address={subnet.head}:{subnet.gcs_port}",
        "--num-cpus=1",
        f"--resources={json.dumps({RESOURCE: 1})}",
        f"--labels={NODE_LABEL}={node_id}",
    )


def _ray_start(address: str, options: ClusterOptions) -> tuple[str, ...]:
    return (
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        f"--node-ip-address={address}",
        f"--object-store-memory={options.object_store_memory}",
        "--include-log-monitor=false",
        "--block",
    )


def daemon(
    options: ClusterOptions, node_id: str, listen: str, durable_url: str, kv_urls: Sequence[str]
) -> tuple[str, ...]:
    urls = ("--durable-url", durable_url, *(part for url in kv_urls for part in ("--kv-url", url)))
    where = ("--node-id", node_id, "--listen", listen, *urls, "--metrics-port", "0")
    return (*_module("context_daemon"), *where, *_kv_flags(options))


def _kv_flags(options: ClusterOptions) -> tuple[str, ...]:
    """What was asked for; the rest is the daemon's own default."""
    asked = {
        "--kv-commit": str(options.kv_commit),
        "--kv-bandwidth": options.kv_bandwidth,
        "--kv-cost-budget": options.kv_cost_budget,
        "--kv-price-per-gb": options.kv_price_per_gb,
        "--peer-price-per-gb": options.peer_price_per_gb,
        "--instance-price": options.instance_price,
        "--nic-bandwidth": options.nic_bandwidth,
        "--arena-bytes": options.arena_bytes or None,
    }
    return tuple(part for flag, value in asked.items() if value is not None for part in (flag, str(value)))


def watcher(node_id: str, metadata_url: str, daemon_address: str, poll_interval_s: float) -> tuple[str, ...]:
    where = ("--cloud", "aws", "--metadata-url", metadata_url, "--daemon", daemon_address)
    return (*_module("worker.preemption"), "--node-id", node_id, *where, "--poll-interval", str(poll_interval_s))


def orchestrator(
    options: ClusterOptions, api_address: str, durable_url: str, ray_address: str, cloud_url: str
) -> tuple[str, ...]:
    engine_args = {"num_threads": options.threads_per_worker} | options.engine_args
    return (
        *_module("orchestrator"),
        *("--listen", api_address, "--durable-url", durable_url, "--ray-address", ray_address),
        *("--cloud-url", cloud_url, "--model", options.model, "--engine-args", json.dumps(engine_args)),
        *("--metrics-port", "0", "--cluster", options.name),
    )


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name)
