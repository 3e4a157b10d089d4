"""Which pages leave a full arena first: those that save the least recompute for their bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from context_daemon.page_records import Entry, Page
from context_daemon.records import RequestKey

Victim = tuple[RequestKey, int, int]  # request, page, epoch


def victims(entries: Sequence[Entry], count: int) -> list[Victim]:
    """Up to `count` pages to forget, worst first.

    A page in the KV store is lost to nobody, nor is one that was copied ahead of a cut-over: it is where it came from, too.
    Of the rest, a running owner's page is needed only if its engine dies, that of a waiting request for certain. Within one
    request the last page goes first: a prefix without its end is still worth its length, one without its start nothing.
    """
    ranked: list[tuple[tuple[int, float, int], Victim]] = []
    for entry in entries:
        for number, page in entry.all():
            if page.epoch == entry.owner and page.count < entry.shape.page_size:
                continue  # its owner writes on in it
            ranked.append((_worth(entry, number, page), (entry.key, number, page.epoch)))
    ranked.sort(key=lambda item: item[0])
    return [victim for _, victim in ranked[:count]]


def _worth(entry: Entry, number: int, page: Page) -> tuple[int, float, int]:
    in_store, owned = page.stored >= page.count, entry.owner > 0
    rank = (0 if owned else 1) if in_store or page.guest else (2 if owned else 3)
    return rank, entry.touched, -number
