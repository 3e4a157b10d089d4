from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from context_daemon.records import (
    CommitResult,
    CommitStatus,
    Endpoint,
    FencingToken,
    Finish,
    RequestKey,
    RequestSpec,
    SamplingParams,
    TokenCommit,
)
from worker.held import Held, KVRange
from worker.ledger import Ledger

PAGE = 16
PROMPT = tuple(range(20))


def held(line: int = 1, epoch: int = 1, tokens: list[int] | None = None) -> Held:
    spec = RequestSpec(line, f"c{line}", Endpoint.CHAT, PROMPT, SamplingParams(seed=1, max_tokens=100))
    tokens = tokens or []
    return Held(RequestKey("job", line), FencingToken(1, epoch), spec, tokens, acked=len(tokens))


def ok(commit: TokenCommit) -> CommitResult:
    return CommitResult(commit.key, CommitStatus.OK, commit.position + len(commit.tokens))


def ledger_with(item: Held, stored: int = 0) -> Ledger:
    ledger = Ledger("layout", PAGE)
    ledger.add(item, stored)
    return ledger


def stored(ledger: Ledger, item: Held, positions: int) -> None:
    """The daemon says how far the KV store is."""
    ledger.kv_stored({(item.key, item.token.epoch): positions}, ships=True)


def test_commits_go_from_the_acknowledged_position() -> None:
    item = held()
    ledger = ledger_with(item)
    ledger.append(item.key, 7)
    (first,) = ledger.pending_commits()
    ledger.append(item.key, 8)  # while the first is under way
    assert (first.position, first.tokens) == (0, (7,))
    ledger.acknowledge([first], [ok(first)])
    (second,) = ledger.pending_commits()
    assert (second.position, second.tokens) == (1, (8,))


def test_a_gap_sends_the_rest_again() -> None:
    item = held()
    ledger = ledger_with(item)
    for token in (1, 2, 3):
        ledger.append(item.key, token)
    sent = ledger.pending_commits()
    ledger.acknowledge(sent, [ok(sent[0])])
    ledger.append(item.key, 4)
    sent = ledger.pending_commits()
    ledger.acknowledge(sent, [CommitResult(item.key, CommitStatus.GAP, 1)])
    (again,) = ledger.pending_commits()
    assert (again.position, again.tokens) == (1, (2, 3, 4))


def test_fenced_and_diverged_are_dropped_and_told() -> None:
    one, two = held(1), held(2)
    ledger = ledger_with(one)
    ledger.add(two, 0)
    ledger.append(one.key, 1)
    ledger.append(two.key, 1)
    sent = ledger.pending_commits()
    statuses = {one.key: CommitStatus.FENCED, two.key: CommitStatus.DIVERGED}
    outcome = ledger.acknowledge(sent, [CommitResult(c.key, statuses[c.key], 1) for c in sent])
    assert outcome.fenced == [one.key] and outcome.diverged == [(two.key, 1)]
    assert ledger.all() == []


def test_an_answer_for_an_older_owner_changes_nothing() -> None:
    item = held(epoch=1)
    ledger = ledger_with(item)
    ledger.append(item.key, 1)
    sent = ledger.pending_commits()
    ledger.drop(item.key, item.token)
    ledger.add(held(epoch=3), 0)
    outcome = ledger.acknowledge(sent, [CommitResult(item.key, CommitStatus.FENCED, 0)])
    assert outcome.fenced == [] and ledger.get(item.key) is not None


def test_watermark_claims_only_acknowledged_slots_and_rides_on_the_next_commit() -> None:
    item = held()
    ledger = ledger_with(item)
    ledger.computed({item.key: 20})
    (kv,) = ledger.take_kv(1000)
    ledger.append(item.key, 5)
    (commit,) = ledger.pending_commits()
    assert commit.watermark is None
    ledger.acknowledge([commit], [ok(commit)])
    ledger.kv_written([kv])
    ledger.append(item.key, 6)
    (commit,) = ledger.pending_commits()
    assert commit.watermark is None, "in the arena is not in the KV store"
    stored(ledger, item, 20)
    (commit,) = ledger.pending_commits()
    assert commit.watermark is not None and commit.watermark.positions == 20


def test_a_prefill_commits_its_watermark_alone() -> None:
    item = held()
    ledger = ledger_with(item)
    ledger.computed({item.key: 16})
    ledger.kv_written(ledger.take_kv(1000))
    assert ledger.kv_unstored() == [(item.key, 1)]
    stored(ledger, item, 16)
    assert ledger.kv_unstored() == []
    (commit,) = ledger.pending_commits()
    assert commit.tokens == () and commit.watermark is not None and commit.watermark.positions == 16
    ledger.acknowledge([commit], [ok(commit)])
    assert ledger.pending_commits() == []


