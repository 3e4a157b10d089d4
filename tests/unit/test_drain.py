from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from context_daemon.records import RequestKey
from worker.drain import Action, DrainPace, DrainSequence, cut_over_at, plan

PACE = DrainPace(step_s=0.1, flush_s=0.2, reserve_s=1.0)
KEY = RequestKey("job", 1)


def test_short_requests_finish_here() -> None:
    assert plan(0.0, 30.0, PACE, [DrainSequence(KEY, 50)]) == {KEY: Action.FINISH_HERE}


def test_long_requests_decode_on_until_the_cut_over() -> None:
    at = cut_over_at(30.0, PACE)
    long = [DrainSequence(KEY, 5000)]
    assert plan(at - 0.01, 30.0, PACE, long) == {KEY: Action.DECODE_ON}
    assert plan(at, 30.0, PACE, long) == {KEY: Action.HAND_OVER}


def test_a_deadline_already_past_hands_over_at_once() -> None:
    assert plan(10.0, 5.0, PACE, [DrainSequence(KEY, 1)]) == {KEY: Action.HAND_OVER}


@given(st.floats(0, 200), st.floats(0.01, 2), st.floats(0.01, 5), st.integers(1, 2000))
def test_work_is_used_but_the_flush_always_has_its_time(
    deadline: float, step_s: float, flush_s: float, remaining: int
) -> None:
    pace = DrainPace(step_s, flush_s)
    action = plan(0.0, deadline, pace, [DrainSequence(KEY, remaining)])[KEY]
    left_after_one_more_step = deadline - step_s
    if action is not Action.HAND_OVER:
        assert left_after_one_more_step >= flush_s
