"""The two calls of the ContextService that operators make: what lies where, and away with what nobody can use."""

from __future__ import annotations

from collections.abc import Callable

from context_daemon.collector import Collector
from context_daemon.kv_service import KVService
from context_daemon.listing import pages_listed
from context_daemon.store import KVStore
from context_daemon.traffic import Figures
from protos import context_pb2 as pb


class Operator:
    """Both raise StoreUnavailable, `listed` ValueError for what is no job id."""

    def __init__(
        self, node_id: str, service: KVService, kv: KVStore, collector: Collector, traffic: Callable[[], Figures]
    ) -> None:
        self._node_id, self._service, self._kv = node_id, service, kv
        self._collector, self._traffic = collector, traffic

    async def listed(self, request: pb.ListPagesRequest) -> pb.ListPagesResponse:
        answer, traffic = await pages_listed(request, self._service, self._kv), self._traffic()
        answer.node_id = self._node_id
        answer.bytes_per_s.update({str(way): rate for way, rate in traffic.bytes_per_s.items()})
        answer.money_per_hour.update(traffic.per_hour)
        return answer

    async def collected(self, request: pb.CollectPagesRequest) -> pb.CollectPagesResponse:
        found = await self._collector.collect(request.dry_run, request.stored)
        return pb.CollectPagesResponse(
            node_id=self._node_id,
            stored_pages={str(why): count for why, count in found.stored.items()},
            stored_bytes=found.stored_bytes,
            arena_requests=found.arena_requests,
            arena_bytes=found.arena_bytes,
            dead_blocks=found.blocks,
        )
