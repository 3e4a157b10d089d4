"""How a watermark moves and which epochs its pages lie under. Pure; lua/common.lua does the same inside the scripts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from context_daemon.records import KVSegment, KVWatermark


class PageIndex(msgspec.Struct, frozen=True):
    """Where a request's KV is: positions `[0, watermark)` under these segments; `epoch` moved it last."""

    watermark: int = 0
    layout: str = ""
    segments: tuple[KVSegment, ...] = ()
    epoch: int = 0


def advance(index: PageIndex, epoch: int, known_tokens: int, mark: KVWatermark) -> PageIndex:
    """The index after `epoch` reported `mark` with `known_tokens` (prompt and generated) known.

    Clamped to T-1; never back within an epoch; older segments are cut at the first page; pages of another layout are
    forgotten. A first page without older pages before it would be a hole: nothing counts until it is filled.
    """
    older = index.segments if index.layout == mark.layout else ()
    own = [segment.first_page for segment in older if segment.epoch == epoch]
    first_page = min([mark.first_page, *own])
    segments = (*(s for s in older if s.epoch != epoch and s.first_page < first_page), KVSegment(epoch, first_page))
    positions = max(0, min(mark.positions, known_tokens - 1))
    if segments[0].first_page != 0:
        positions = 0
    if index.epoch == epoch and index.layout == mark.layout:
        positions = max(positions, index.watermark)
    return PageIndex(positions, mark.layout, segments, epoch)


def epoch_of_page(segments: Sequence[KVSegment], page: int) -> int | None:
    """Under which epoch a page lies; None if no segment reaches down to it."""
    found = None
    for segment in segments:
        if segment.first_page <= page:
            found = segment.epoch
    return found
