"""The scheduler and the page allocator, without torch: what they promise under any sequence of events."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from context_daemon.records import RequestKey, SamplingParams
from worker.engine.pages import PageAccountingError, PageAllocator, pages_for
from worker.engine.protocol import EngineRequest, ResumeState
from worker.engine.scheduler import Schedule, Scheduler
from worker.engine.sequence import Sequence, SequenceState, new_sequence

PAGE = 4


def sequence(arrival: int, prompt: int, max_tokens: int, resume: ResumeState | None = None) -> Sequence:
    params = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0)
    request = EngineRequest(RequestKey("job", arrival), tuple(range(prompt)), params)
    return new_sequence(request, resume, arrival, eos=(), max_model_len=1000)


def execute(scheduler: Scheduler, plan: Schedule) -> list[Sequence]:
    """What the engine does with a plan; returns those that finished."""
    finished = []
    for chunk in plan.chunks:
        samples = chunk.samples
        chunk.sequence.advance(chunk.length)
        if samples and chunk.sequence.append(7) is not None:
            scheduler.finish(chunk.sequence)
            finished.append(chunk.sequence)
    return finished


def test_scheduler_knows_nothing_of_torch() -> None:
    code = "import sys, worker.engine.scheduler, worker.engine.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_allocator_books_always_balance(events: list[tuple[bool, int]]) -> None:
    allocator = PageAllocator(20)
    held: list[list[int]] = []
    for take, count in events:
        if take:
            before = allocator.free_count
            pages = allocator.allocate(count)
            assert (pages is None) == (count > before)
            if pages is not None:
                held.append(pages)
        elif held:
            allocator.free(held.pop(count % len(held)))
        allocator.check([page for pages in held for page in pages])
        assert allocator.free_count + allocator.used_count == 20


def test_allocator_refuses_what_would_unbalance_it() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    assert pages is not None
    allocator.free(pages)
    with pytest.raises(PageAccountingError, match="not in use"):
        allocator.free(pages)
    allocator.allocate(1)
    with pytest.raises(PageAccountingError, match="own 0 pages"):
        allocator.check([])


requests = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 6)), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(requests, st.integers(13, 30), st.integers(1, 6), st.integers(6, 40))
def test_every_sequence_finishes_and_no_limit_is_broken(
    lines: list[tuple[int, int, int]], num_pages: int, max_num_seqs: int, budget: int
) -> None:
    scheduler = Scheduler(max_num_seqs, budget, PAGE, num_pages)
    todo = [(sequence(i, prompt, tokens), delay) for i, (prompt, tokens, delay) in enumerate(lines)]
    everyone = [s for s, _ in todo]
    for step in range(2000):
        for s, delay in todo:
            if delay == step:
                scheduler.add(s)
        todo = [(s, delay) for s, delay in todo if delay > step]
        if not todo and not scheduler.has_work():
            break
        plan = scheduler.schedule()
        check_plan(scheduler, plan, budget, max_num_seqs)
        assert plan.chunks or not scheduler.has_work()
        for done in execute(scheduler, plan):
            scheduler.remove(done)
        scheduler.check()
    assert scheduler.allocator.used_count == 0
    assert all(s.generated_len == s.params.max_tokens for s in everyone)


def check_plan(scheduler: Scheduler, plan: Schedule, budget: int, max_num_seqs: int) -> None:
    assert sum(chunk.length for chunk in plan.chunks) <= budget
    assert len(scheduler.running) <= max_num_seqs
    assert len({id(chunk.sequence) for chunk in plan.chunks}) == len(plan.chunks)
    for chunk in plan.chunks:
        assert chunk.sequence.state is SequenceState.RUNNING
        assert chunk.start == chunk.sequence.kv_len
        assert pages_for(chunk.start + chunk.length, PAGE) <= len(chunk.sequence.pages)
    decoding = [s for s in scheduler.running if s.pending == 1]
    fed = {id(chunk.sequence) for chunk in plan.chunks}
    if not plan.preempted:
        assert all(id(s) in fed for s in decoding)  # decode first: a prefill never delays a running sequence


def test_the_youngest_is_preempted_and_its_tokens_stand() -> None:
    scheduler = Scheduler(4, 100, PAGE, num_pages=6)
    old, young = sequence(0, 8, 12), sequence(1, 8, 12)
    scheduler.add(old)
    scheduler.add(young)
    preempted: list[Sequence] = []
    while not preempted:
        plan = scheduler.schedule()
        preempted = plan.preempted
        execute(scheduler, plan)
    assert preempted == [young]
    assert (young.state, young.kv_len, young.pages) == (SequenceState.WAITING, 0, [])
    assert young.generated_len > 0
    scheduler.check()


def test_a_finished_sequence_keeps_its_pages_until_removed() -> None:
    scheduler = Scheduler(4, 100, PAGE, num_pages=3)
    first, second = sequence(0, 9, 1), sequence(1, 9, 1)
    scheduler.add(first)
    assert execute(scheduler, scheduler.schedule()) == [first]
    scheduler.add(second)
    assert scheduler.schedule().chunks == []
    assert scheduler.has_work()
    scheduler.check()
    scheduler.remove(first)
    assert [chunk.sequence for chunk in scheduler.schedule().chunks] == [second]


def test_waiting_sequences_are_admitted_in_order_even_when_a_later_one_would_fit() -> None:
    scheduler = Scheduler(4, 100, PAGE, num_pages=5)
    scheduler.add(sequence(0, 9, 8))
    scheduler.schedule()
    big, small = sequence(1, 12, 4), sequence(2, 3, 2)
    scheduler.add(big)
    scheduler.add(small)
    scheduler.schedule()
    assert scheduler.waiting == [big, small]


def test_long_prompts_are_cut_and_decodes_go_first() -> None:
    scheduler = Scheduler(4, 10, PAGE, num_pages=50)
    first, second = sequence(0, 4, 20), sequence(1, 25, 2)
    scheduler.add(first)
    execute(scheduler, scheduler.schedule())
    scheduler.add(second)
    lengths = []
    while second.generated_len == 0:
        plan = scheduler.schedule()
        lengths.append([chunk.length for chunk in plan.chunks])
        execute(scheduler, plan)
    assert lengths == [[1, 9], [1, 9], [1, 7]]


@pytest.mark.parametrize(("generated", "kv_len"), [(5, 12), (5, 8), (5, 0), (0, 3), (0, 0)])
def test_recomputed_tokens_are_what_was_known_minus_what_was_restored(generated: int, kv_len: int) -> None:
    scheduler = Scheduler(4, 3, PAGE, num_pages=50)
    resumed = sequence(0, 8, 20, ResumeState(tuple(range(generated)), 0, kv_len))
    scheduler.add(resumed)
    if resumed.incoming is not None:
        assert scheduler.schedule().chunks == [], "nothing to compute before it came"
        assert len(resumed.pages) * PAGE >= kv_len
        resumed.incoming.next = kv_len
        resumed.end_import(kv_len)
    first = scheduler.schedule()
    assert first.chunks[0].start == kv_len
    execute(scheduler, first)
    while resumed.generated_len == generated:
        execute(scheduler, scheduler.schedule())
    for _ in range(3):
        execute(scheduler, scheduler.schedule())
    assert resumed.recomputed == 8 + generated - 1 - kv_len


imports = st.tuples(st.integers(0, 19), st.integers(0, 19), st.integers(0, 19), st.integers(0, 12))


@settings(max_examples=200, deadline=None)
@given(st.lists(imports, min_size=1, max_size=8), st.integers(14, 30), st.integers(4, 30))
def test_what_is_imported_meets_what_is_computed(
    lines: list[tuple[int, int, int, int]], num_pages: int, budget: int
) -> None:
    """20 known tokens each; imports begin, end and fall short anywhere, and end at any time."""
    scheduler = Scheduler(4, budget, PAGE, num_pages)
    ends: dict[int, tuple[Sequence, int, int]] = {}
    for line, (a, b, reached, when) in enumerate(lines):
        resumed = sequence(line, 12, 20, ResumeState(tuple(range(8)), min(a, b), max(a, b)))
        scheduler.add(resumed)
        ends[line] = (resumed, min(a, b) + reached, when)
    for step in range(2000):
        for resumed, reached, when in list(ends.values()):
            running = resumed.state is SequenceState.RUNNING
            if resumed.incoming is not None and running and step >= when:
                assert len(resumed.pages) * PAGE >= resumed.incoming.stop
                resumed.incoming.next = min(reached, resumed.incoming.stop)
                before, recomputed = resumed.kv_len, resumed.recomputed
                resumed.end_import(reached)
                assert resumed.kv_len >= before
                assert resumed.recomputed == recomputed
        plan = scheduler.schedule()
        for chunk in plan.chunks:
            incoming = chunk.sequence.incoming
            assert incoming is None or chunk.start + chunk.length <= incoming.start
        for done in execute(scheduler, plan):
            scheduler.remove(done)
        scheduler.check()
        if not scheduler.has_work() and step > 12:
            break
    assert scheduler.allocator.used_count == 0
    assert all(resumed.generated_len == 20 for resumed, _, _ in ends.values())


def test_a_split_computes_its_head_while_the_tail_comes() -> None:
    scheduler = Scheduler(4, 5, PAGE, num_pages=50)
    resumed = sequence(0, 12, 20, ResumeState((1, 2, 3), 8, 12))
    scheduler.add(resumed)
    assert [chunk.length for chunk in scheduler.schedule().chunks] == [5]
    execute(scheduler, scheduler.schedule())
    resumed.incoming.next = 12  # type: ignore[union-attr]
    resumed.end_import(11)  # its last slot did not count
    starts = []
    while resumed.generated_len == 3:
        plan = scheduler.schedule()
        starts += [(chunk.start, chunk.length) for chunk in plan.chunks]
        execute(scheduler, plan)
    assert starts == [(5, 3), (11, 4)]
    assert resumed.recomputed == 8 + 3
