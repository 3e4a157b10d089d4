"""The notices of one node as its daemon knows them: one raised here is never lost to an outage of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from context_daemon.records import Notice
from context_daemon.store import ContextStore, StoreUnavailable


class NoticeBoard:
    """Notices raised here are answered to heartbeats at once and sent to the store until it has them; withdrawals likewise.
    What the store said last is answered while it is away."""

    def __init__(self, store: ContextStore, node_id: str, on_error: Callable[[str], None]) -> None:
        self._store, self._node_id, self._on_error = store, node_id, on_error
        self._stored: dict[str, Notice] = {}
        self._unsent: dict[str, Notice] = {}
        self._unsent_withdrawals: set[str] = set()
        self._lock = asyncio.Lock()  # one exchange with the store at a time keeps raise and withdraw in order

    def current(self) -> list[Notice]:
        """This node's notices, the nearest deadline first."""
        known = {**self._stored, **self._unsent}
        mine = [n for n in known.values() if n.node_id == self._node_id and n.id not in self._unsent_withdrawals]
        return sorted(mine, key=lambda notice: (notice.deadline, notice.id))

    async def raise_notice(self, notice: Notice) -> bool:
        """True if it is new as far as can be told now. Does not fail when the store is away."""
        new_here = notice.id not in self._unsent and notice.id not in self._stored
        self._unsent_withdrawals.discard(notice.id)
        self._unsent[notice.id] = notice
        return await self._send() if new_here else False

    async def withdraw(self, notice_id: str) -> None:
        self._unsent.pop(notice_id, None)
        self._unsent_withdrawals.add(notice_id)
        await self._send()

    async def refresh(self) -> None:
        """Send what is unsent, then read the store's notices."""
        await self._send()
        if self._unsent or self._unsent_withdrawals:
            return
        try:
            async with self._lock:
                self._stored = {notice.id: notice for notice in await self._store.notices()}
        except StoreUnavailable as error:
            self._on_error(str(error))

    async def run(self, interval_s: float) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(interval_s)

    async def _send(self) -> bool:
        """Whether the store took one of them as new; true as well while the store cannot be asked."""
        try:
            async with self._lock:
                return await self._send_all()
        except StoreUnavailable as error:
            self._on_error(str(error))
            return True

    async def _send_all(self) -> bool:
        new = False
        for notice_id in list(self._unsent_withdrawals):
            await self._store.withdraw_notice(notice_id)
            self._stored.pop(notice_id, None)
            self._unsent_withdrawals.discard(notice_id)
        for notice in list(self._unsent.values()):
            new = await self._store.put_notice(notice) or new
            self._stored[notice.id] = notice
            self._unsent.pop(notice.id, None)
        return new
