from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from context_daemon.records import RequestKey
from context_daemon.store import ReadyRequest
from orchestrator.routing.placement import PlacementPolicy, WorkerView, choose, drain_targets, pages_needed, plan

POLICY = PlacementPolicy(class_patience_s=60.0, lookahead_tokens=64)


def worker(name: str, **changes: object) -> WorkerView:
    view = WorkerView(name, "cpu-a", max_num_seqs=4, pages_total=100, page_size=16)
    return replace(view, **changes)  # type: ignore[arg-type]


def ready(line: int, **changes: object) -> ReadyRequest:
    fields: dict[str, object] = {
        "key": RequestKey("job", line),
        "epoch": 0,
        "prompt_tokens": 30,
        "tokens": 0,
        "max_tokens": 40,
        "numerics_class": "",
        "attempts": 0,
        "interruptions": 0,
        "ready_since": 0.0,
        "avoid_worker": "",
    }
    return ReadyRequest(**(fields | changes))  # type: ignore[arg-type]


def test_spreads_over_the_workers_with_most_room() -> None:
    leases = plan([ready(n) for n in range(1, 5)], [worker("a"), worker("b", assigned=2)], 0.0, POLICY)
    assert [lease.worker_id for lease in leases] == ["a", "a", "b", "a"]


def test_never_places_on_a_worker_under_notice() -> None:
    assert plan([ready(1)], [worker("a", accepting=False)], 0.0, POLICY) == []


def test_a_hinted_worker_comes_last() -> None:
    picked = choose(ready(1), [worker("a", hinted=True), worker("b", assigned=3)], 0.0, POLICY)
    assert picked is not None and picked.worker_id == "b"


def test_request_with_tokens_stays_in_its_numerics_class() -> None:
    other = worker("b", numerics_class="cpu-b")
    started = ready(1, tokens=5, numerics_class="cpu-a", ready_since=0.0)
    assert choose(started, [other, worker("a", assigned=4)], 1e6, POLICY) is None
    assert choose(started, [other], 59.0, POLICY) is None


def test_crossing_classes_after_patience_is_marked_inexact() -> None:
    started = ready(1, tokens=5, numerics_class="cpu-a", ready_since=0.0)
    (lease,) = plan([started], [worker("b", numerics_class="cpu-b")], 61.0, POLICY)
    assert not lease.exact and lease.numerics_class == "cpu-b"


def test_request_without_tokens_may_go_anywhere_and_stays_exact() -> None:
    (lease,) = plan([ready(1, numerics_class="cpu-a")], [worker("b", numerics_class="cpu-b")], 0.0, POLICY)
    assert lease.exact


def test_a_suspect_runs_alone() -> None:
    suspect = ready(1, attempts=1)
    assert choose(suspect, [worker("a", assigned=1)], 0.0, POLICY) is None
    leases = plan([suspect, ready(2)], [worker("a")], 0.0, POLICY)
    assert [lease.key.line for lease in leases] == [1]


def test_waits_when_pages_are_promised_away_unless_the_worker_is_empty() -> None:
    big = ready(1, prompt_tokens=2000)
    assert choose(big, [worker("a", assigned=1, pages_promised=10)], 0.0, POLICY) is None
    assert choose(big, [worker("a")], 0.0, POLICY) is not None


def test_drain_targets_avoid_the_worker_just_left() -> None:
    leaving = [ready(1, avoid_worker="a", tokens=3, numerics_class="cpu-a")]
    assert drain_targets(leaving, [worker("a"), worker("b")], 0.0, POLICY, {}) == {RequestKey("job", 1): "b"}


def test_drain_targets_are_kept_as_long_as_they_take_the_request() -> None:
    leaving, kept = [ready(1, tokens=3, numerics_class="cpu-a")], RequestKey("job", 1)
    roomy = worker("b", max_num_seqs=99)
    for former, expected in (
        (worker("c"), "c"),
        (worker("c", hinted=True), "b"),
        (worker("c", accepting=False), "b"),
        (worker("c", numerics_class="cpu-x"), "b"),
        (worker("d"), "b"),  # c is gone
    ):
        assert drain_targets(leaving, [former, roomy], 0.0, POLICY, {kept: "c"}) == {kept: expected}


def test_pages_needed_counts_a_bounded_lookahead() -> None:
    assert pages_needed(30, 0, 10_000, 16, 64) == 6
    assert pages_needed(30, 8, 10, 16, 64) == 3


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 3), st.sampled_from(["", "x", "y"])), max_size=30),
    st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.sampled_from(["x", "y"])), max_size=5),
)
def test_never_overfills_and_never_leases_twice(
    requests: list[tuple[int, int, str]], fleet: list[tuple[int, bool, str]]
) -> None:
    waiting = [
        ready(n, prompt_tokens=p, attempts=max(0, a - 1), numerics_class=c, tokens=5 if c else 0)
        for n, (p, a, c) in enumerate(requests)
    ]
    workers = [
        worker(f"w{n}", max_num_seqs=seqs, accepting=up, numerics_class=c, pages_total=40)
        for n, (seqs, up, c) in enumerate(fleet)
    ]
    leases = plan(waiting, workers, 0.0, POLICY)
    assert len({lease.key for lease in leases}) == len(leases)
    by_key = {request.key: request for request in waiting}
    for view in workers:
        mine = [by_key[lease.key] for lease in leases if lease.worker_id == view.worker_id]
        assert len(mine) <= view.max_num_seqs
        assert not mine or view.accepting
        assert all(r.numerics_class in ("", view.numerics_class) for r in mine)
        assert len(mine) <= 1 or not any(r.attempts for r in mine)
        pages = sum(pages_needed(r.prompt_tokens, r.tokens, r.max_tokens, 16, 64) for r in mine)
        assert len(mine) <= 1 or pages <= view.pages_total
