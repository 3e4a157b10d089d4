"""Forgets what nobody will come for: requests that ended or went on elsewhere without this daemon hearing of it, with what
they have in the KV store, and blocks granted to workers that are gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum

from context_daemon import metrics
from context_daemon.collector import is_over
from context_daemon.observability import get_logger
from context_daemon.page_drop import PageDrop
from context_daemon.page_records import Entry
from context_daemon.page_table import PageTable
from context_daemon.records import RequestRecord
from context_daemon.store import ContextStore, StoreUnavailable

log = get_logger()

QUIET_S = 30.0  # an entry that was not written or disowned for so long is asked for
_EVERY_S = 10.0
_RETRY_S = 1.0
_AT_ONCE = 200  # questions to the store in one turn


class Fate(StrEnum):
    KEEP = "keep"
    DISOWN = "disown"  # its owner here is no more, its pages may still be wanted
    FORGET = "forget"  # it went on elsewhere, and its pages there are newer
    END = "end"


def fate(entry: Entry, record: RequestRecord | None, here: str) -> Fate:
    """What the store says of a request decides over its pages here. Pure."""
    if record is None or is_over(record):
        return Fate.END
    newest = max((page.epoch for _, page in entry.all()), default=0)
    if record.kv_at not in ("", here) and record.token.epoch > newest:
        return Fate.FORGET
    return Fate.DISOWN if 0 < entry.owner < record.token.epoch else Fate.KEEP


class Sweeper:
    """`run` until cancelled."""

    def __init__(
        self, table: PageTable, store: ContextStore, here: str, drop: PageDrop, reap: Callable[[], int]
    ) -> None:
        self._table, self._store, self._here = table, store, here
        self._drop, self._reap = drop, reap
        self._doubted = asyncio.Event()

    async def run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await self._doubted.wait()
            self._reap()
            try:
                if self._doubted.is_set():
                    await self.recount()
                    self._doubted.clear()
                await self.sweep(time.monotonic())
            except StoreUnavailable as error:
                log.warning("not_swept", error=str(error))
                await asyncio.sleep(_RETRY_S)

    def doubt(self) -> None:
        """The durable store lost writes: what counts here may be more than it knows now."""
        self._doubted.set()

    async def recount(self) -> None:
        """Let KV count no further than the tokens that the store has. Raises StoreUnavailable; may be repeated."""
        self._table.doubt()
        for entry in self._table.entries():
            record = await self._store.get_request(entry.key)
            known = len(record.spec.prompt_token_ids) + len(record.tokens) if record else 0
            self._table.cut(entry.key, known)

    async def sweep(self, now: float) -> int:
        """One turn; returns how many requests were let go. Raises StoreUnavailable."""
        quiet = [entry for entry in self._table.entries() if now - entry.touched >= QUIET_S]
        let_go = 0
        for entry in sorted(quiet, key=lambda entry: entry.touched)[:_AT_ONCE]:
            let_go += await self._judge(entry, await self._store.get_request(entry.key), now)
        metrics.SWEPT.inc(let_go)
        return let_go

    async def _judge(self, entry: Entry, record: RequestRecord | None, now: float) -> bool:
        """Whether it is let go."""
        decided = fate(entry, record, self._here)
        match decided:
            case Fate.END:
                self._table.end(entry.key)
            case Fate.FORGET:
                self._table.forget(entry.key)
            case Fate.DISOWN:
                self._table.disown(entry.key, entry.owner)
            case Fate.KEEP:
                entry.touched = now  # asked again when it was quiet once more
        if decided is Fate.END:
            await self._drop.over(entry.key, entry)
        elif record is not None:
            await self._drop.unnamed(entry, record)
        return decided in (Fate.END, Fate.FORGET)
