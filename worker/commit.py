"""The committers: two threads that carry the ledger's contents to the node's daemon, behind the step loop.

Tokens have a thread and a connection of their own, so that they never wait behind KV. One message is under way at a time
on each; what gathers meanwhile goes together in the next (group commit).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from context_daemon.kv_slots import frame
from context_daemon.observability import get_logger
from context_daemon.records import CommitResult, KVLayout, TokenCommit
from context_daemon.store import SlotWrite, StoreUnavailable
from worker.ledger import KVRange, Ledger, Outcome
from worker.metrics import COMMIT_LATENCY, COMMIT_STATUS, KV_BYTES, KV_FAILURES, STORE_AWAY

log = get_logger()

_RETRY_S = 0.2


class CommitTransport(Protocol):
    """What the committers need of the daemon's client."""

    def commit(self, commits: Sequence[TokenCommit]) -> list[CommitResult]: ...

    def write_slots(self, writes: Sequence[SlotWrite]) -> str: ...


class _Thread:
    """A named daemon thread that runs `turn` until stopped; an escaping exception is handed to `on_crash`."""

    def __init__(self, name: str, on_crash: Callable[[BaseException], None]) -> None:
        self._stopping = threading.Event()
        self._on_crash = on_crash
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.turn()
            except Exception as error:  # noqa: BLE001 - a dead committer must take its process down, not hide
                self._on_crash(error)
                return

    def turn(self) -> None:
        raise TypeError(f"{type(self).__name__} must define turn()")


class TokenCommitter(_Thread):
    """Sends what is due, takes the answers in, and tells the loop what to drop."""

    def __init__(
        self,
        ledger: Ledger,
        transport: CommitTransport,
        on_outcome: Callable[[Outcome], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        super().__init__("token-committer", on_crash)
        self._ledger = ledger
        self._transport = transport
        self._on_outcome = on_outcome
        self._away = False
        self.latency_s = 0.01  # exponentially averaged

    def turn(self) -> None:
        commits = self._ledger.wait_commits(timeout=0.1)
        if not commits:
            return
        started = time.monotonic()
        try:
            results = self._transport.commit(commits)
        except StoreUnavailable as error:
            self._store_away(error)
            return
        self._store_back()
        elapsed = time.monotonic() - started
        self.latency_s += 0.1 * (elapsed - self.latency_s)
        COMMIT_LATENCY.labels("tokens").observe(elapsed)
        for result in results:
            COMMIT_STATUS.labels(result.status.value).inc()
        self._on_outcome(self._ledger.acknowledge(commits, results))

    def _store_away(self, error: StoreUnavailable) -> None:
        if not self._away:
            log.warning(
                "durable_store_away", error=str(error), effect="tokens gather here and are sent when it is back"
            )
        self._away = True
        STORE_AWAY.set(1)
        self._stopping.wait(_RETRY_S)

    def _store_back(self) -> None:
        if self._away:
            log.info("durable_store_back")
        self._away = False
        STORE_AWAY.set(0)


class KVCommitter(_Thread):
    """Writes exported slots to the KV store. Bounded: what finds no room is left in the engine and exported later."""

    def __init__(
        self,
        ledger: Ledger,
        transport: CommitTransport,
        layout: KVLayout,
        max_queued_slots: int,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        super().__init__("kv-committer", on_crash)
        self._ledger = ledger
        self._transport = transport
        self._layout = layout
        self._queue: queue.SimpleQueue[list[tuple[KVRange, bytearray]]] = queue.SimpleQueue()
        self._max_queued_slots = max_queued_slots
        self._queued_slots = 0
        self._count_lock = threading.Lock()
        self._generation = ""
        self._paused_until = 0.0
        self.latency_s = 0.02  # exponentially averaged, one message

    def room(self) -> int:
        """Slots that may be queued now; none while the KV store is away."""
        if time.monotonic() < self._paused_until:
            return 0
        return max(0, self._max_queued_slots - self._queued_slots)

    def put(self, batch: list[tuple[KVRange, bytearray]]) -> None:
        """Queue exported slots; the caller asked `room` before."""
        with self._count_lock:
            self._queued_slots += sum(item.stop - item.start for item, _ in batch)
        self._queue.put(batch)

    def turn(self) -> None:
        try:
            batch = self._queue.get(timeout=0.1)
        except queue.Empty:
            return
        try:
            self._write(batch)
        except StoreUnavailable as error:
            log.warning("kv_store_away", error=str(error), effect="tokens go on; KV is exported again later")
            KV_FAILURES.inc(len(batch))
            self._paused_until = time.monotonic() + 1.0
            self._write_again(batch)
        finally:
            with self._count_lock:
                self._queued_slots -= sum(item.stop - item.start for item, _ in batch)

    def _write(self, batch: list[tuple[KVRange, bytearray]]) -> None:
        started = time.monotonic()
        generation = self._transport.write_slots([self._slot_write(item, raw) for item, raw in batch])
        elapsed = time.monotonic() - started
        self.latency_s += 0.1 * (elapsed - self.latency_s)
        COMMIT_LATENCY.labels("kv").observe(elapsed)
        KV_BYTES.inc(sum(len(raw) for _, raw in batch))
        if self._generation and generation != self._generation:
            log.warning("kv_store_restarted", effect="resident KV is written again")
            self._ledger.kv_lost()
        else:
            self._ledger.kv_written([item for item, _ in batch])
        self._generation = generation

    def _write_again(self, batch: list[tuple[KVRange, bytearray]]) -> None:
        """Running sequences are exported again; of those being handed over the bytes here are the only ones."""
        once_more = self._ledger.kv_failed([item for item, _ in batch])
        kept = [(item, raw) for item, raw in batch if item in once_more]
        if kept:
            self.put(kept)
            self._stopping.wait(_RETRY_S)

    def _slot_write(self, item: KVRange, raw: bytearray) -> SlotWrite:
        layout, slot_bytes = self._layout.fingerprint, self._layout.slot_bytes
        return SlotWrite(
            key=item.key,
            epoch=item.epoch,
            layout=layout,
            start=item.start,
            count=item.stop - item.start,
            slot_bytes=slot_bytes,
            page_size=self._layout.page_size,
            data=frame(item.key, item.epoch, layout, item.start, memoryview(raw), slot_bytes),
        )
