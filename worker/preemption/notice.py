"""Which notices are to be raised or withdrawn: pure, the clock passed in.

A source says at each poll what the cloud announces now; `observe` turns that into changes, `due` lists what the daemon has
still to be told. A notice seen again is not a new one; one that is no longer announced is withdrawn. What was raised is
raised again from time to time: repeats are harmless, and a daemon that lost its memory learns of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from context_daemon.records import Notice


@dataclass(frozen=True, slots=True)
class Delivery:
    """Something to tell the daemon: that the notice stands, or that it does not."""

    notice: Notice
    stands: bool


@dataclass(slots=True)
class _Known:
    notice: Notice
    stands: bool = True
    told: bool = False  # the daemon knows `stands`
    told_at: float = 0.0


class NoticeTracker:
    def __init__(self, repeat_s: float = 5.0) -> None:
        self._repeat_s = repeat_s
        self._known: dict[str, _Known] = {}

    def observe(self, announced: Iterable[Notice]) -> list[Delivery]:
        """Take in one successful poll. Returns what changed, for the log. An outage is not observed at all."""
        now = {notice.id: notice for notice in announced}
        changes = [self._raise(notice) for notice in now.values() if not self._stands(notice.id)]
        gone = [known for notice_id, known in self._known.items() if known.stands and notice_id not in now]
        return changes + [self._withdraw(known) for known in gone]

    def _stands(self, notice_id: str) -> bool:
        return notice_id in self._known and self._known[notice_id].stands

    def _raise(self, notice: Notice) -> Delivery:
        self._known[notice.id] = _Known(notice)
        return Delivery(notice, stands=True)

    def _withdraw(self, known: _Known) -> Delivery:
        # Told or not: a delivery whose reply was lost may have arrived, so a withdrawal is always delivered.
        known.stands, known.told = False, False
        return Delivery(known.notice, stands=False)

    def due(self, now: float) -> list[Delivery]:
        """What to tell the daemon now, the nearest deadline first."""
        waiting = [known for known in self._known.values() if self._is_due(known, now)]
        waiting.sort(key=lambda known: (known.notice.deadline, known.notice.id))
        return [Delivery(known.notice, known.stands) for known in waiting]

    def _is_due(self, known: _Known, now: float) -> bool:
        return not known.told or (known.stands and now >= known.told_at + self._repeat_s)

    def delivered(self, delivery: Delivery, now: float) -> None:
        """The daemon answered. If the notice changed meanwhile, the newer word is still due."""
        known = self._known.get(delivery.notice.id)
        if known is None or known.stands is not delivery.stands:
            return
        known.told, known.told_at = True, now
        if not known.stands:
            del self._known[delivery.notice.id]
