"""How long a notice takes from its daemon to a worker: once for each, and nothing is kept of what is over."""

from __future__ import annotations

from prometheus_client import REGISTRY

from context_daemon.notice_clock import NoticeClock
from context_daemon.records import Notice, NoticeKind


def seen() -> tuple[float, float]:
    labels = {"phase": "notice_seen"}
    count, total = (REGISTRY.get_sample_value(f"tideover_phase_seconds_{part}", labels) for part in ("count", "sum"))
    return count or 0.0, total or 0.0


def test_each_worker_is_timed_once_for_each_notice() -> None:
    now = [100.0]
    clock = NoticeClock(lambda: now[0])
    notice = Notice("n1", NoticeKind.TERMINATE, 9e9, "test")
    elsewhere = Notice("n1", NoticeKind.STOP, 9e9, "store")  # heard of through the store: nobody knows since when
    count, total = seen()
    clock.raised(notice)
    now[0] += 0.25
    clock.raised(notice)  # a repeat is no new event
    for worker in ("a", "a", "b", "a"):
        clock.told(worker, [notice, elsewhere])
    assert seen() == (count + 2, total + 0.5)
    clock.told("a", [])
    clock.raised(notice)  # withdrawn, and raised again
    now[0] += 1.0
    clock.told("a", [notice])
    assert seen() == (count + 3, total + 1.5)
    clock.told("a", [])
    assert not clock._raised and not clock._told
