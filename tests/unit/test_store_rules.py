from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from context_daemon.keys import parse_rid, rid
from context_daemon.lines import cancelled_line
from context_daemon.records import JobState, KVSegment, KVWatermark, RequestKey, RequestState
from context_daemon.states import (
    ACTIVE_JOB_STATES,
    TERMINAL_JOB_STATES,
    TERMINAL_REQUEST_STATES,
    finished_state,
    job_may,
    request_may,
)
from context_daemon.watermark import PageIndex, advance, epoch_of_page


def test_terminal_states() -> None:
    assert {JobState.FAILED, JobState.COMPLETED, JobState.CANCELLED} == TERMINAL_JOB_STATES
    assert {RequestState.COMPLETED, RequestState.FAILED, RequestState.CANCELLED} == TERMINAL_REQUEST_STATES
    for job in JobState:
        after = finished_state(job)
        assert (after is not None) == (job in ACTIVE_JOB_STATES)
        assert after is None or (after in TERMINAL_JOB_STATES and job_may(job, after))
    assert not job_may(JobState.CANCELLING, JobState.COMPLETED)
    assert not request_may(RequestState.READY, RequestState.COMPLETED)  # only an owner completes


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 60), st.integers(0, 60), st.integers(0, 4)), max_size=12))
def test_watermark_properties(marks: list[tuple[int, int, int, int]]) -> None:
    index, epoch, known = PageIndex(), 1, 1
    for step, grown, positions, first_page in marks:
        new_epoch, known = epoch + step // 4, known + grown
        before, epoch = index, new_epoch
        index = advance(index, epoch, known, KVWatermark(positions, first_page, "lay"))
        assert 0 <= index.watermark <= known - 1
        if before.epoch == epoch:
            assert index.watermark >= before.watermark
        assert index.segments[-1].epoch == epoch and index.segments[-1].first_page <= first_page
        pages = [segment.first_page for segment in index.segments]
        assert pages == sorted(set(pages))
        assert index.watermark == 0 or pages[0] == 0


def test_epoch_of_page() -> None:
    segments = (KVSegment(1, 0), KVSegment(3, 2))
    assert [epoch_of_page(segments, page) for page in range(4)] == [1, 1, 3, 3]
    assert epoch_of_page((KVSegment(3, 2),), 1) is None


def test_rid_round_trip() -> None:
    for key in (RequestKey("j", 1), RequestKey("j", 12, 3)):
        assert parse_rid("j", rid(key)) == key


def test_cancelled_line_is_one_json_line() -> None:
    line = cancelled_line(RequestKey("j", 1), 'a"\n/é')
    assert b"\n" not in line and b'"custom_id":"a\\"\\n/' in line
