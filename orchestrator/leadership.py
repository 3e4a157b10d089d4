"""The leader lease: one orchestrator decides at a time; a standby waits for it. The term fences the one that lost it."""

from __future__ import annotations

import asyncio

from context_daemon.observability import get_logger
from context_daemon.store import ContextStore, StaleLeader, StoreUnavailable

log = get_logger()


class Leadership:
    def __init__(self, store: ContextStore, holder: str, ttl_s: float = 3.0) -> None:
        self._store = store
        self._holder = holder
        self._ttl_s = ttl_s
        self._term = 0

    @property
    def holder(self) -> str:
        return self._holder

    @property
    def term(self) -> int:
        return self._term

    async def acquire(self) -> int:
        """Wait until this process leads."""
        said = False
        while True:
            try:
                term = await self._store.acquire_leadership(self._holder, self._ttl_s)
            except StoreUnavailable as error:
                log.warning("leadership_waits", error=str(error))
                term = None
            if term is not None:
                self._term = term
                return term
            if not said:
                log.info("standing_by", reason="another orchestrator leads")
                said = True
            await asyncio.sleep(self._ttl_s / 6)

    async def keep(self) -> None:
        """Renew until the lease is lost, then raise StaleLeader. A store that is away does not end a term: whoever leads
        when it is back holds the higher term, and the scripts refuse the lower."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                term = await self._store.acquire_leadership(self._holder, self._ttl_s)
            except StoreUnavailable as error:
                log.warning("leadership_not_renewed", error=str(error))
                continue
            if term is None:
                raise StaleLeader(f"{self._holder} lost the leader lease of term {self._term} to another orchestrator")
            self._term = term