def test_resumed_sequence_writes_its_open_page_again() -> None:
    item = held(epoch=2, tokens=[1, 2, 3])
    ledger = ledger_with(item, stored=21)
    ledger.computed({item.key: 22})
    (kv,) = ledger.take_kv(1000)
    assert (kv.start, kv.stop, kv.epoch) == (16, 22, 2)


def test_skipped_kv_is_filled_in_later_without_holes() -> None:
    item = held()
    ledger = ledger_with(item)
    ledger.computed({item.key: 19})
    (first,) = ledger.take_kv(10)
    assert ledger.take_kv(0) == []
    (second,) = ledger.take_kv(100)
    assert (first.start, first.stop, second.start, second.stop) == (0, 10, 10, 19)


def test_what_found_no_room_is_due_again_and_what_came_behind_hides_no_hole() -> None:
    item = held()
    ledger = ledger_with(item)
    ledger.computed({item.key: 10})
    first = ledger.take_kv(100)
    ledger.computed({item.key: 15})
    second = ledger.take_kv(100)
    ledger.kv_refused(first)
    ledger.kv_written(second)  # was written behind it
    stored(ledger, item, 15)
    assert item.kv_arena == 0 and item.kv_stored == 0
    (again,) = ledger.take_kv(100)
    assert (again.start, again.stop) == (0, 15)


def test_lost_kv_store_makes_everything_due_again() -> None:
    item = held(epoch=2, tokens=[1])
    ledger = ledger_with(item, stored=20)
    ledger.kv_lost()
    ledger.computed({item.key: 20})
    (kv,) = ledger.take_kv(100)
    assert (kv.start, kv.stop, item.first_page) == (0, 20, 0)


def test_a_lost_kv_server_makes_only_its_requests_due_again_and_is_heard_of_once() -> None:
    items = [held(line=line, epoch=2, tokens=[1]) for line in (1, 2)]
    ledger = Ledger("lay", 16)
    for item in items:
        ledger.add(item, 0)
        ledger.computed({item.key: 20})
    ledger.kv_written(ledger.take_kv(100))
    ledger.kv_stored({item.owned: 20 for item in items}, ships=True)
    lost = ledger.kv_newly_lost({items[0].owned: 1, items[1].owned: 0, (items[1].key, 1): 3})
    assert lost == {items[0].owned}, "what an older lease lost is nothing"
    ledger.kv_lost(lost)
    assert [item.kv_stored for item in items] == [0, 20]
    assert [(kv.key, kv.start, kv.stop) for kv in ledger.take_kv(100)] == [(items[0].key, 0, 20)]
    assert ledger.kv_newly_lost({items[0].owned: 1}) == set()
    ledger.kv_lost()
    assert ledger.kv_newly_lost({items[0].owned: 1}) == {items[0].owned}, "a new daemon counts anew"


def test_finished_sequence_takes_no_more_tokens_and_leaves_when_acknowledged() -> None:
    item = held()
    ledger = ledger_with(item)
    ledger.append(item.key, 1)
    ledger.finish(item.key, Finish(True, b"{}"))
    assert ledger.append(item.key, 2) is None
    sent = ledger.pending_commits()
    assert sent[0].tokens == (1,) and sent[0].finish is not None
    assert ledger.acknowledge(sent, [ok(sent[0])]).finished == [item.key]


@given(
    st.lists(
        st.sampled_from(["token", "lose", "commit", "late", "kv", "kv_stored", "kv_refused", "kv_lost"]), max_size=80
    )
)
def test_any_interleaving_reaches_the_store_whole_and_in_order(actions: list[str]) -> None:
    item = held()
    ledger = ledger_with(item)
    store: list[int] = []
    kv_store: set[int] = set()
    late: TokenCommit | None = None

    def write(commit: TokenCommit) -> CommitResult:
        """The store's contract: a prefix that is there is a repeat, a gap is refused."""
        if commit.position > len(store):
            return CommitResult(commit.key, CommitStatus.GAP, len(store))
        overlap = store[commit.position : commit.position + len(commit.tokens)]
        assert tuple(overlap) == commit.tokens[: len(overlap)]
        store.extend(commit.tokens[len(overlap) :])
        if commit.watermark:
            assert set(range(commit.watermark.positions)) <= kv_store
            assert commit.watermark.positions <= len(PROMPT) + len(store) - 1
        return ok(commit)

    flying: list[KVRange] = []
    for action in [*actions, "commit"]:
        if action == "token":
            ledger.append(item.key, len(item.tokens))
            ledger.computed({item.key: item.total - 1})
        elif action == "kv":
            ledger.kv_written(flying or ledger.take_kv(7))
            flying = ledger.take_kv(3)
        elif action == "kv_stored":
            kv_store.update(range(item.kv_arena))
            stored(ledger, item, item.kv_arena)
        elif action == "kv_refused":
            ledger.kv_refused(flying)
            flying = []
        elif action == "kv_lost":
            kv_store.clear()
            flying = []
            ledger.kv_lost()
            item.watermark_sent = 0
        elif sent := ledger.pending_commits():
            results = [write(commit) for commit in sent]
            if action == "commit":
                ledger.acknowledge(sent, results)
            elif action == "late":
                late = sent[0]
            if late is not None and action == "lose":
                write(late)
                late = None
    assert store == item.tokens


