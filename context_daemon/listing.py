"""What lies where, as an operator asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing

from context_daemon import wire
from context_daemon.kv_service import KVService
from context_daemon.page_records import Entry
from context_daemon.records import RequestKey
from context_daemon.store import KVStore, StoredPage, StoreUnavailable
from protos import context_pb2 as pb


async def pages_listed(request: pb.ListPagesRequest, service: KVService, kv: KVStore) -> pb.ListPagesResponse:
    """Raises ValueError for what is no job id. KV servers that are away make the answer shorter, and it says so."""
    one = wire.key_from_pb(request.key) if request.HasField("key") else None
    job_id = one.job_id if one else request.job_id
    answer = pb.ListPagesResponse(
        arena_bytes=service.arena.total_bytes, arena_used_bytes=service.used_bytes, page_sizes=service.page_sizes
    )
    for entry in service.table.entries():
        if job_id in ("", entry.key.job_id) and one in (None, entry.key):
            answer.arena.append(_in_arena(entry, service, one is not None))
    if request.stored:
        found: list[StoredPage] = []
        try:
            async with aclosing(kv.list_pages(job_id)) as batches:
                async for batch in batches:
                    found += [page for page in batch if one in (None, page.key)]
        except StoreUnavailable as error:
            answer.stored_error = str(error)
        answer.stored.extend(_in_store(found, one is not None))
    return answer


def _in_arena(entry: Entry, service: KVService, each: bool) -> pb.ArenaHolding:
    pages, size = list(entry.all()), entry.shape.block_bytes
    row = entry.shape.row_bytes
    order = sorted(pages, key=lambda item: (item[0], item[1].epoch))
    held = [pb.PageHolding(page=number, epoch=page.epoch, bytes=page.count * row) for number, page in order]
    return pb.ArenaHolding(
        key=wire.key_to_pb(entry.key),
        layout=entry.shape.layout,
        owner_epoch=entry.owner,
        positions=service.table.prefix(entry.key, entry.shape.layout),
        pages=len(pages),
        bytes=len(pages) * size,
        held=held if each else (),
    )


def _in_store(pages: Iterable[StoredPage], each: bool) -> list[pb.StoreHolding]:
    """Pages by request, layout and epoch; one that was listed twice counts once."""
    groups: dict[tuple[RequestKey, str, int], dict[int, StoredPage]] = {}
    for page in pages:
        groups.setdefault((page.key, page.layout, page.epoch), {})[page.page] = page
    return [
        pb.StoreHolding(
            key=wire.key_to_pb(key),
            layout=layout,
            epoch=epoch,
            bytes=sum(page.bytes for page in group.values()),
            held=[pb.PageHolding(page=n, epoch=epoch, bytes=group[n].bytes) for n in sorted(group)] if each else (),
            numbers=sorted(group),
        )
        for (key, layout, epoch), group in sorted(groups.items())
    ]
