"""Which pages of the KV store nobody will come for. Pure.

The answer for a page never turns from yes to no: epochs only grow, a record that names an epoch got its name while that was
the newest, and what is over stays over. So a record may be a little old when it answers; only a request's newest epoch and
later ones, whose watermark may still be under way, must be left alone.
"""

from __future__ import annotations

from enum import StrEnum

from context_daemon.records import RequestRecord, RequestState
from context_daemon.store import StoredPage


class Why(StrEnum):
    NEEDED = ""  # it is no garbage
    UNKNOWN = "unknown"  # the durable store knows no such request
    OVER = "over"  # the request has its line
    UNNAMED = "unnamed"  # of a former owner, and no watermark tells of it


def why_garbage(page: StoredPage, record: RequestRecord | None) -> Why:
    """`record` was read after `page` was seen: None before that might only mean not yet."""
    if record is None:
        return Why.UNKNOWN
    if record.state not in (RequestState.READY, RequestState.LEASED):
        return Why.OVER
    return Why.UNNAMED if unnamed(page.layout, page.epoch, record) else Why.NEEDED


def unnamed(layout: str, epoch: int, record: RequestRecord) -> bool:
    """The epoch is over, and the record of a request that is not has none of its pages in this layout."""
    named = layout == record.layout and any(segment.epoch == epoch for segment in record.segments)
    return epoch < record.token.epoch and not named
