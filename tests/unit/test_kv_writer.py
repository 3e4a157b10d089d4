"""A worker's side of the arena: threads that write and announce, answers that are lost, daemons that are replaced."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import AsyncIterator, Iterable, Sequence

import pytest
from kv_writer_rig import KEY, LAYOUT, PROMPT, SIZE, SLOT, Daemon, attached, put, raw

from context_daemon.arena import MIN_BYTES
from context_daemon.kv_slots import Absent, identity, verify
from context_daemon.kv_writer import Announced, ArenaGone, KVWriter, Owned, SlotRange
from context_daemon.page_records import Shape
from context_daemon.records import (
    Endpoint,
    FencingToken,
    RequestKey,
    RequestSpec,
    SamplingParams,
)
from context_daemon.store import StoreUnavailable
from worker.commit import KVCommitter, WrittenKV
from worker.held import Held, KVRange
from worker.ledger import Ledger


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    made = Daemon()
    yield made
    await made.close()


class Engine(threading.Thread):
    """A step loop of several sequences that start, go on and end."""

    def __init__(self, daemon: Daemon, writer: KVWriter, lines: range) -> None:
        super().__init__()
        self.daemon, self.writer, self.lines = daemon, writer, lines
        self.queue: queue.SimpleQueue[list[SlotRange] | None] = queue.SimpleQueue()
        self.lengths: dict[int, int] = {}
        self.draw = random.Random(lines.start)

    def run(self) -> None:
        waiting, running = list(self.lines), []
        while waiting or running:
            if waiting and len(running) < 6:
                running.append(waiting.pop())
            batch = []
            for line in list(running):
                self._step(line, batch)
                if self.lengths[line] > 30 or self.draw.random() < 0.03:
                    running.remove(line)
                    if line % 3 == 0:
                        self.daemon.commit(RequestKey("job", line), 1, finish=True)
                    self.writer.forget(RequestKey("job", line), 1)
            self.queue.put(batch)
        self.queue.put(None)

    def _step(self, line: int, batch: list[SlotRange]) -> None:
        start = self.lengths.setdefault(line, 0)
        stop = start + (self.draw.randint(1, 12) if start == 0 else 1)
        written = self.writer.write(RequestKey("job", line), 1, PROMPT, start, raw(line, start, stop))
        if written is not None:
            batch.append(written)
            self.lengths[line] = stop


class Announcer(threading.Thread):
    """Group commit: whatever gathered meanwhile goes together, again when its answer was lost."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while (batch := self.engine.queue.get()) is not None:
                self._announce(batch)
        except BaseException as error:
            self.error = error
            raise

    def _announce(self, batch: list[SlotRange]) -> None:
        self.engine.daemon.lose += self.engine.draw.random() < 0.1
        while True:
            try:
                self.engine.writer.announce(batch)
                return
            except StoreUnavailable:
                continue


