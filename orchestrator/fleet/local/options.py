"""What a local cluster is asked to be, and where its parts listen."""

from __future__ import annotations

import errno
import math
import os
import socket
import zlib
from collections.abc import Iterable
from typing import Any

import msgspec

from context_daemon.commit_mode import KVCommit, ShipBudget
from context_daemon.traffic import Tariff

DEFAULT_PORT = 7450
RESOURCE = "tideover_worker"
DURABLE_PORT = 7001
KV_PORT = 7002
CONTROL_PORT = 7003
METRICS_PORT = 7004  # of the supervisor
_MORE_KV_PORTS = 7102  # of the second KV server, and so on
MAX_KV_SERVERS = 16
DAEMON_PORT = 7010
METADATA_PORT = 7011


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `tideover up`. `engine_args` go to the engine as they are, under vLLM's names."""

    name: str = "local"
    model: str = ""  # a Hugging Face folder; required with the orchestrator
    workers: int = 2
    port: int = DEFAULT_PORT  # of the public API on 127.0.0.1; 0: any free one
    threads: int = 0  # per worker; 0: free cores divided among the workers
    engine_args: dict[str, Any] = {}
    replace: bool = True  # a lost machine is followed by a new one
    fresh: bool = False  # wipe the durable store first
    orchestrator: bool = True
    kv_servers: int = 1
    kv_store_memory: int = 1 << 30  # bytes, maxmemory of each KV server
    kv_commit: KVCommit = KVCommit.STORE
    kv_bandwidth: int | None = None  # bytes/s of each machine, with auto; None: no bound
    kv_cost_budget: float | None = None  # money an hour of each machine, with auto; None: no bound
    kv_price_per_gb: float | None = None
    peer_price_per_gb: float | None = None
    instance_price: float | None = None  # an hour
    nic_bandwidth: int | None = None  # bytes/s of each machine; None: the kernel's word
    arena_bytes: int = 0  # shared memory for KV of each machine; 0: the context daemon's default
    object_store_memory: int = 80_000_000  # bytes of Ray's object store per node; little goes through it
    poll_interval_s: float = 0.25  # of the notice watchers

    @property
    def threads_per_worker(self) -> int:
        return self.threads or max(1, len(os.sched_getaffinity(0)) // max(1, self.workers))

    @property
    def ship_budget(self) -> ShipBudget:
        """What the context daemons will make of it. Raises ValueError for a budget that cannot be meant."""
        return ShipBudget(
            self.kv_commit,
            math.inf if self.kv_bandwidth is None else self.kv_bandwidth,
            math.inf if self.kv_cost_budget is None else self.kv_cost_budget,
            self.kv_price_per_gb or 0.0,
        )

    @property
    def tariff(self) -> Tariff:
        """What the context daemons will count by. Raises ValueError for a price that is none."""
        return Tariff(self.kv_price_per_gb, self.peer_price_per_gb, self.instance_price, self.nic_bandwidth)

    @property
    def kv_ports(self) -> dict[str, int]:
        """Of each KV server, by its process's name."""
        more = {f"redis-kv-{n}": _MORE_KV_PORTS + n - 2 for n in range(2, self.kv_servers + 1)}
        return {"redis-kv": KV_PORT} | more


class Subnet(msgspec.Struct, frozen=True):
    """A cluster's own /16 of the loopback range, so that several clusters never meet.

    Its ports are fixed and lie outside the kernel's and Ray's ranges of random ports: a server that is down for a
    minute finds its port free again.
    """

    number: int  # 1..250

    @property
    def supervisor(self) -> str:
        return f"127.{self.number}.0.1"

    @property
    def head(self) -> str:
        return f"127.{self.number}.0.10"

    @property
    def gcs_port(self) -> int:
        """Ray's control store listens on every address of the machine, so its port must differ between clusters."""
        return 6400 + self.number

    @property
    def ray_client_port(self) -> int:
        return 6700 + self.number

    def node(self, index: int) -> str:
        """Address of the index-th machine ever started; used once, as a cloud does."""
        return f"127.{self.number}.{index // 200 % 256}.{12 + index % 200}"


def claim_subnet(name: str, kv_ports: Iterable[int] = (KV_PORT,)) -> tuple[Subnet, socket.socket]:
    """The first free subnet, tried in an order that depends on the name; the bound control socket is the claim."""
    first = zlib.crc32(name.encode()) % 250
    for offset in range(250):
        subnet = Subnet(1 + (first + offset) % 250)
        claim = _bind(subnet.supervisor, CONTROL_PORT)
        if claim is None:
            continue
        stores = [(subnet.supervisor, port) for port in (DURABLE_PORT, *kv_ports)]
        others = [("0.0.0.0", subnet.gcs_port), *stores]
        if all(port_is_free(host, port) for host, port in others):
            return subnet, claim
        claim.close()
    raise OSError("no free loopback subnet among 127.1.0.0/16 … 127.250.0.0/16: too many clusters on this machine")


def port_is_free(host: str, port: int) -> bool:
    probe = _bind(host, port)
    if probe is None:
        return False
    probe.close()
    return True


def _bind(host: str, port: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        claim.bind((host, port))
        claim.listen()
    except OSError as error:
        claim.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return None
        raise
    return claim
