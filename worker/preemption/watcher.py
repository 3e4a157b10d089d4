"""The watcher's two loops: ask the cloud, tell the daemon. Neither ends because the other side is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from context_daemon.observability import Counter, Gauge, get_logger
from context_daemon.records import Notice
from context_daemon.store import StoreUnavailable
from worker.preemption.notice import Delivery, NoticeTracker
from worker.preemption.source import NoticeSource, SourceUnavailable

log = get_logger()

POLLS = Counter("tideover_watcher_polls", "Polls of the cloud's metadata service", ["outcome"])
NOTICES = Counter("tideover_watcher_notices", "Notices seen, by kind; withdrawals apart", ["kind", "change"])
OUTAGE = Gauge(
    "tideover_watcher_source_outage_seconds", "How long the metadata service has not answered; 0 when it does"
)
DELIVERIES = Counter("tideover_watcher_deliveries", "Notices told to the daemon", ["outcome"])


class NoticeSink(Protocol):
    """What the watcher needs of the daemon's client; both raise StoreUnavailable when it is away."""

    def raise_notice(self, notice: Notice) -> bool: ...
    def withdraw_notice(self, notice_id: str) -> None: ...


class Watcher:
    """`clock` is monotonic, in seconds. During an outage the pause between polls doubles up to `outage_poll_s`."""

    def __init__(
        self,
        source: NoticeSource,
        sink: NoticeSink,
        poll_interval_s: float = 1.0,
        outage_poll_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._sink, self._clock = source, sink, clock
        self._poll_interval_s = poll_interval_s
        self._outage_poll_s = max(outage_poll_s, poll_interval_s)
        self._tracker = NoticeTracker()
        self._news = asyncio.Event()
        self._outage_since: float | None = None

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._poll_forever())
                group.create_task(self._deliver_forever())
        finally:
            await self._source.close()

    async def _poll_forever(self) -> None:
        pause = self._poll_interval_s
        while True:
            answered = await self._poll_once()
            pause = self._poll_interval_s if answered else min(2 * pause, self._outage_poll_s)
            await asyncio.sleep(pause)

    async def _poll_once(self) -> bool:
        try:
            announced = await self._source.poll()
        except SourceUnavailable as error:
            self._outage(str(error))
            return False
        POLLS.labels("ok").inc()
        if self._outage_since is not None:
            log.info("source_back", outage_s=round(self._clock() - self._outage_since, 2))
            self._outage_since = None
        OUTAGE.set(0)
        for change in self._tracker.observe(announced):
            self._announce(change)
        return True

    def _outage(self, reason: str) -> None:
        POLLS.labels("unavailable").inc()
        now = self._clock()
        if self._outage_since is None:
            self._outage_since = now
            log.warning("source_away", reason=reason)
        OUTAGE.set(now - self._outage_since)

    def _announce(self, change: Delivery) -> None:
        notice, what = change.notice, "raised" if change.stands else "withdrawn"
        NOTICES.labels(notice.kind.value, what).inc()
        log.info(f"notice_{what}", id=notice.id, kind=notice.kind.value, deadline=notice.deadline, source=notice.source)
        self._news.set()

    async def _deliver_forever(self) -> None:
        while True:
            self._news.clear()
            delivered = True
            for delivery in self._tracker.due(self._clock()):
                delivered = await self._deliver(delivery) and delivered
            await self._wait(1.0 if delivered else 0.2)

    async def _wait(self, at_most_s: float) -> None:
        try:
            async with asyncio.timeout(at_most_s):
                await self._news.wait()
        except TimeoutError:
            return

    async def _deliver(self, delivery: Delivery) -> bool:
        notice = delivery.notice
        try:
            if delivery.stands:
                await asyncio.to_thread(self._sink.raise_notice, notice)
            else:
                await asyncio.to_thread(self._sink.withdraw_notice, notice.id)
        except StoreUnavailable as error:
            DELIVERIES.labels("unavailable").inc()
            log.warning("daemon_away", id=notice.id, reason=str(error))
            return False
        DELIVERIES.labels("ok").inc()
        self._tracker.delivered(delivery, self._clock())
        return True