async def test_two_workers_of_two_threads_each_leave_right_bytes_in_blocks_of_their_own() -> None:
    daemon = Daemon(4 * MIN_BYTES)
    engines = [Engine(daemon, attached(daemon, 16), range(start, start + 40)) for start in (100, 200)]
    threads = [*engines, *map(Announcer, engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [thread.error for thread in threads if isinstance(thread, Announcer)] == [None, None]
    granted = [block for attached in daemon.service._attached.values() for block in attached.granted]
    assert len(set(daemon.blocks + granted)) == len(daemon.blocks + granted)
    assert daemon.used == len(daemon.blocks + granted) * Shape("", SLOT, SIZE).block_bytes
    for engine in engines:
        assert sum(engine.lengths.values()) > 40
        for line, length in engine.lengths.items():
            key = RequestKey("job", line)
            daemon.commit(key, 100)
            pages = daemon.good(key)
            assert sum(slots for slots, _ in pages.values()) == (0 if line % 3 == 0 else length)
            assert b"".join(data for _, (_, data) in sorted(pages.items())) in (b"", raw(line, 0, length))
    await daemon.close()


def test_where_there_is_no_room_nothing_is_written_and_nothing_leaks(daemon: Daemon) -> None:
    writer = attached(daemon, spare=4)
    ranges = [put(writer, 0, 6, line=1), put(writer, 0, 8, line=2)]
    used = daemon.used
    for line in (1, 3):
        assert writer.write(RequestKey("job", line), 1, PROMPT, 8, raw(line, 8, 9)) is None
    assert put(writer, 6, 8).blocks == ranges[0].blocks[1:], "what it has is still written"
    assert daemon.used == used
    writer.announce(ranges)
    last = put(writer, 8, 9)
    for line in (1, 2, 3):
        writer.forget(RequestKey("job", line), 1)
        daemon.commit(RequestKey("job", line), 1, finish=True)
    writer.announce([last])
    assert daemon.used == 4 * writer.shape.block_bytes and daemon.blocks == []


def test_part_of_a_range_is_never_written(daemon: Daemon) -> None:
    writer = attached(daemon, spare=2)
    assert writer.write(KEY, 1, PROMPT, 0, raw(1, 0, 9)) is None
    assert len(set(put(writer, 0, 8).blocks)) == 2, "both are still free"


def test_the_word_of_a_forgotten_request_still_lands(daemon: Daemon) -> None:
    writer = attached(daemon)
    written = [put(writer, 0, 5), put(writer, 5, 7)]
    writer.forget(KEY, 1)
    writer.announce(written)
    daemon.commit(KEY, 5)
    assert daemon.good(KEY) == {0: (4, raw(1, 0, 4)), 1: (3, raw(1, 4, 7))}


def test_what_a_late_writer_changed_never_counts(daemon: Daemon) -> None:
    """A worker that was frozen, and lost its request and its blocks meanwhile, finishes its write: before the word, too."""
    writer = attached(daemon)
    written = put(writer, 0, 4)
    block = written.blocks[0]
    writer.read(block, 4)[3] ^= 1
    writer.announce([written])
    page = bytes(daemon.service.arena.view[block : block + 4 * (SLOT + 16)])
    checked = verify(memoryview(page), identity(KEY, 1, LAYOUT.fingerprint), 0, SLOT, SIZE)
    assert (checked.slots, checked.reason) == (0, Absent.MISMATCH)


def test_a_request_owned_again_is_written_to_other_blocks(daemon: Daemon) -> None:
    writer = attached(daemon)
    first = put(writer, 0, 4)
    writer.forget(KEY, 1)
    again = put(writer, 0, 4)
    assert not set(first.blocks) & set(again.blocks)
    writer.announce([first])
    writer.announce([again])
    assert daemon.blocks == list(again.blocks)


def test_rewriting_leaves_the_old_blocks_as_they_are(daemon: Daemon) -> None:
    writer = attached(daemon)
    first, other = put(writer, 0, 3), put(writer, 0, 3, line=2)
    writer.announce([first, other])
    writer.rewrite([(KEY, 1)])
    assert not set(put(writer, 0, 4).blocks) & set(first.blocks)
    assert put(writer, 3, 4, line=2).blocks == other.blocks


def test_a_full_page_is_never_written_again_where_it_lies(daemon: Daemon) -> None:
    """It may have been evicted, and its block be another's."""
    writer = attached(daemon)
    first = put(writer, 2, 10)
    again = put(writer, 0, 10)
    assert set(first.blocks) & set(again.blocks) == {first.blocks[-1]}
    writer.announce([first])
    writer.announce([again])
    daemon.commit(KEY, 5)
    assert {number: data for number, (_, data) in daemon.good(KEY).items()}[1] == raw(1, 4, 8)


def test_after_lost_answers_the_same_blocks_are_there(daemon: Daemon) -> None:
    writer = attached(daemon, spare=4)
    for line in range(1, 30):
        written = [put(writer, 0, 8, line)]
        daemon.lose = 2
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                writer.announce(written)
        writer.announce(written)
        daemon.commit(RequestKey("job", line), 1, finish=line % 2 == 0)
    assert daemon.used == (4 + 2 * 15) * writer.shape.block_bytes


def test_a_lost_answer_to_attach_costs_nothing(daemon: Daemon) -> None:
    writer = KVWriter(daemon, LAYOUT, 4)
    daemon.lose = 5
    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            writer.attach()
    writer.attach()
    assert daemon.used == 4 * writer.shape.block_bytes


def test_a_replaced_daemon_is_written_to_only_after_attaching(daemon: Daemon) -> None:
    writer = attached(daemon)
    old = put(writer, 0, 6)
    daemon.restart()
    with pytest.raises(ArenaGone, match="attach again"):
        writer.announce([old])
    writer.detach()
    assert writer.write(KEY, 1, PROMPT, 6, raw(1, 6, 7)) is None
    assert bytes(writer.read(old.blocks[0], 1)[:SLOT]) == raw(1, 0, 1), "its pages can still be read"
    writer.attach()
    writer.announce([put(writer, 0, 7)])
    daemon.commit(KEY, 5)
    assert daemon.good(KEY) == {0: (4, raw(1, 0, 4)), 1: (3, raw(1, 4, 7))}


def test_what_was_queued_for_a_replaced_daemon_is_written_again(daemon: Daemon) -> None:
    """Also what the loop wrote between the last message and its answer."""
    ledger = Ledger("layout", SIZE)
    spec = RequestSpec(1, "c", Endpoint.CHAT, tuple(range(PROMPT)), SamplingParams(seed=1, max_tokens=9))
    ledger.add(Held(KEY, FencingToken(1, 1), spec, [], acked=0), stored=0)
    committer = KVCommitter(ledger, KVWriter(daemon, LAYOUT, 8), 1000, on_crash=pytest.fail)
    committer.turn()

    def step(positions: int) -> None:
        ledger.computed({KEY: positions})
        due = ledger.take_kv(committer.room())
        committer.put([WrittenKV(item, put(committer.writer, item.start, item.stop)) for item in due])

    step(5)
    committer.turn()
    assert daemon.good(KEY).keys() == {0, 1}
    daemon.restart()
    step(6)
    whole = committer.writer.announce

    def slow(ranges: Sequence[SlotRange], asks: Iterable[Owned] = ()) -> Announced:
        step(7)
        return whole(ranges, asks)

    committer.writer.announce = slow  # type: ignore[method-assign]
    committer.turn()
    committer.writer.announce = whole  # type: ignore[method-assign]
    assert not committer.writer.attached and ledger.take_kv(1000) == [KVRange(KEY, 1, 0, 7)]
    committer.turn()
    assert daemon.blocks == [] and committer.room() == 1000
    ledger.kv_refused([KVRange(KEY, 1, 0, 7)])
    step(7)
    committer.turn()
    daemon.commit(KEY, 5)
    assert daemon.good(KEY) == {0: (4, raw(1, 0, 4)), 1: (3, raw(1, 4, 7))}
