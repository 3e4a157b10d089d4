"""Which notices are told to the daemon, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from context_daemon.records import Notice, NoticeKind
from worker.preemption.notice import Delivery, NoticeTracker


def notice(deadline: float, kind: NoticeKind = NoticeKind.TERMINATE) -> Notice:
    return Notice("n1", kind, deadline, "aws-imds")


A, B = notice(100.0), notice(50.0)


def test_a_repeat_is_no_news() -> None:
    tracker = NoticeTracker()
    assert tracker.observe([A]) == [Delivery(A, True)]
    assert tracker.observe([notice(100.0)]) == []


def test_the_nearest_deadline_is_told_first() -> None:
    tracker = NoticeTracker()
    tracker.observe([A, B])
    assert [delivery.notice for delivery in tracker.due(0.0)] == [B, A]


def test_what_was_told_is_told_again_after_a_while() -> None:
    tracker = NoticeTracker(repeat_s=5.0)
    tracker.observe([A])
    tracker.delivered(tracker.due(0.0)[0], 0.0)
    assert tracker.due(4.9) == []
    assert tracker.due(5.0) == [Delivery(A, True)]


def test_a_withdrawal_is_told_once_even_if_the_raise_was_not() -> None:
    tracker = NoticeTracker()
    tracker.observe([A])
    assert tracker.observe([]) == [Delivery(A, False)]
    assert tracker.due(0.0) == [Delivery(A, False)]
    tracker.delivered(Delivery(A, False), 0.0)
    assert tracker.due(1000.0) == []


def test_a_late_answer_to_the_raise_does_not_swallow_the_withdrawal() -> None:
    tracker = NoticeTracker()
    tracker.observe([A])
    raised = tracker.due(0.0)[0]
    tracker.observe([])
    tracker.delivered(raised, 1.0)
    assert tracker.due(1.0) == [Delivery(A, False)]


def test_a_moved_deadline_is_a_new_notice_and_ends_the_old() -> None:
    tracker = NoticeTracker()
    tracker.observe([A])
    assert tracker.observe([B]) == [Delivery(B, True), Delivery(A, False)]


@given(st.lists(st.tuples(st.frozensets(st.sampled_from([A, B])), st.booleans()), max_size=20))
def test_the_daemon_ends_up_with_what_is_announced(polls: list[tuple[frozenset[Notice], bool]]) -> None:
    """Whatever is lost on the way: once everything due is delivered, the daemon knows exactly the last poll."""
    tracker, daemon = NoticeTracker(), set[Notice]()

    def deliver(arrives: bool) -> None:
        for delivery in tracker.due(0.0):
            (daemon.add if delivery.stands else daemon.discard)(delivery.notice)  # it arrives, its answer may not
            if arrives:
                tracker.delivered(delivery, 0.0)

    announced: frozenset[Notice] = frozenset()
    for announced, arrives in polls:
        tracker.observe(announced)
        deliver(arrives)
    deliver(True)
    assert daemon == set(announced)
    assert tracker.due(0.0) == []
