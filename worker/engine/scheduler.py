"""Who computes what in the next iteration. Pure Python on integers; torch never comes near it.

Rules, in this order: running sequences decode first, oldest first; then running prefills go on in chunks; then
waiting sequences are admitted in order of arrival while the token budget, `max_num_seqs` and the free pages allow.
Pages are taken as positions need them. When none is free, the youngest running sequence gives all of its pages back
and waits at its place in the order of arrival; so the oldest always gets through and nothing starves.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from worker.engine.pages import PageAllocator, pages_for
from worker.engine.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class Chunk:
    """Feed tokens `[start, start + length)` of a sequence; `samples` when the last one's logits give a new token."""

    sequence: Sequence
    start: int
    length: int

    @property
    def samples(self) -> bool:
        return self.start + self.length == len(self.sequence.token_ids)


@dataclass(slots=True)
class Schedule:
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    new_pages: list[int] = field(default_factory=list)  # to be cleared; not those that an import fills


class Scheduler:
    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, page_size: int, num_pages: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.waiting: list[Sequence] = []  # by arrival
        self.running: list[Sequence] = []  # by arrival
        self.finished: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_arrival)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Schedule:
        plan = Schedule()
        budget = self._run(plan, self.max_num_batched_tokens, decode=True)
        budget = self._run(plan, budget, decode=False)
        if not plan.preempted:
            self._admit(plan, budget)
        return plan

    def finish(self, sequence: Sequence) -> None:
        """Take a running sequence off the schedule; its pages stay until `remove`."""
        self.running.remove(sequence)
        sequence.state = SequenceState.FINISHED
        self.finished.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._queue_of(sequence).remove(sequence)
        self.allocator.free(sequence.release())

    def check(self) -> None:
        """Integrity: every page has one owner or is free. Raises PageAccountingError."""
        owners = self.waiting + self.running + self.finished
        self.allocator.check([page for sequence in owners for page in sequence.pages])

    def _queue_of(self, sequence: Sequence) -> list[Sequence]:
        queues = {
            SequenceState.WAITING: self.waiting,
            SequenceState.RUNNING: self.running,
            SequenceState.FINISHED: self.finished,
        }
        return queues[sequence.state]

    def _run(self, plan: Schedule, budget: int, *, decode: bool) -> int:
        for sequence in list(self.running):
            if sequence.state is not SequenceState.RUNNING or (sequence.pending == 1) is not decode:
                continue
            length = min(sequence.computable, budget)
            if length and self._make_room(plan, sequence, sequence.kv_len + length):
                plan.chunks.append(Chunk(sequence, sequence.kv_len, length))
                budget -= length
        return budget

    def _make_room(self, plan: Schedule, sequence: Sequence, positions: int) -> bool:
        """Pages for `positions`, at the cost of younger sequences. False: it was preempted itself, or must wait."""
        while not self._grow(plan, sequence, positions):
            youngest = self.running[-1]
            if youngest is sequence and len(self.running) == 1:
                return False  # finished sequences hold the rest: it waits, with its pages, until they are let go
            self._preempt(plan, youngest)
            if youngest is sequence:
                return False
        return True

    def _grow(self, plan: Schedule, sequence: Sequence, positions: int) -> bool:
        missing = pages_for(positions, self.page_size) - len(sequence.pages)
        if missing <= 0:
            return True
        pages = self.allocator.allocate(missing)
        if pages is None:
            return False
        first = len(sequence.pages)
        sequence.pages += pages
        filled = sequence.filled_pages(self.page_size)
        plan.new_pages += [page for number, page in enumerate(pages, first) if number not in filled]
        return True

    def _preempt(self, plan: Schedule, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.allocator.free(sequence.release())
        self.add(sequence)
        plan.preempted.append(sequence)
        plan.chunks = [chunk for chunk in plan.chunks if chunk.sequence is not sequence]

    def _admit(self, plan: Schedule, budget: int) -> None:
        """In order of arrival, never past one that does not fit: room for all its known tokens, or it would be
        preempted again at once."""
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if pages_for(len(sequence.token_ids), self.page_size) > self.allocator.free_count - self._promised():
                return
            self.waiting.pop(0)
            sequence.state = SequenceState.RUNNING
            insort(self.running, sequence, key=_arrival)
            length = min(sequence.computable, budget)
            self._grow(plan, sequence, max(sequence.room, sequence.kv_len + length))
            if length:  # none as long as all of it is to be imported
                plan.chunks.append(Chunk(sequence, sequence.kv_len, length))
                budget -= length

    def _promised(self) -> int:
        """Pages that running prefills will still take for tokens they already know."""
        return sum(max(0, pages_for(len(s.token_ids), self.page_size) - len(s.pages)) for s in self.running)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
