"""One context daemon: stores, notice board, gRPC server with health and reflection, started and stopped together."""

from __future__ import annotations

import asyncio
import math
import secrets
from dataclasses import dataclass

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # missing in the stubs
from grpc_reflection.v1alpha import reflection

from context_daemon.arena import MIN_BYTES
from context_daemon.collector import Collector
from context_daemon.commit_mode import KVCommit, ShipBudget
from context_daemon.guests import Guests
from context_daemon.kv_cluster import KVCluster
from context_daemon.kv_service import KVService
from context_daemon.nic import nic_bytes_per_s
from context_daemon.notices import NoticeBoard
from context_daemon.observability import get_logger
from context_daemon.operator_calls import Operator
from context_daemon.page_drop import PageDrop
from context_daemon.records import NoticeKind
from context_daemon.redis_store import RedisStore
from context_daemon.server import ContextServer
from context_daemon.sweeper import Sweeper
from context_daemon.traffic import Tariff
from context_daemon.traffic_gauges import TrafficGauges
from protos import context_pb2 as pb
from protos.context_pb2_grpc import add_ContextServiceServicer_to_server

MAX_MESSAGE = 64 << 20
SERVICE = pb.DESCRIPTOR.services_by_name["ContextService"].full_name
_NOTICE_INTERVAL_S = 0.2


def default_arena_bytes() -> int:
    return max(MIN_BYTES, min(16 << 30, psutil.virtual_memory().total // 8))


@dataclass(frozen=True)
class DaemonConfig:
    node_id: str
    listen: str  # host:port; port 0 takes a free one
    durable_url: str
    kv_urls: tuple[str, ...]  # of all KV servers, the same on every node (see KVCluster)
    store_timeout_s: float = 1.0
    kv_ttl_s: int = 6 * 3600
    worker_ttl_s: float = 10.0
    advertise: str = ""  # host:port by which other nodes reach this daemon; by default what it listens on
    max_peer_streams: int = 8  # to other nodes at once
    arena_bytes: int = 0  # 0: an eighth of the machine's memory, at most 16 GiB
    kv_commit: KVCommit = KVCommit.STORE
    kv_bandwidth: float = math.inf  # bytes/s that `auto` may ship
    kv_cost_budget: float = math.inf  # money an hour that `auto` may cost
    kv_price_per_gb: float | None = None  # None: free, as far as `auto` goes, and not shown
    peer_price_per_gb: float | None = None
    instance_price: float | None = None  # an hour
    nic_bandwidth: float | None = None  # bytes/s in each direction; None: what the kernel says

    @property
    def tariff(self) -> Tariff:
        nic = nic_bytes_per_s() if self.nic_bandwidth is None else self.nic_bandwidth
        return Tariff(self.kv_price_per_gb, self.peer_price_per_gb, self.instance_price, nic)


class ContextDaemon:
    """`start()` answers the port. It starts whether or not the stores are up: they may come back later. Raises ValueError
    for a wrong or repeated KV URL."""

    def __init__(self, config: DaemonConfig) -> None:
        self._config = config
        self._log = get_logger(node=config.node_id)
        writer = f"{config.node_id}:{secrets.token_hex(8)}"
        self._store = RedisStore(config.durable_url, timeout_s=config.store_timeout_s, writer=writer,
                                 on_loss=self._doubt)  # fmt: skip
        self._kv = KVCluster(config.kv_urls, timeout_s=max(2.0, config.store_timeout_s), ttl_s=config.kv_ttl_s)
        self._board = NoticeBoard(self._store, config.node_id, self._notice_error)
        budget = ShipBudget(config.kv_commit, config.kv_bandwidth, config.kv_cost_budget, config.kv_price_per_gb or 0.0)
        self.traffic = TrafficGauges(config.tariff)
        here = config.advertise or config.listen
        self._pages = KVService(
            self._kv,
            here=here,
            arena_bytes=config.arena_bytes or default_arena_bytes(),
            budget=budget,
            noticed=self._going,
            max_peer_streams=config.max_peer_streams,
        )
        drop = PageDrop(self._store, self._kv, self._pages)
        collector = Collector(self._pages.table, self._store, self._kv, drop, self._pages.reap)
        self._guests = Guests(self._pages, self._pages.peers, self._store)
        self._service = ContextServer(
            self._store,
            self._pages,
            self._board,
            drop,
            Operator(config.node_id, self._pages, self._kv, collector, self.traffic.figures),
            self._guests,
            node_id=config.node_id,
            address=here,
            worker_ttl_s=config.worker_ttl_s,
            on_loss=self._doubt,
        )
        limits = [("grpc.max_receive_message_length", MAX_MESSAGE), ("grpc.max_send_message_length", MAX_MESSAGE)]
        # Two daemons on one port would each get half the commits: refuse instead.
        self._server = grpc.aio.server(options=[*limits, ("grpc.so_reuseport", 0)])
        self._sweeper = Sweeper(self._pages.table, self._store, here, drop, self._pages.reap)
        self._background: list[asyncio.Task[None]] = []

    def _doubt(self) -> None:
        self._sweeper.doubt()

    def _notice_error(self, error: str) -> None:
        self._log.warning("notices_not_exchanged", error=error)

    def _going(self) -> bool:
        """This machine has been told that it goes. In `grace`, where nothing has left it so far, a hint that it may will do;
        `auto` keeps to its budget, for a hint may stand for hours."""
        hints = self._config.kv_commit is KVCommit.GRACE
        return any(hints or notice.kind is not NoticeKind.REBALANCE for notice in self._board.current())

    async def start(self) -> int:
        """Raises OSError when the address cannot be used."""
        add_ContextServiceServicer_to_server(self._service, self._server)
        health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)
        reflection.enable_server_reflection((SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                                             reflection.SERVICE_NAME), self._server)  # fmt: skip
        try:
            port = self._server.add_insecure_port(self._config.listen)
        except RuntimeError as error:
            raise OSError(f"context daemon cannot listen on {self._config.listen}: is the port in use?") from error
        await self._server.start()
        for name in ("", SERVICE):
            await health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._pages.page_server.listen(self._config.listen.rsplit(":", 1)[0].strip("[]"))
        work = (
            self._board.run(_NOTICE_INTERVAL_S),
            self._pages.shipper.run(),
            self._pages.page_server.run(),
            self._sweeper.run(),
            self._guests.run(),
            self._pages.links.meet_store(self._kv.probe),
            self.traffic.run(),
        )
        self._background = [asyncio.create_task(item) for item in work]
        self._log.info("listening", listen=self._config.listen, port=port)
        return port

    async def failed(self) -> None:
        """Raises when notices are no longer exchanged or KV is no longer shipped: the process must then be replaced. Call
        after `start`."""
        await asyncio.gather(*(asyncio.shield(task) for task in self._background))

    async def stop(self, grace_s: float = 2.0) -> None:
        """Calls in flight get `grace_s` to end."""
        await self._server.stop(grace_s)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)  # `failed` has told of an error
        await self._service.close()
        await self._pages.close()
        await self._store.close()
        await self._kv.close()
        self._log.info("stopped")
