"""What this worker holds, and how much of it is committed: the bookkeeping between the step loop and the committers.

No I/O and no threads of its own; one lock, because the loop writes while the committers read. The rule it keeps: tokens
are sent from what the store acknowledged, KV from what the KV store acknowledged, and a watermark never claims a slot
whose write was not acknowledged.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping

from context_daemon.records import (
    CommitResult,
    CommitStatus,
    FencingToken,
    Finish,
    KVWatermark,
    RequestKey,
    ResumeReport,
    TokenCommit,
)
from worker.held import Held, KVRange, Outcome


class Ledger:
    def __init__(self, layout: str, page_size: int, max_range_slots: int = 1 << 30) -> None:
        self._layout = layout
        self._page_size = page_size
        self._max_range_slots = max_range_slots
        self._held: dict[RequestKey, Held] = {}
        self._ships = True  # in this commit mode KV goes on to the KV store
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)

    # -- what is held -----------------------------------------------------------------------------------------------
    def add(self, held: Held, stored: int) -> None:
        """Own a sequence whose first `stored` positions come back and are in the KV store under older epochs. What comes
        behind, the open page and all that was elsewhere only, is written under this epoch."""
        held.kv_len = 0  # resident only once the engine has taken it in and run it
        with self.changed:
            self._held[held.key] = held
            self._begin_at(held, stored)
            self.changed.notify_all()

    def restored(self, key: RequestKey, token: FencingToken, stored: int) -> None:
        """Fewer than expected came back: what the KV store should have had is written under this epoch, too."""
        with self.changed:
            held = self._held.get(key)
            if held is not None and held.token == token and stored // self._page_size < held.first_page:
                self._begin_at(held, stored)
                self.changed.notify_all()

    def _begin_at(self, held: Held, stored: int) -> None:
        held.first_page = stored // self._page_size
        held.kv_queued = held.kv_arena = held.kv_stored = held.first_page * self._page_size

    def get(self, key: RequestKey) -> Held | None:
        with self._lock:
            return self._held.get(key)

    def drop(self, key: RequestKey, token: FencingToken) -> None:
        """Forget what is owned under `token`; the same request owned anew stays."""
        with self.changed:
            held = self._held.get(key)
            if held is not None and held.token == token:
                del self._held[key]
            self.changed.notify_all()

    def holds(self, held: Held) -> bool:
        """Still owned, as far as this worker knows."""
        with self._lock:
            return self._held.get(held.key) is held

    def all(self) -> list[Held]:
        with self._lock:
            return list(self._held.values())

    # -- the step loop writes ---------------------------------------------------------------------------------------
    def append(self, key: RequestKey, token_id: int, finish: Finish | None = None) -> Held | None:
        """A new token. The last one brings the end with it, so that one commit carries both. None if it is not wanted."""
        with self.changed:
            held = self._held.get(key)
            if held is None or held.frozen or held.finish is not None:
                return None
            held.tokens.append(token_id)
            held.finish = finish
            self.changed.notify_all()
            return held

    def finish(self, key: RequestKey, finish: Finish) -> None:
        """End a sequence without a new token. One that was fenced meanwhile is left to its new owner."""
        with self.changed:
            held = self._held.get(key)
            if held is not None:
                held.finish = finish
            self.changed.notify_all()

    def report_resume(self, key: RequestKey, report: ResumeReport) -> None:
        with self._lock:
            if key in self._held:
                self._held[key].resume = report

    def computed(self, kv_len: dict[RequestKey, int]) -> None:
        """Record how far each sequence's KV reaches after a step (less than before, when its pages were taken back)."""
        with self._lock:
            for key, positions in kv_len.items():
                if key in self._held:
                    self._held[key].kv_len = positions

    def freeze(self, key: RequestKey) -> Held | None:
        with self._lock:
            held = self._held.get(key)
            if held is None or held.finish is not None:
                return None
            held.frozen = True
            return held

    # -- tokens -----------------------------------------------------------------------------------------------------
    def lag(self) -> int:
        """The most uncommitted tokens any sequence has: the back-pressure's measure, in steps."""
        with self._lock:
            return max((held.uncommitted for held in self._held.values()), default=0)

    def pending_commits(self) -> list[TokenCommit]:
        with self._lock:
            return self._due_commits()

    def wait_commits(self, timeout: float) -> list[TokenCommit]:
        """Like `pending_commits`, but waits up to `timeout` seconds for the first."""
        with self.changed:
            self.changed.wait_for(lambda: any(map(self._is_due, self._held.values())), timeout)
            return self._due_commits()

    def wait_flushed(self, key: RequestKey, timeout: float, stored: bool = True) -> bool:
        """Wait until all of a frozen sequence is acknowledged; unless `stored`, its KV by the node's daemon only. False if
        time ran out first, or it is not held any more."""
        with self.changed:
            self.changed.wait_for(lambda: key not in self._held or self._flushed(key, stored), timeout)
            return key in self._held and self._flushed(key, stored)

    def _flushed(self, key: RequestKey, stored: bool) -> bool:
        return self._held[key].flushed(self._ships and stored)

    def wait_settled(self, timeout: float) -> bool:
        """Wait until every token and every end is acknowledged."""
        with self.changed:
            return self.changed.wait_for(
                lambda: not any(held.uncommitted or held.finish for held in self._held.values()), timeout
            )

    def wait_below_lag(self, limit: int, timeout: float) -> bool:
        """Back-pressure: wait until no sequence is `limit` or more tokens ahead of the store."""
        with self.changed:
            return self.changed.wait_for(lambda: all(h.uncommitted < limit for h in self._held.values()), timeout)

    def _due_commits(self) -> list[TokenCommit]:
        return [self._commit_of(held) for held in self._held.values() if self._is_due(held)]

    def _is_due(self, held: Held) -> bool:
        # A prefill has no tokens to ride on: its watermark goes alone, so that a long prompt is not computed twice.
        alone = not held.tokens and self._watermark_of(held) is not None
        return held.uncommitted > 0 or held.finish is not None or alone

    def _watermark_of(self, held: Held) -> KVWatermark | None:
        positions = min(held.kv_stored, held.total - 1)
        if positions <= held.first_page * self._page_size or positions <= held.watermark_sent:
            return None
        return KVWatermark(positions=positions, first_page=held.first_page, layout=self._layout)

    def watermark(self, held: Held) -> KVWatermark | None:
        """The whole claim of a hand-over, sent before or not."""
        positions = min(held.kv_stored, held.total - 1)
        if positions <= held.first_page * self._page_size:
            return None
        return KVWatermark(positions=positions, first_page=held.first_page, layout=self._layout)

    def _commit_of(self, held: Held) -> TokenCommit:
        return TokenCommit(
            key=held.key,
            token=held.token,
            position=held.acked,
            tokens=tuple(held.tokens[held.acked :]),
            watermark=self._watermark_of(held),
            finish=held.finish,
            resume=held.resume,
        )

    def acknowledge(self, sent: Iterable[TokenCommit], results: Iterable[CommitResult]) -> Outcome:
        """Take the store's answers in. Fenced, diverged and finished sequences are not held any more."""
        outcome = Outcome()
        with self.changed:
            for commit, result in zip(sent, results, strict=True):
                held = self._held.get(commit.key)
                if held is None or held.token != commit.token:
                    continue  # dropped, or owned anew, while the commit was under way
                self._apply(held, commit, result, outcome)
            self.changed.notify_all()
        return outcome

    def _apply(self, held: Held, commit: TokenCommit, result: CommitResult, outcome: Outcome) -> None:
        if result.status is CommitStatus.OK:
            outcome.acked_tokens += len(commit.tokens)
            held.acked = commit.position + len(commit.tokens)
            held.watermark_sent = commit.watermark.positions if commit.watermark else held.watermark_sent
            held.resume = None if held.resume is commit.resume else held.resume
            if commit.finish is not None:
                outcome.finished.append(held.key)
                del self._held[held.key]
        elif result.status is CommitStatus.GAP and result.length < commit.position:
            held.acked = result.length
        elif result.status is CommitStatus.FENCED:
            outcome.fenced.append(held.key)
            outcome.dropped.append(held)
            del self._held[held.key]
        else:
            outcome.diverged.append((held.key, result.length))
            outcome.dropped.append(held)
            del self._held[held.key]

    # -- KV ---------------------------------------------------------------------------------------------------------
    def take_kv(self, max_slots: int, only: RequestKey | None = None) -> list[KVRange]:
        """What to export now (of one sequence, if named), first hole first; at most `max_slots`. Marks it queued.

        What does not fit is skipped, not lost: it stays due while it is resident. A frozen sequence has left the engine
        and is exported by name only.
        """
        ranges: list[KVRange] = []
        with self._lock:
            for held in self._held.values():
                if held.finish is not None or (held.frozen if only is None else only != held.key):
                    continue
                filling = self._fill(held, max_slots)
                ranges += filling
                max_slots -= len(filling) * self._page_size
                while max_slots > 0 and held.kv_queued < held.kv_len:
                    count = min(held.kv_len - held.kv_queued, max_slots, self._max_range_slots)
                    ranges.append(KVRange(held.key, held.token.epoch, held.kv_queued, held.kv_queued + count))
                    held.kv_queued += count
                    max_slots -= count
        return ranges

    def _fill(self, held: Held, max_slots: int) -> list[KVRange]:
        """Page by page: in a full arena some may find room where all do not."""
        start, stop = held.hole
        size, held.hole = self._page_size, (0, 0)
        stop = min(stop, start + max_slots // size * size, held.kv_len // size * size)  # fewer may be resident by now
        held.filling = held.filling or stop > start
        pages = range(start, stop, self._page_size)
        return [KVRange(held.key, held.token.epoch, page, page + self._page_size) for page in pages]

    def kv_holes(self, holes: Mapping[tuple[RequestKey, int], tuple[int, int]]) -> None:
        """What the arena lost of these before it was in the KV store. Due again while it is resident, once at a time: the
        daemon says it until it is filled. A frozen sequence has left the engine, and goes without."""
        with self.changed:
            for (key, epoch), (start, stop) in holes.items():
                held = self._held.get(key)
                if held is None or held.token.epoch != epoch or held.filling or start >= stop:
                    continue
                if held.frozen:
                    held.kv_len = min(held.kv_len, start)
                elif stop <= min(held.kv_arena, held.kv_len):
                    held.hole = start, stop
            self.changed.notify_all()

    def kv_written(self, ranges: Iterable[KVRange]) -> None:
        """The daemon knows of these slots in the arena."""
        with self.changed:
            for item in ranges:
                held = self._held.get(item.key)
                # A word that arrived after a lost one before it must not hide the hole.
                if held is not None and held.token.epoch == item.epoch and item.start <= held.kv_arena:
                    held.filling = held.filling and item.stop > held.kv_arena
                    held.kv_arena = max(held.kv_arena, item.stop)
            self.changed.notify_all()

    def kv_stored(self, stored: Mapping[tuple[RequestKey, int], int], ships: bool) -> bool:
        """How far each sequence is in the KV store, by (request, epoch). True if any is further than before."""
        moved = False
        with self.changed:
            self._ships = ships
            for (key, epoch), positions in stored.items():
                held = self._held.get(key)
                if held is not None and held.token.epoch == epoch:
                    reached = max(held.kv_stored, min(positions, held.kv_arena))
                    moved = moved or reached > held.kv_stored
                    held.kv_stored = reached
            self.changed.notify_all()
        return moved

    def kv_unstored(self) -> list[tuple[RequestKey, int]]:
        """(request, epoch) of which the arena has more than the KV store is known to have."""
        with self._lock:
            waiting = [held for held in self._held.values() if self._ships and held.kv_stored < held.kv_arena]
            return [(held.key, held.token.epoch) for held in waiting]

    def kv_refused(self, ranges: Iterable[KVRange]) -> None:
        """There was no room: due again later. A frozen sequence has left the engine, and goes without them."""
        with self.changed:
            for item in ranges:
                held = self._held.get(item.key)
                if held is None or held.token.epoch != item.epoch:
                    continue
                if item.stop <= held.kv_arena:
                    held.filling = False  # of a hole: the daemon will tell of it again
                    continue
                held.kv_queued = min(held.kv_queued, item.start)
                if held.frozen:
                    held.kv_len = min(held.kv_len, item.start)
            self.changed.notify_all()

    def kv_newly_lost(self, losses: Mapping[tuple[RequestKey, int], int]) -> set[tuple[RequestKey, int]]:
        """Those, by (request, epoch), whose KV server came back empty since this was last asked."""
        with self._lock:
            named = [(owned, self._held.get(owned[0]), count) for owned, count in losses.items()]
            lost = {owned for owned, held, count in named if held and owned == held.owned and count > held.kv_losses}
            for key, epoch in lost:
                self._held[key].kv_losses = losses[key, epoch]
            return lost

    def kv_lost(self, lost: Collection[tuple[RequestKey, int]] | None = None) -> None:
        """The KV server of these came back empty, or with None the arena did: all of theirs that is resident is due again,
        from the first page on."""
        with self.changed:
            for held in self._held.values():
                if lost is None:
                    held.kv_losses = 0  # a new daemon counts anew
                elif held.owned not in lost:
                    continue
                held.kv_queued = held.kv_arena = held.kv_stored = held.first_page = held.watermark_sent = 0
                held.hole, held.filling = (0, 0), False
                if held.frozen:
                    held.kv_len = 0  # it has left the engine: nothing of it is worth waiting for
            self.changed.notify_all()
