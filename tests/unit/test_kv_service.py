"""The daemon's side of the arena: what it grants, takes in, evicts and takes back, whatever word comes late or twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from flaky_kv import FlakyKV
from hypothesis import given, settings
from hypothesis import strategies as st

from context_daemon.arena import MIN_BYTES
from context_daemon.commit_mode import KVCommit, ShipBudget
from context_daemon.kv_service import KVService
from context_daemon.kv_writer import Announced, Attachment, SlotRange
from context_daemon.page_records import Shape
from context_daemon.records import CommitResult, CommitStatus, FencingToken, Finish, RequestKey, TokenCommit

SIZE, PROMPT = 4, 6
SHAPE = Shape("lay", 4080, SIZE)  # 16 KiB a page: 64 in the arena, 16 of them to one worker
OTHER = Shape("other", 8176, SIZE)
KEYS = [RequestKey("job", line) for line in range(5)]


def made() -> KVService:
    budget = ShipBudget(KVCommit.ARENA)
    return KVService(FlakyKV(), here="", arena_bytes=MIN_BYTES, budget=budget, noticed=lambda: False)  # type: ignore[arg-type]


@pytest.fixture
async def service() -> AsyncIterator[KVService]:
    one = made()
    yield one
    await one.close()


class Worker:
    """Says over the wire what a KVWriter says; an answer may be lost on the way."""

    def __init__(self, service: KVService, shape: Shape = SHAPE, want: int = 8, name: str = "") -> None:
        self.service, self.shape, self.want, self.name = service, shape, want, name
        self.attach()

    def attach(self, pid: int | None = None) -> Attachment:
        at = self.service.attach(self.shape, pid or os.getpid(), self.want, self.name)
        self.number, self.free, self.grant = at.number, list(at.granted), 0
        return at

    def range(self, line: int, start: int, stop: int, blocks: list[int] | None = None, epoch: int = 1) -> SlotRange:
        pages = -(-stop // SIZE) - start // SIZE
        if blocks is None:
            blocks, self.free = self.free[:pages], self.free[pages:]
        return SlotRange(RequestKey("job", line), epoch, PROMPT, start, stop, tuple(blocks), grant=self.grant)

    def say(self, *ranges: SlotRange, lost: bool = False) -> Announced:
        arena_id, want = self.service.arena.arena_id, self.want - len(self.free)
        answer = self.service.announce(arena_id, self.number, ranges, (), want, self.grant)
        if not lost and answer.grant > self.grant:
            self.free += answer.granted
            self.grant = answer.grant
        return answer


def end(service: KVService, line: int) -> None:
    commit = TokenCommit(RequestKey("job", line), FencingToken(1, 1), 0, (1,), finish=Finish(True, b""))
    service.committed(commit, CommitResult(commit.key, CommitStatus.OK, 1))


def blocks_of(service: KVService) -> list[int]:
    return [page.block for entry in service.table.entries() for _, page in entry.all()]


def balanced(service: KVService) -> bool:
    """Every taken block is one page's or granted to one worker."""
    granted = [block for attached in service._attached.values() for block in attached.granted]
    mine = granted + blocks_of(service)
    return len(set(mine)) == len(mine) and service._slabs.used_bytes == sum(
        [attached.shape.block_bytes * len(attached.granted) for attached in service._attached.values()]
        + [entry.shape.block_bytes for entry in service.table.entries() for _ in entry.all()]
    )


def test_a_word_of_a_request_that_ended_meanwhile_is_no_error(service: KVService) -> None:
    worker = Worker(service)
    first = worker.range(1, 0, 2)
    worker.say(first)
    end(service, 1)
    late = [worker.range(1, 2, 4, list(first.blocks)), worker.range(1, 4, 6)]
    worker.say(*late)
    assert blocks_of(service) == [] and balanced(service)


def test_a_word_of_a_page_that_was_evicted_meanwhile_is_no_error(service: KVService) -> None:
    worker = Worker(service)
    said = worker.range(1, 0, 6)
    worker.say(said, lost=True)
    assert service.table.evict(KEYS[1], 0, 1)
    worker.say(said)
    service.table.disown(KEYS[1], 1)
    assert service.table.evict(KEYS[1], 1, 1)
    worker.say(worker.range(1, 6, 7, [said.blocks[1]]))
    assert blocks_of(service) == [] and balanced(service)


def test_an_old_word_never_takes_a_block_that_was_granted_again(service: KVService) -> None:
    worker = Worker(service, want=64)
    said = worker.range(1, 0, 4 * len(worker.free))
    worker.say(said, lost=True)
    service.table.forget(KEYS[1])
    worker.say()
    while not set(worker.free) & set(said.blocks):
        worker.say(worker.range(2, 0, 4 * len(worker.free)))
        service.table.forget(KEYS[2])
    worker.say(said)
    assert blocks_of(service) == [] and balanced(service)


