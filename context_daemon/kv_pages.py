"""Cutting a write of consecutive slots along page borders. Pure; both KV stores use it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from context_daemon import keys
from context_daemon.kv_slots import framed_size
from context_daemon.records import RequestKey
from context_daemon.store import SlotWrite, StoredPage


class PagePart(msgspec.Struct, frozen=True):
    """Bytes of one page from `offset` on; `whole` when they are all of it."""

    page: int
    offset: int
    data: memoryview
    whole: bool


def page_parts(write: SlotWrite) -> Iterator[PagePart]:
    """Raises ValueError when the data is not `count` framed slots."""
    step = framed_size(write.slot_bytes)
    if len(write.data) != write.count * step or write.start < 0 or write.page_size < 1:
        raise ValueError(
            f"KV write of {write.key} at {write.start}: {len(write.data)} bytes are not {write.count} framed slots of {step}"
        )
    view, position, stop = memoryview(write.data), write.start, write.start + write.count
    while position < stop:
        page, first = divmod(position, write.page_size)
        until = min(stop, (page + 1) * write.page_size)
        data = view[(position - write.start) * step : (until - write.start) * step]
        yield PagePart(page, first * step, data, until - position == write.page_size)
        position = until


def page_key(layout: str, key: RequestKey, epoch: int, page: int) -> str:
    return f"kv:{layout}:{key.job_id}:{key.line}.{key.choice}:{epoch}:{page}"


def parse_page_key(name: str, size: int = 0) -> StoredPage | None:
    """None for what is no page's name."""
    parts = name.split(":")
    if len(parts) != 6 or parts[0] != "kv":
        return None
    try:
        return StoredPage(
            keys.parse_rid(keys.checked_job(parts[2]), parts[3]), parts[1], int(parts[4]), int(parts[5]), size
        )
    except ValueError:
        return None


def pages_pattern(job_id: str) -> str:
    """Of the names of a job's pages; "" stands for all jobs. Raises ValueError for what is no job id."""
    return f"kv:*:{keys.checked_job(job_id) if job_id else '*'}:*"
