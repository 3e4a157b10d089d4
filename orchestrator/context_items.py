"""Puts together what the durable store, the KV servers and the arenas said of requests. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from context_daemon import wire
from context_daemon.records import PAGE_SIZE, RequestKey, RequestRecord
from context_daemon.watermark import epoch_of_page
from protos import admin_pb2 as pb
from protos import context_pb2


@dataclass(frozen=True)
class Found:
    """Answers of daemons by address; `stored` is of the KV servers, and `kv_error` says why it is not all."""

    nodes: dict[str, context_pb2.ListPagesResponse]
    errors: dict[str, str]
    stored: Sequence[context_pb2.StoreHolding]
    kv_error: str

    @cached_property
    def arenas(self) -> Mapping[RequestKey, list[tuple[str, context_pb2.ArenaHolding]]]:
        """With the node's id, by request."""
        found: dict[RequestKey, list[tuple[str, context_pb2.ArenaHolding]]] = defaultdict(list)
        for answer in self.nodes.values():
            for holding in answer.arena:
                found[wire.key_from_pb(holding.key)].append((answer.node_id, holding))
        return found

    @cached_property
    def store(self) -> Mapping[RequestKey, list[context_pb2.StoreHolding]]:
        found: dict[RequestKey, list[context_pb2.StoreHolding]] = defaultdict(list)
        for holding in self.stored:
            found[wire.key_from_pb(holding.key)].append(holding)
        return found

    @cached_property
    def page_sizes(self) -> Mapping[str, int]:
        """By layout. The node that wrote a page knows, and it need not be the one that was asked for the KV servers."""
        return {layout: size for answer in self.nodes.values() for layout, size in answer.page_sizes.items()}

    @property
    def keys(self) -> set[RequestKey]:
        return {*self.arenas, *self.store}


def context_item(key: RequestKey, record: RequestRecord | None, found: Found) -> pb.ContextItem:
    places = [_arena(node_id, holding) for node_id, holding in found.arenas.get(key, ())]
    by_layout: dict[str, list[context_pb2.StoreHolding]] = defaultdict(list)
    for holding in found.store.get(key, ()):
        by_layout[holding.layout].append(holding)
    sizes = found.page_sizes
    places += [
        _stored(layout, holdings, record, sizes.get(layout, PAGE_SIZE))
        for layout, holdings in sorted(by_layout.items())
    ]
    item = pb.ContextItem(job_id=key.job_id, line=key.line, choice=key.choice, places=places)
    return item if record is None else _told(item, record)


def _told(item: pb.ContextItem, record: RequestRecord) -> pb.ContextItem:
    item.state, item.worker_id = str(record.state), record.worker_id
    item.incarnation, item.epoch = record.token.incarnation, record.token.epoch
    item.prompt_tokens, item.tokens = len(record.spec.prompt_token_ids), len(record.tokens)
    item.watermark, item.layout, item.kv_at = record.watermark, record.layout, record.kv_at
    item.segments.extend(pb.ContextSegment(epoch=s.epoch, first_page=s.first_page) for s in record.segments)
    return item


def _arena(node_id: str, holding: context_pb2.ArenaHolding) -> pb.ContextPlace:
    return pb.ContextPlace(
        node_id=node_id,
        layout=holding.layout,
        pages=holding.pages,
        bytes=holding.bytes,
        restorable=holding.positions,
        owner_epoch=holding.owner_epoch,
        held=_pages(holding.held),
    )


def _stored(
    layout: str,
    holdings: Sequence[context_pb2.StoreHolding],
    record: RequestRecord | None,
    page_size: int,
) -> pb.ContextPlace:
    return pb.ContextPlace(
        layout=layout,
        pages=sum(len(holding.numbers) for holding in holdings),
        bytes=sum(holding.bytes for holding in holdings),
        restorable=_restorable(holdings, record, page_size) if record is not None and record.layout == layout else 0,
        held=_pages(sorted((page for item in holdings for page in item.held), key=_position)),
    )


def _restorable(holdings: Sequence[context_pb2.StoreHolding], record: RequestRecord, size: int) -> int:
    """Up to the watermark or the first page that is not there under its segment's epoch. Bytes are checked as they come."""
    there = {(number, holding.epoch) for holding in holdings for number in holding.numbers}
    page = 0
    while page * size < record.watermark and (page, epoch_of_page(record.segments, page)) in there:
        page += 1
    return min(record.watermark, page * size)


def _position(held: context_pb2.PageHolding) -> tuple[int, int]:
    return held.page, held.epoch


def _pages(held: Sequence[context_pb2.PageHolding]) -> list[pb.ContextPage]:
    return [pb.ContextPage(page=item.page, epoch=item.epoch, bytes=item.bytes) for item in held]


def context_nodes(found: Found) -> list[pb.ContextNode]:
    answered = [
        pb.ContextNode(
            node_id=answer.node_id,
            address=address,
            arena_bytes=answer.arena_bytes,
            arena_used_bytes=answer.arena_used_bytes,
            bytes_per_s=answer.bytes_per_s,
            money_per_hour=answer.money_per_hour,
        )
        for address, answer in found.nodes.items()
    ]
    answered.sort(key=lambda node: node.node_id)  # addresses say nothing to a reader, and their order changes
    return answered + [pb.ContextNode(address=address, error=error) for address, error in found.errors.items()]