def test_answers_that_are_lost_cost_no_room(service: KVService) -> None:
    worker = Worker(service)
    used = service._slabs.used_bytes
    for turn in range(50):
        worker.say(worker.range(turn, 0, 1), lost=True)
        worker.say()
        assert len(worker.free) == 8
        end(service, turn)
    assert service._slabs.used_bytes == used and balanced(service)


def test_an_attachment_whose_answer_was_lost_is_taken_back(service: KVService) -> None:
    worker = Worker(service, name="w")
    used = service._slabs.used_bytes
    for _ in range(20):
        worker.attach()
    Worker(service, name="another")
    Worker(service), Worker(service)  # nameless ones are no one's successors
    assert service._slabs.used_bytes == 4 * used and balanced(service)


@pytest.mark.parametrize("waited_for", [True, False])
def test_what_was_granted_to_a_dead_process_is_taken_back_even_from_a_zombie(
    service: KVService, waited_for: bool
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    worker = Worker(service)
    used = service._slabs.used_bytes
    worker.attach(process.pid)
    worker.say(worker.range(1, 0, 4))
    process.kill()
    if waited_for:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    Worker(service)
    process.communicate()
    assert service._slabs.used_bytes == 2 * used + SHAPE.block_bytes, "announced pages stay"
    assert [entry.owner for entry in service.table.entries()] == [0], "and wait for whoever comes next"
    assert balanced(service)


def test_what_was_never_granted_is_refused_and_so_is_a_block_named_twice(service: KVService) -> None:
    worker, stranger = Worker(service), Worker(service)
    for blocks in ([stranger.free[0]], [7], [-1]):
        with pytest.raises(ValueError, match="was not granted"):
            worker.say(worker.range(1, 0, 4, blocks))
    for start, stop, blocks in (
        (0, 8, worker.free[:1] * 2),
        (0, 9, worker.free[:2]),
        (4, 4, []),
        (-4, 4, worker.free[:2]),
    ):
        with pytest.raises(ValueError, match="pages"):
            worker.say(SlotRange(KEYS[1], 1, PROMPT, start, stop, tuple(blocks)))
    assert balanced(service)


def test_a_full_arena_makes_room_by_worth(service: KVService) -> None:
    worker = Worker(service)
    for line in range(100):
        worker.say(worker.range(line, 0, 4))
        if line < 20:
            service.table.disown(RequestKey("job", line), 1)
        assert len(worker.free) == 8
    kept = sorted(entry.key.line for entry in service.table.entries() if entry.pages)
    assert kept == [*range(20), *range(64, 100)], "those that wait for an owner, then the latest"
    assert balanced(service)


def test_open_pages_of_running_owners_leave_no_room_and_no_error(service: KVService) -> None:
    worker = Worker(service)
    for line in range(64):
        worker.say(worker.range(line, 0, 3))
    assert worker.free == [] and len(blocks_of(service)) == 64 and worker.say().granted == ()
    end(service, 5)
    assert len(worker.say().granted) == 1 and balanced(service)


def test_pages_of_another_size_do_not_go_for_nothing(service: KVService) -> None:
    worker, other = Worker(service), Worker(service, OTHER)
    for line in range(10):
        other.say(other.range(1000 + line, 0, 4))
    for line in range(200):
        worker.say(worker.range(line, 0, 4))
    assert sum(len(entry.pages) for entry in service.table.entries() if entry.shape == OTHER) == 10
    assert balanced(service)


def test_a_new_layout_finds_room_among_pages_of_an_old_one(service: KVService) -> None:
    old = Worker(service)
    for line in range(200):
        old.say(old.range(line, 0, 4))
    new = Worker(service, OTHER)
    for _ in range(64):
        new.say()
    assert len(new.free) == 8 and balanced(service)


says = st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(1, 6), st.booleans())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(says, st.integers(0, 3)), max_size=60), st.randoms(use_true_random=False))
async def test_the_books_balance_after_any_words(words: list[tuple[int, int, int, bool] | int], draw: object) -> None:
    """Ranges that are said once, twice, late and again, among ends, evictions and hand-overs."""
    service = made()
    worker = Worker(service, want=16)
    said: list[SlotRange] = []
    for word in words:
        if isinstance(word, tuple):
            line, start, count, lost = word
            if len(worker.free) < count // SIZE + 2:
                continue
            item = worker.range(line, start, start + count)
            said.append(item)
            worker.say(item, lost=lost)
        elif word == 0 and said:
            worker.say(draw.choice(said))  # type: ignore[attr-defined]
        elif word == 1:
            service.table.disown(KEYS[2], 1)
        elif word == 2:
            service.table.forget(KEYS[1])
        else:
            end(service, 3)
        assert balanced(service)
    for line in range(5):
        end(service, line)
    worker.attach(pid=os.getpid())
    assert blocks_of(service) == [] and balanced(service)
    await service.close()
