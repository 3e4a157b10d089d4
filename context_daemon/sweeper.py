"""Forgets what nobody will come for: requests that ended or went on elsewhere without this daemon hearing of it."""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum

from context_daemon import metrics
from context_daemon.observability import get_logger
from context_daemon.page_records import Entry
from context_daemon.page_table import PageTable
from context_daemon.records import RequestRecord, RequestState
from context_daemon.store import ContextStore, StoreUnavailable

log = get_logger()

QUIET_S = 30.0  # an entry that was not written or disowned for so long is asked for
_EVERY_S = 10.0
_AT_ONCE = 200  # questions to the store in one turn


class Fate(StrEnum):
    KEEP = "keep"
    DISOWN = "disown"  # its owner here is no more, its pages may still be wanted
    FORGET = "forget"  # it went on elsewhere, and its pages there are newer
    END = "end"


def fate(entry: Entry, record: RequestRecord | None, here: str) -> Fate:
    """What the store says of a request decides over its pages here. Pure."""
    if record is None or record.state not in (RequestState.READY, RequestState.LEASED):
        return Fate.END
    newest = max((page.epoch for _, page in entry.all()), default=0)
    if record.kv_at not in ("", here) and record.token.epoch > newest:
        return Fate.FORGET
    return Fate.DISOWN if 0 < entry.owner < record.token.epoch else Fate.KEEP


class Sweeper:
    """`run` until cancelled."""

    def __init__(self, table: PageTable, store: ContextStore, here: str) -> None:
        self._table, self._store, self._here = table, store, here

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self.sweep(time.monotonic())
            except StoreUnavailable as error:
                log.warning("not_swept", error=str(error))

    async def sweep(self, now: float) -> int:
        """One turn; returns how many requests were let go. Raises StoreUnavailable."""
        quiet = [entry for entry in self._table.entries() if now - entry.touched >= QUIET_S]
        let_go = 0
        for entry in sorted(quiet, key=lambda entry: entry.touched)[:_AT_ONCE]:
            match fate(entry, await self._store.get_request(entry.key), self._here):
                case Fate.END:
                    self._table.end(entry.key)
                    let_go += 1
                case Fate.FORGET:
                    self._table.forget(entry.key)
                    let_go += 1
                case Fate.DISOWN:
                    self._table.disown(entry.key, entry.owner)
                case Fate.KEEP:
                    entry.touched = now  # asked again when it was quiet once more
        metrics.SWEPT.inc(let_go)
        return let_go
