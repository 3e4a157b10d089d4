"""The committers: two threads that carry the ledger's contents to the node's daemon, behind the step loop.

Tokens have a thread and a connection of their own, so that they never wait behind KV. One message is under way at a time
on each; what gathers meanwhile goes together in the next (group commit).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from context_daemon.kv_writer import Announced, ArenaGone, KVWriter, Owned, SlotRange
from context_daemon.observability import get_logger
from context_daemon.records import CommitResult, TokenCommit
from context_daemon.store import StoreUnavailable
from worker.held import KVRange, Outcome
from worker.ledger import Ledger
from worker.metrics import COMMIT_LATENCY, COMMIT_STATUS, KV_BYTES, KV_FAILURES, STORE_AWAY

log = get_logger()

_RETRY_S = 0.2
_IDLE_S = 0.1
_ASK_S = 0.01  # how soon to ask again what the KV store has; up to _IDLE_S while nothing moves


class CommitTransport(Protocol):
    """What the token committer needs of the daemon's client."""

    def commit(self, commits: Sequence[TokenCommit]) -> list[CommitResult]: ...


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


@dataclass(frozen=True, slots=True)
class WrittenKV:
    """Slots that lie in the arena, unannounced."""

    item: KVRange
    slots: SlotRange


class KVCommitter(_Thread):
    """Announces what was written into the arena, and hears how far the KV store is. Bounded: what finds no room is left in
    the engine and written later."""

    def __init__(
        self, ledger: Ledger, writer: KVWriter, max_queued_slots: int, on_crash: Callable[[BaseException], None]
    ) -> None:
        super().__init__("kv-committer", on_crash)
        self._ledger = ledger
        self.writer = writer
        self._queue: queue.SimpleQueue[list[WrittenKV]] = queue.SimpleQueue()
        self._max_queued_slots = max_queued_slots
        self._queued_slots = 0
        self._count_lock = threading.Lock()
        self._unsent: list[WrittenKV] = []
        self._away = False
        self._patience_s = _ASK_S
        self.latency_s = 0.02  # exponentially averaged, one message

    def room(self) -> int:
        """Slots that may be written now."""
        return max(0, self._max_queued_slots - self._queued_slots) if self.writer.attached else 0

    def put(self, batch: list[WrittenKV]) -> None:
        """Queue written slots; the caller asked `room` before."""
        with self._count_lock:
            self._queued_slots += sum(item.item.stop - item.item.start for item in batch)
        self._queue.put(batch)

    def turn(self) -> None:
        asks = self._ledger.kv_unstored()
        self._gather(self._patience_s if asks else _IDLE_S)
        try:
            if not self.writer.attached:
                self.writer.attach()
            if self._unsent or asks:
                self._announce(asks)
        except ArenaGone as error:
            self._arena_gone(error)
        except StoreUnavailable as error:
            self._daemon_away(error)

    def _gather(self, timeout: float) -> None:
        """All that was written since the last message goes in the next."""
        try:
            self._unsent += self._queue.get(timeout=timeout)
            while True:
                self._unsent += self._queue.get_nowait()
        except queue.Empty:
            return

    def _announce(self, asks: list[Owned]) -> None:
        # What the loop wrote to a former arena before it heard of its end is due again and counts as never written.
        sent, started = [w for w in self._unsent if w.slots.arena_id == self.writer.arena_id], time.monotonic()
        answer = self.writer.announce([written.slots for written in sent], asks)
        elapsed = time.monotonic() - started
        self._sent(self._unsent)
        self._away = False
        if sent:
            self.latency_s += 0.1 * (elapsed - self.latency_s)
            COMMIT_LATENCY.labels("kv").observe(elapsed)
        self._take_in(sent, answer)

    def _take_in(self, sent: list[WrittenKV], answer: Announced) -> None:
        lost = self._ledger.kv_newly_lost({owned: progress.losses for owned, progress in answer.progress.items()})
        if lost:
            log.warning("kv_store_restarted", requests=len(lost), effect="their resident KV is written again")
            self.writer.rewrite(lost)
            self._ledger.kv_lost(lost)
        self._ledger.kv_written([w.item for w in sent if (w.item.key, w.item.epoch) not in lost])
        stored = {owned: progress.stored for owned, progress in answer.progress.items() if owned not in lost}
        moved = self._ledger.kv_stored(stored, answer.ships)
        self._ledger.kv_holes(
            {owned: (p.hole_start, p.hole_stop) for owned, p in answer.progress.items() if owned in stored}
        )
        # In a mode that ships little, asking at the pace of one that ships all would only cost.
        self._patience_s = _ASK_S if moved or sent else min(2 * self._patience_s, _IDLE_S)

    def _sent(self, sent: list[WrittenKV]) -> None:
        slots = sum(written.item.stop - written.item.start for written in sent)
        self._unsent = []
        KV_BYTES.inc(slots * self.writer.shape.slot_bytes)
        with self._count_lock:
            self._queued_slots -= slots

    def _arena_gone(self, error: ArenaGone) -> None:
        """The daemon was started anew. What it knew is gone with its arena; what is resident is written to the new one."""
        log.warning("arena_gone", error=str(error), effect="resident KV is written again")
        self._sent(self._unsent)
        self.writer.detach()
        self._ledger.kv_lost()

    def _daemon_away(self, error: StoreUnavailable) -> None:
        if not self._away:
            log.warning("kv_not_announced", error=str(error), effect="tokens go on; KV is announced when it answers")
        self._away = True
        KV_FAILURES.inc()
        self._stopping.wait(_RETRY_S)
