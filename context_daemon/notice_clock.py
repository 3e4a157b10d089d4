"""How long a notice takes from its node's daemon to each of the node's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from context_daemon.phases import Phase, observe
from context_daemon.records import Notice


class NoticeClock:
    """Repeats are not timed again. Keeps nothing of a notice that does not stand any more."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._raised: dict[str, float] = {}
        self._told: set[tuple[str, str]] = set()  # worker, notice

    def raised(self, notice: Notice) -> None:
        self._raised.setdefault(notice.id, self._clock())

    def told(self, worker_id: str, standing: Iterable[Notice]) -> None:
        """This is what the worker's heartbeat was answered with."""
        ids = {notice.id for notice in standing}
        self._raised = {known: at for known, at in self._raised.items() if known in ids}
        self._told = {(worker, known) for worker, known in self._told if known in ids}
        for known in self._raised.keys() - {seen for worker, seen in self._told if worker == worker_id}:
            self._told.add((worker_id, known))
            observe(Phase.NOTICE_SEEN, self._clock() - self._raised[known])
