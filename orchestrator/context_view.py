"""What is kept of requests, and where: asked of the durable store and of every context daemon, and put together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from context_daemon.operator_client import collect_pages, list_pages
from context_daemon.records import RequestKey, RequestRecord
from context_daemon.store import ContextStore, StoreUnavailable
from orchestrator.context_items import Found, context_item, context_nodes
from orchestrator.jobs.service import UnknownJob
from protos import admin_pb2 as pb
from protos import context_pb2

_KEPT_S = 5.0  # an arena is looked through in memory
_STORED_S = 60.0  # the KV servers are gone through name by name
_AT_ONCE = 8  # questions to the durable store, each on a connection of its own
_LIMIT = 1000
_READY = 1000  # of a job, in line order: the store answers nobody else meanwhile


class UnknownRequest(Exception):
    """The job has no such line or choice."""


class ContextView:
    """Raises StoreUnavailable when the durable store is away. A daemon that is away is named in the answer."""

    def __init__(self, store: ContextStore) -> None:
        self._store = store

    async def listed(self, job_id: str, line: int, choice: int, limit: int) -> pb.ListContextResponse:
        """Raises UnknownJob, UnknownRequest, and ValueError for what is no key."""
        if line < 0 or choice < 0 or limit < 0 or (line and not job_id):
            raise ValueError(f"request {job_id}/{line}.{choice}, limit {limit}: numbers from 0 up, and a line of a job")
        one = RequestKey(job_id, line, choice) if line else None
        if job_id and await self._store.get_job(job_id) is None:
            raise UnknownJob(f"no job {job_id!r}; `tideover status` lists them")
        record = await self._store.get_request(one) if one else None
        if one and record is None:
            raise UnknownRequest(f"job {job_id!r} has no request {one}")
        active = {one: record} if one and record else await self._active(job_id)
        found = await self._ask(await self._daemons(active.values()), job_id, one)
        keys = sorted({*active, *found.keys})
        shown = keys[: limit or _LIMIT]
        records = active | await self._records([key for key in shown if key not in active])
        return pb.ListContextResponse(
            items=[context_item(key, records.get(key), found) for key in shown],
            left_off=len(keys) - len(shown),
            nodes=context_nodes(found),
            kv_error=found.kv_error,
        )

    async def collected(self, dry_run: bool) -> pb.CollectContextResponse:
        """Of all nodes that can be found, and of the KV servers by one of them."""
        total, stored = pb.CollectContextResponse(), Counter[str]()
        through = True  # the KV servers, by the first that answers
        for address in await self._daemons((await self._active("")).values()):
            try:
                found = await collect_pages(address, _STORED_S if through else _KEPT_S, dry_run, through)
            except StoreUnavailable as error:
                total.nodes.append(pb.ContextNode(address=address, error=str(error)))
                continue
            through = False
            stored.update(found.stored_pages)
            total.stored_bytes += found.stored_bytes
            total.arena_requests += found.arena_requests
            total.arena_bytes += found.arena_bytes
            total.dead_blocks += found.dead_blocks
            total.nodes.append(pb.ContextNode(address=address, node_id=found.node_id))
        total.stored_pages.update(stored)
        return total

    # -- the durable store ------------------------------------------------------------------------------------------
    async def _active(self, job_id: str) -> dict[RequestKey, RequestRecord]:
        """Requests that are not over and have run: something may be kept of them. Others of their jobs come behind them."""
        jobs = [job_id] if job_id else [job.job_id for job in await self._store.active_jobs()]
        keys: list[RequestKey] = []
        for job in jobs:
            keys += [request.key for request in await self._store.leased_requests(job)]
            keys += [request.key for request in await self._store.ready_requests(job, _READY) if request.epoch]
        return await self._records(keys)

    async def _records(self, keys: Sequence[RequestKey]) -> dict[RequestKey, RequestRecord]:
        found: dict[RequestKey, RequestRecord] = {}
        for start in range(0, len(keys), _AT_ONCE):
            group = keys[start : start + _AT_ONCE]
            records = await asyncio.gather(*map(self._store.get_request, group))
            found |= {key: record for key, record in zip(group, records, strict=True) if record is not None}
        return found

    # -- the daemons ------------------------------------------------------------------------------------------------
    async def _daemons(self, records: Iterable[RequestRecord]) -> list[str]:
        """Of nodes with a worker, and of those that have a request's KV though their worker is gone."""
        workers = {worker.daemon for worker in await self._store.workers()}
        return sorted((workers | {record.kv_at for record in records}) - {""})

    async def _ask(self, addresses: Sequence[str], job_id: str, one: RequestKey | None) -> Found:
        """All of them for their arenas, then the first that answers for the KV servers."""
        asked = await asyncio.gather(*(_listed(address, _KEPT_S, job_id, one, False) for address in addresses))
        found = Found({}, {}, [], "no context daemon answers: nothing is known of the KV servers")
        for address, answer in zip(addresses, asked, strict=True):
            if isinstance(answer, str):
                found.errors[address] = answer
            else:
                found.nodes[address] = answer
        for address in found.nodes:
            stored = await _listed(address, _STORED_S, job_id, one, True)
            if not isinstance(stored, str):
                return replace(found, stored=list(stored.stored), kv_error=stored.stored_error)
            found = replace(found, kv_error=stored)
        return found


async def _listed(
    address: str, timeout_s: float, job_id: str, one: RequestKey | None, stored: bool
) -> context_pb2.ListPagesResponse | str:
    try:
        return await list_pages(address, timeout_s, job_id, one, stored)
    except StoreUnavailable as error:
        return str(error)