def test_back_pressure_is_measured_per_sequence() -> None:
    item = held()
    ledger = ledger_with(item)
    for token in range(5):
        ledger.append(item.key, token)
    assert ledger.lag() == 5
    assert ledger.wait_below_lag(6, timeout=0) and not ledger.wait_below_lag(5, timeout=0)


def test_the_last_token_and_the_end_go_in_one_commit() -> None:
    item = held()
    ledger = ledger_with(item)
    ledger.append(item.key, 1, Finish(True, b"{}"))
    (commit,) = ledger.pending_commits()
    assert commit.tokens == (1,) and commit.finish == Finish(True, b"{}")


def test_the_end_of_a_sequence_that_was_fenced_meanwhile_is_nothing() -> None:
    item = held()
    ledger = ledger_with(item)
    ledger.drop(item.key, item.token)
    ledger.finish(item.key, Finish(True, b"{}"))
    assert ledger.append(item.key, 1, Finish(True, b"{}")) is None


def test_dropping_an_older_lease_leaves_the_newer_one() -> None:
    old, new = held(epoch=1), held(epoch=3)
    ledger = ledger_with(old)
    ledger.add(new, 0)
    ledger.drop(old.key, old.token)
    assert ledger.holds(new) and not ledger.holds(old)


def test_a_frozen_sequence_is_exported_by_name_only_and_waits_for_the_store_only_where_kv_is_shipped() -> None:
    item = held()
    ledger = ledger_with(item)
    ledger.computed({item.key: 19})
    under_way = ledger.take_kv(10)
    ledger.freeze(item.key)
    assert ledger.take_kv(100) == [], "the engine has let go of it"
    (rest,) = ledger.take_kv(100, item.key)
    ledger.kv_written([*under_way, rest])
    assert not ledger.wait_flushed(item.key, 0)
    ledger.kv_stored({}, ships=False)
    assert ledger.wait_flushed(item.key, 0)
    ledger.kv_stored({(item.key, 1): 19, (item.key, 2): 3}, ships=True)
    assert ledger.wait_flushed(item.key, 0)


def test_a_frozen_sequence_waits_for_no_kv_that_cannot_come_back() -> None:
    item = held()
    ledger = ledger_with(item)
    ledger.computed({item.key: 20})
    ledger.freeze(item.key)
    assert not ledger.wait_flushed(item.key, 0)
    ledger.kv_lost()
    assert ledger.wait_flushed(item.key, 0) and ledger.watermark(item) is None


def test_a_frozen_sequence_goes_without_what_found_no_room() -> None:
    item = held()
    ledger = ledger_with(item)
    ledger.computed({item.key: 19})
    written = ledger.take_kv(10)
    ledger.freeze(item.key)
    ledger.kv_refused(ledger.take_kv(100, item.key))
    ledger.kv_written(written)
    stored(ledger, item, 10)
    mark = ledger.watermark(item)
    assert ledger.wait_flushed(item.key, 0) and mark is not None and mark.positions == 10


def test_a_hole_is_filled_page_by_page_while_it_is_resident_and_once_at_a_time() -> None:
    item = held()
    ledger = Ledger("lay", 4)
    ledger.add(item, 0)
    ledger.computed({item.key: 20})
    ledger.kv_written(ledger.take_kv(100))
    ledger.kv_holes({item.owned: (4, 12)})
    due = ledger.take_kv(6)
    assert [(part.start, part.stop) for part in due] == [(4, 8)], "as many pages as there is room for"
    ledger.kv_holes({item.owned: (4, 12)})
    assert ledger.take_kv(100) == [], "it is under way"
    ledger.kv_refused(due)
    assert item.kv_queued == 20, "what lies behind is not written again"
    ledger.kv_holes({item.owned: (4, 12)})
    ledger.computed({item.key: 8})
    assert [(part.start, part.stop) for part in ledger.take_kv(100)] == [(4, 8)], "what is still resident of it"
    ledger.kv_refused(due)
    ledger.kv_holes({item.owned: (4, 12)})
    assert ledger.take_kv(100) == [], "not resident"
